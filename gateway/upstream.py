"""
One upstream, and those that serve one model: whether to ask, whom to ask, and the asking itself.

    Upstream    its address and key, how it is doing, what it has in its hands
    Pool        the upstreams of a model: chooses

Sent is a request with an allow-listed path, our own headers, and nothing of the client's but the body.  Redirects are
not followed, cookies not kept, proxies of the environment not used.
"""

import asyncio
import hashlib
import io
from collections import Counter
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

import aiohttp
import structlog

from gateway import errors
from gateway.config import UpstreamOptions
from gateway.upstream_breaker import Breaker
from gateway.upstream_errors import Failure, resting
from gateway.upstream_request import PATHS, Kind
from telemetry import clock
from telemetry.vocabulary import UpstreamView

PROBE_TIMEOUT_S = 5.0
PROBE_PATH = "/models"
PROBE_BYTES_MAX = 1024 * 1024
PROBES_LOST_MAX = 3
"""Probes without an answer, in a row; then nobody need wait for it."""
REST_MS_MAX = 30_000
"""However long an upstream wants to be left alone, so soon it is asked again."""

_log = structlog.get_logger("pellucid.gateway")


class Upstream:
    """One server."""

    def __init__(self, options: UpstreamOptions, key: str) -> None:
        self.options = options
        self.name = options.name
        self.breaker = Breaker()
        self.in_flight = 0
        self.results: Counter[str] = Counter()
        """What came of the attempts, by `telemetry.vocabulary.UPSTREAM_RESULTS`."""
        self.secrets = tuple(filter(None, (key, options.base_url, urlsplit(options.url).netloc)))
        """What no client may read."""
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._heard = False  # of it at all
        self._probes_lost = 0  # in a row
        self._reason = "has not answered yet"  # why the last attempt failed, for operators
        self.doubt = ""
        """What the last answer was that no other upstream has given a better one than; empty: a good one."""
        self.rests_until_ns = 0
        """Until then it wants to be left alone, as it said with a 429."""
        self._timeout = aiohttp.ClientTimeout(total=None, connect=options.connect_timeout_s)

    @property
    def model(self) -> str:
        """As the upstream calls it."""
        return self.options.upstream_model or self.options.model

    def rest_ms(self, now_ns: int) -> int:
        """How long it still wants to be left alone."""
        return max(0, -(-(self.rests_until_ns - now_ns) // 1_000_000))

    @property
    def lost(self) -> bool:
        """Whether it says nothing to anybody: it may be frozen, or the way to it cut."""
        return self._probes_lost >= PROBES_LOST_MAX

    def trouble(self) -> str:
        """Why it would not serve a request now; empty: it would."""
        if self.breaker.is_open or not self._heard:
            return self._reason
        return ""

    def view(self) -> UpstreamView:
        """For `/metrics`."""
        return UpstreamView(name=self.name, up=not self.trouble(), in_flight=self.in_flight, results=dict(self.results))

    # ---- how it is doing

    def answered(self) -> None:
        """An answer has begun."""
        self._heard, self._probes_lost, self.doubt = True, 0, ""
        if self.breaker.answered():
            _log.info("upstream answers again", upstream=self.name)

    def failed(self, failure: Failure, trial: int = 0) -> None:
        """An attempt has come to nothing."""
        now_ns = clock.now_ns()
        if failure.rest_ms:
            self.rests_until_ns = now_ns + min(failure.rest_ms, REST_MS_MAX) * 1_000_000
        match failure.verdict:
            case "sound":
                self.answered()
                self.breaker.completed()
            case "none":
                self.breaker.abandoned(trial)
            case "suspect":
                self._reason = self.doubt = failure.reason
                self.breaker.abandoned(trial)
            case "fault":
                self.blamed(failure, trial)

    def blamed(self, failure: Failure, trial: int = 0) -> None:
        """An attempt has come to nothing, and that was not the request's fault."""
        self._reason = failure.reason
        if self.breaker.failed(clock.now_ns(), trial):
            _log.warning("upstream is left alone", upstream=self.name, reason=failure.reason)

    # ---- asking it

    def post(
        self, session: aiohttp.ClientSession, kind: Kind, body: bytes, headers: Mapping[str, str], context: object
    ) -> "asyncio.Task[aiohttp.ClientResponse]":
        """Send a request; done when the head of the answer is there.  `context` is for the session's traces."""
        url = self._url(PATHS[kind])
        headers = {**self._headers, **headers, "content-type": "application/json"}

        async def sending() -> aiohttp.ClientResponse:
            return await session.post(
                url,
                data=io.BytesIO(body),  # is sent in pieces: of bytes as such the library takes 1 MiB
                headers=headers,
                allow_redirects=False,
                timeout=self._timeout,
                trace_request_ctx=context,
            )

        return asyncio.create_task(sending(), name=f"ask {self.name}")

    async def probe(self, session: aiohttp.ClientSession) -> None:
        """Ask for its models, to see whether it is there."""
        failure: Failure | None = None
        timeout = aiohttp.ClientTimeout(total=max(PROBE_TIMEOUT_S, self.options.connect_timeout_s))
        try:
            async with session.get(
                self._url(PROBE_PATH), headers=self._headers, allow_redirects=False, timeout=timeout
            ) as response:
                if response.status >= 500 or response.status == 401:
                    failure = Failure(f"answers {response.status} to GET {PROBE_PATH}", errors.no_engine())
                await response.content.read(PROBE_BYTES_MAX)
                self._probes_lost = 0
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._probes_lost += 1
            failure = Failure(f"does not answer GET {PROBE_PATH}: {type(error).__name__}", errors.no_engine())
        if failure is not None:
            self.failed(failure)
        else:
            self._heard = True
            self.breaker.probed(clock.now_ns())

    def _url(self, path: str) -> str:
        return self.options.base_url + path


class Pool:
    """The upstreams of one model."""

    def __init__(self, model: str, upstreams: list[Upstream]) -> None:
        self.model = model
        self.upstreams = upstreams

    def choose(self, affinity: bytes, tried: Collection[Upstream], now_ns: int) -> Upstream:
        """
        The one with the fewest requests in flight; among equals always the same one for an affinity.

        Raises ApiError: none is left that could be asked.
        """
        open_ones = [one for one in self.upstreams if one not in tried and one.breaker.admits(now_ns)]
        if not open_ones:
            raise errors.no_engine()
        rested = [one for one in open_ones if not one.rest_ms(now_ns)]
        if not rested:
            raise resting(min(one.rest_ms(now_ns) for one in open_ones))
        free = [one for one in rested if one.in_flight < one.options.requests_max]
        if not free:
            raise errors.overloaded("The servers of this model have all the requests that they take; try again later.")
        least = min(one.in_flight for one in free)
        return max((one for one in free if one.in_flight == least), key=lambda one: _liking(one.name, affinity))


def _liking(name: str, affinity: bytes) -> bytes:
    """Rendezvous hashing: when an upstream comes or goes, only its own requests move."""
    return hashlib.blake2b(affinity + name.encode(), digest_size=8).digest()
