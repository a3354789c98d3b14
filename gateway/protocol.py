"""
uvicorn's HTTP/1.1 protocol, with what it leaves open: how long and how large a request head may be, how many
connections there may be, what becomes of trailers, of what is no HTTP, and of a request that offers an upgrade.

Java's HTTP client and `curl --http2` offer `Upgrade: h2c` with an ordinary POST.  A server that does not speak HTTP/2
ignores that (RFC 9110, section 7.8); the parser would treat the body as another protocol and lose it.

Trailers, the fields behind a chunked body, are dropped: nothing here reads them, uvicorn would put them among the
headers without a bound, and what was checked before the body must not change behind it.
"""

import asyncio
import re
import secrets
from http import HTTPStatus

import uvicorn
from litestar.types import ASGIApp, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway import errors, headers
from gateway.config import GatewayOptions
from gateway.errors import ApiError

BACKLOG = 1024
KEEP_ALIVE_S = 75
SHUTDOWN_S = 3
_OFFERS = re.compile(rb"\r\n(?:upgrade|http2-settings):[^\r\n]*(?=\r\n)", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
_FLOW_KEY = "pellucid.flow"


def flow_of(scope: Scope) -> FlowControl:
    """The connection's flow control: while its `write_paused` is set a write waits for the client to read."""
    flow = scope[_FLOW_KEY]  # type: ignore[literal-required]  # ours, beside the keys of ASGI
    assert isinstance(flow, FlowControl)
    return flow


def http_config(app: ASGIApp, options: GatewayOptions) -> uvicorn.Config:
    """How `app` is served, by whomever."""
    return uvicorn.Config(
        app,
        loop="none",
        http=bounded(options),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # who asks is who is connected: anybody can write X-Forwarded-For
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        backlog=BACKLOG,
    )


def bounded(options: GatewayOptions) -> type[HttpToolsProtocol]:
    """The protocol with the bounds of `options`."""
    return type("Bounded", (Bounded,), {"options": options})


class Bounded(HttpToolsProtocol):
    """One connection, with bounds."""

    options: GatewayOptions
    """Of the class: uvicorn makes one of these for each connection and passes nothing of ours."""

    _head_bytes = 0
    _in_head = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self.options.connections_max:
            message = f"{self.options.connections_max} connections are open already; try again later."
            self._refuse(errors.overloaded(message))
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._answering and not self._in_head:
            data = _without_offers(data)
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.options.header_bytes_max:
                self._refuse(errors.head_too_large(self.options.header_bytes_max))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[_FLOW_KEY] = self.flow  # type: ignore[literal-required]
        self._in_head, self._head_bytes = True, 0
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        del msg
        self._refuse(errors.no_http())

    @property
    def _answering(self) -> bool:
        """Whether a request of this connection is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]  # at first

    @property
    def _silent(self) -> bool:
        """Whether no answer is on its way, so that ours would not get into it."""
        return not self._answering or not (self.cycle.response_started or self.pipeline)

    def _expect_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.options.body_timeout_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, which has not been asked, and hang up; never into another's answer."""
        if self._silent:
            self.transport.write(_answer(error))
        if self._answering:
            self.cycle.disconnected = True  # what it says from now on is for nobody
            self.cycle.message_event.set()
        self.transport.close()


def _answer(error: ApiError) -> bytes:
    body = error.body()
    fields = {
        **headers.SECURITY,
        **error.headers,
        "x-request-id": f"req-{secrets.token_hex(12)}",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *(f"{k}: {v}" for k, v in fields.items())]
    return "\r\n".join(lines).encode() + _HEAD_END + body


def _without_offers(data: bytes) -> bytes:
    """The bytes of a request without the headers that offer another protocol, where its whole head is in them."""
    head, end, rest = data.partition(_HEAD_END)
    return _OFFERS.sub(b"", head + b"\r\n")[:-2] + end + rest if end else data
