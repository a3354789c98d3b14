"""
uvicorn's HTTP/1.1 protocol, with the two things that it leaves open: how long and how large a request head may be, and
what becomes of a request that offers an upgrade.

Java's HTTP client and `curl --http2` offer `Upgrade: h2c` with an ordinary POST.  A server that does not speak HTTP/2
ignores that (RFC 9110, section 7.8); the parser would treat the body as another protocol and lose it.
"""

import asyncio
import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway import errors
from gateway.config import GatewayOptions
from gateway.errors import ApiError

_OFFERS = re.compile(rb"\r\n(?:upgrade|http2-settings):[^\r\n]*(?=\r\n)", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"


def bounded(options: GatewayOptions) -> type[HttpToolsProtocol]:
    """The protocol with the bounds of `options`."""

    class Bounded(HttpToolsProtocol):
        """One connection."""

        _head_bytes = 0
        _in_head = False
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            super().connection_made(transport)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            fresh = self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]  # None at first
            if fresh and not self._in_head:
                data = _without_offers(data)
            super().data_received(data)
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > options.header_bytes_max:
                    self._refuse(errors.head_too_large(options.header_bytes_max))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head, self._head_bytes = True, 0
            self._expect_head()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._stop_timer()
            super().on_headers_complete()

        def _expect_head(self) -> None:
            self._stop_timer()
            self._head_timer = self.loop.call_later(options.body_timeout_s, self.transport.close)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _refuse(self, error: ApiError) -> None:
            """Answer without the application, which has not been asked yet, and hang up."""
            body = error.body()
            head = (
                f"HTTP/1.1 {error.status} Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.transport.close()

    return Bounded


def _without_offers(data: bytes) -> bytes:
    """The bytes of a request without the headers that offer another protocol, where its whole head is in them."""
    head, end, rest = data.partition(_HEAD_END)
    return _OFFERS.sub(b"", head + b"\r\n")[:-2] + end + rest if end else data
