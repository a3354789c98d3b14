"""
The one way to the server: a script, its keys and arguments in; a list of strings or `Unavailable` out.

No retries: a request that has waited once is better served without the server.  A breaker (cache.breaker) remembers.
While it is open a probe writes one key a second; the first success closes it.  Reading would not do: a replica answers
PING and takes no writes.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextvars import Context
from typing import Literal

import msgspec

from cache.breaker import Breaker
from cache.errors import ScriptMissing, Unavailable
from cache.lines import COMMAND_TIMEOUT_MS, CONNECT_TIMEOUT_MS, CONNECTIONS_MAX, line_of
from cache.redis_url import RedisUrl
from telemetry import clock
from telemetry.logs import get_logger

PROBE_INTERVAL_MS = 1000
PROBE_TIMEOUT_MS = 800
"""Longer than a command's: a probe also finds the way round a dead sentinel or cluster node."""
_PROBE = "pellucid:probe:"
_log = get_logger("pellucid.cache")


class Script:
    """A Lua script.  It answers a list of strings, takes all its keys in KEYS, and they share one hash tag."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the server."""

    state: Literal["closed", "open"]
    """Of the breaker: closed is well."""
    reason: str
    """Of the last failure; empty while all is well."""
    openings: int
    """How often the breaker has opened."""
    failed: int
    """Commands that nobody could rely on, probes not counted."""


class Store:
    """A server, a cluster, or what sentinels say is the master."""

    def __init__(
        self,
        url: RedisUrl,
        *,
        connections_max: int = CONNECTIONS_MAX,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        command_timeout_ms: int = COMMAND_TIMEOUT_MS,
        probe_interval_ms: int = PROBE_INTERVAL_MS,
        breaker: Breaker | None = None,
    ) -> None:
        self.up = asyncio.Event()
        """Set while the breaker is closed."""
        self.up.set()
        self._url = url
        self._line = line_of(
            url,
            connections_max=connections_max,
            connect_timeout_ms=connect_timeout_ms,
            command_timeout_ms=command_timeout_ms,
        )
        self._timeout_s = command_timeout_ms / 1000
        self._probe_interval_s = probe_interval_ms / 1000
        self._breaker = breaker or Breaker()
        self._reason = ""
        self._failed = 0
        self._probing: asyncio.Task[None] | None = None
        self._probe_key = _PROBE + "{pellucid}"

    @property
    def health(self) -> Health:
        """The breaker's state, why, and how often."""
        state: Literal["closed", "open"] = "open" if self._breaker.is_open else "closed"
        return Health(state=state, reason=self._reason, openings=self._breaker.openings, failed=self._failed)

    async def start(self) -> bool:
        """Ask once, so that no request is the first to find out.  Whether the server is there; it may come later."""
        try:
            await self._probe()
        except Unavailable as error:
            self._opened(str(error))
            return False
        return True

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[str]) -> list[bytes]:
        """
        Run a script.  Raises Unavailable; `maybe_ran` says whether the script may have run all the same.

        Who is cancelled does not know either.

        Args:
            script: what to run.
            keys: all of one hash tag.
            args: numbers as decimal text.
        """
        if self._breaker.is_open:
            raise Unavailable(self._reason)
        try:
            reply = await self._evaluate(script, (len(keys), *keys, *args))
        except Unavailable as error:
            self._failed += 1
            self._probe_key = _PROBE + _tag(keys[0])
            if self._breaker.failed(clock.now_ns()):
                self._opened(str(error))
            raise
        return reply

    async def aclose(self) -> None:
        """Let what runs end, which it does within its deadline, and disconnect."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing})
        await self._line.aclose()

    async def _evaluate(self, script: Script, words: Sequence[str | int]) -> list[bytes]:
        try:
            reply = await self._line.execute(("EVALSHA", script.sha, *words), self._timeout_s)
        except ScriptMissing:
            reply = await self._line.execute(("EVAL", script.source, *words), self._timeout_s)
        if not isinstance(reply, list):
            raise Unavailable("what came from it is no answer of our script", maybe_ran=True)
        return reply

    async def _probe(self) -> None:
        words = ("SET", self._probe_key, "1", "PX", str(PROBE_INTERVAL_MS))
        await self._line.execute(words, PROBE_TIMEOUT_MS / 1000)

    def _opened(self, reason: str) -> None:
        self._breaker.open()
        self._reason = reason
        self.up.clear()
        _log.warning("redis unavailable", server=repr(self._url), reason=reason)
        if self._probing is None or self._probing.done():
            # In no request's context: what it logs is nobody's doing.
            self._probing = asyncio.create_task(self._probe_until_up(), name="redis probe", context=Context())

    async def _probe_until_up(self) -> None:
        opened_ns = clock.now_ns()
        while self._breaker.is_open:
            await asyncio.sleep(self._probe_interval_s)
            try:
                await self._probe()
            except Unavailable as error:
                self._reason = str(error)
                continue
            except Exception:  # noqa: BLE001  Whatever it is, it must not be the last look that anybody takes.
                _log.exception("the probe has failed")
                continue
            self._breaker.close()
            self._reason = ""
            self.up.set()
            _log.info("redis available again", server=repr(self._url), after_ms=(clock.now_ns() - opened_ns) // 10**6)


def _tag(name: str) -> str:
    """The hash tag of a key's name, braces included: on a cluster, the probe goes where the failure was."""
    return name[name.index("{") : name.index("}") + 1]
