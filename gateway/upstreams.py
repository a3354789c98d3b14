"""
All upstreams: by model, with their probes, their deadlines and what is said of them.
"""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace

import aiohttp
import structlog

from gateway.config import GatewayOptions, elsewhere
from gateway.upstream import Pool, Upstream
from gateway.upstream_key import read_key
from gateway.upstream_relay import Relay
from gateway.wire import Json
from telemetry import clock
from telemetry.vocabulary import UpstreamView

READ_BYTES = 64 * 1024
"""Of one answer; twice as much is buffered when the client reads slowly, then the upstream has to wait."""
HEAD_LINE_BYTES_MAX = 8190
HEADERS_MAX = 128
KEEP_ALIVE_S = 4.0
"""Below what servers do: uvicorn and llama.cpp hang up after 5 s, and who is first must not be a matter of chance."""
TICK_MIN_S, TICK_MAX_S = 0.02, 1.0

_log = structlog.get_logger("pellucid.gateway")


class Upstreams:
    """Everything about upstreams that outlives a request."""

    def __init__(self, options: GatewayOptions, environ: Mapping[str, str]) -> None:
        """Raises Misconfigured."""
        self.upstreams: list[Upstream] = []
        self.pools: dict[str, Pool] = {}
        self.relays: dict[Relay, None] = {}
        """Under way; in order."""
        self._request_timeout_s = options.request_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        asked = elsewhere(options)
        for one in options.upstreams:
            if one.model not in asked:
                _log.warning("upstream is never asked: its model is served here", upstream=one.name, model=one.model)
                continue
            upstream = Upstream(one, read_key(one, environ))
            self.upstreams.append(upstream)
            self.pools.setdefault(one.model, Pool(one.model, [])).upstreams.append(upstream)

    def __bool__(self) -> bool:
        return bool(self.pools)

    # ---- its life

    async def start(self) -> None:
        """Begin to look after them."""
        if not self.upstreams:
            return
        traces = aiohttp.TraceConfig()
        traces.on_request_headers_sent.append(_on_sent)
        traces.on_connection_reuseconn.append(_on_reused)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),  # requests_max is the limit
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"user-agent": "pellucid", "accept-encoding": "identity"},
            read_bufsize=READ_BYTES,
            max_line_size=HEAD_LINE_BYTES_MAX,
            max_field_size=HEAD_LINE_BYTES_MAX,
            max_headers=HEADERS_MAX,
            trace_configs=[traces],
        )
        self._tasks = [asyncio.create_task(self._probe(one), name=f"probe {one.name}") for one in self.upstreams]
        self._tasks.append(asyncio.create_task(self._watch(), name="upstream deadlines"))

    async def stop(self) -> None:
        """After the last request."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """For requests."""
        assert self._session is not None, "started before anything is asked"
        return self._session

    async def _probe(self, upstream: Upstream) -> None:
        while True:
            await upstream.probe(self.session)
            await asyncio.sleep(upstream.options.probe_interval_s)

    async def _watch(self) -> None:
        """End what is over its deadline."""
        limits_s = [self._request_timeout_s]
        for one in self.upstreams:
            limits_s += [one.options.first_byte_timeout_s, one.options.idle_timeout_s]
        tick_s = min(TICK_MAX_S, max(TICK_MIN_S, min(limits_s) / 8))
        while True:
            await asyncio.sleep(tick_s)
            now_ns = clock.now_ns()
            for relay in list(self.relays):
                relay.keep_deadlines(now_ns, total_s=self._request_timeout_s)

    # ---- what is said of them

    def ready(self) -> bool:
        """Whether any of them would serve a request."""
        return any(not one.trouble() for pool in self.pools.values() for one in pool.upstreams)

    def troubles(self) -> dict[str, str]:
        """What is wrong with which."""
        return {one.name: trouble for one in self.upstreams if (trouble := one.trouble())}

    def health(self) -> list[Json]:
        """Each of them, without its address."""
        return [
            {
                "name": one.name,
                "model": one.options.model,
                "status": "trouble" if one.trouble() or one.doubt else "ok",
                "reason": one.trouble() or one.doubt or None,
                "requests_in_flight": one.in_flight,
            }
            for one in self.upstreams
        ]

    def views(self) -> tuple[UpstreamView, ...]:
        """For `/metrics`."""
        return tuple(one.view() for one in self.upstreams)


async def _on_sent(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: aiohttp.TraceRequestHeadersSentParams
) -> None:
    if isinstance(context.trace_request_ctx, Relay):
        context.trace_request_ctx.sent()


async def _on_reused(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    if isinstance(context.trace_request_ctx, Relay):
        context.trace_request_ctx.reused = True
