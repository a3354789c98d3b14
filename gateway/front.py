"""
The outermost ASGI application: every request gets an exchange, an id, an answer and a record, whatever happens in it.
"""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from gateway import cors, errors
from gateway.config import GatewayOptions
from gateway.errors import ApiError
from gateway.exchange import Exchange, put_exchange
from telemetry.hub import Hub

_log = structlog.get_logger("pellucid.gateway")

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")
_ID_PREFIX = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}
_ONCE = frozenset({b"authorization", b"x-api-key", b"content-type", b"host", b"x-request-id"})
"""Headers that somebody before us may have judged by another one of two than we would."""


class Front:
    """The outermost ASGI application."""

    def __init__(
        self,
        app: ASGIApp,
        options: GatewayOptions,
        hub: Hub,
        knows_id: Callable[[str], bool],
        *,
        on_closed: Callable[[Exchange], None],
    ) -> None:
        self.options = options
        self.hub = hub
        self.open: dict[str, Exchange] = {}
        self._app = app
        self._knows_id = knows_id
        self._on_closed = on_closed
        self._closing: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, options=self.options, hub=self.hub, choose_id=self.choose_id)
        put_exchange(scope, exchange)
        self.open[exchange.request_id] = exchange
        self.hub.request_opened(exchange.live)
        ids = {"request_id": exchange.request_id, "trace_id": exchange.live.trace.trace_id}
        with structlog.contextvars.bound_contextvars(**ids):
            try:
                await self._serve(exchange, scope)
            finally:
                await self._close(exchange)

    async def _serve(self, exchange: Exchange, scope: HTTPScope) -> None:
        try:
            error = self._bad_headers(list(scope["headers"]))
            if error is not None:
                await respond(exchange, error)
            elif exchange.method == "OPTIONS" and "access-control-request-method" in exchange.headers:
                await _answer(exchange.send, HTTPStatus.NO_CONTENT, cors.preflight_headers(exchange.headers), b"")
            else:
                await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:  # noqa: BLE001  The last resort: whatever it is, the client gets JSON and the log gets the facts.
            if not exchange.gone:
                _log.exception("request crashed", path=exchange.path[:200])
                exchange.outcome = "error"
            if not exchange.status:
                await respond(exchange, error if isinstance(error, ApiError) else errors.internal())

    def _bad_headers(self, given: list[tuple[bytes, bytes]]) -> ApiError | None:
        if len(given) > self.options.headers_max:
            return errors.too_many_headers(self.options.headers_max)
        if sum(len(name) + len(value) for name, value in given) > self.options.header_bytes_max:
            return errors.head_too_large(self.options.header_bytes_max)
        names = [name for name, _ in given if name in _ONCE]
        twice = next((name for name in names if names.count(name) > 1), None)
        return errors.header_twice(twice.decode()) if twice is not None else None

    async def _close(self, exchange: Exchange) -> None:
        """Close in a task of its own, so that a cancelled request still settles."""
        closing = asyncio.create_task(exchange.close(), name=f"close {exchange.request_id}")
        self._closing.add(closing)

        def closed(task: asyncio.Task[None]) -> None:
            self._closing.discard(task)
            self.open.pop(exchange.request_id, None)
            self._on_closed(exchange)

        closing.add_done_callback(closed)
        await asyncio.shield(closing)

    async def drained(self) -> None:
        """Until no record is outstanding."""
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    def choose_id(self, wanted: str, path: str) -> str:
        """The client's own id if it is fit and free, else a new one."""
        if _SAFE_ID.fullmatch(wanted) and wanted not in self.open and not self._knows_id(wanted):
            return wanted
        return _ID_PREFIX.get(path, "req-") + secrets.token_hex(12)


async def respond(exchange: Exchange, error: ApiError) -> None:
    """An error as a whole response."""
    exchange.outcome = exchange.outcome or error.outcome
    exchange.live.error = error.code or ""
    await _answer(exchange.send, error.status, {"content-type": "application/json", **error.headers}, error.body())


async def _answer(
    send: Callable[[Message], Awaitable[None]], status: int, headers: Mapping[str, str], body: bytes
) -> None:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    if status != HTTPStatus.NO_CONTENT:
        encoded.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": int(status), "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})
