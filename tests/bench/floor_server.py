"""
What any gateway must do, and nothing else: the bytes of a streamed answer, a token every `GAP_S`, over one socket each.

    python -m tests.bench.floor_server PORT TOKENS GAP_S

It answers whatever comes, at once.  What it takes is what this machine and its kernel take.
"""

import asyncio
import sys
from typing import cast

import uvloop

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache, no-transform\r\n"
    b"x-request-id: cmpl-0123456789abcdef01234567\r\ntransfer-encoding: chunked\r\n\r\n"
)
TEXT = (
    b'data: {"id":"cmpl-0123456789abcdef01234567","object":"text_completion","created":1700000000,"model":"tiny",'
    b'"system_fingerprint":"pacing","choices":[{"index":0,"text":"word","logprobs":null,"finish_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """As HTTP/1.1 has it."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """One client's."""

    def __init__(self, running: "dict[Connection, int]", begun: asyncio.Event, tokens: int) -> None:
        self.transport: asyncio.Transport
        self._begun = begun
        self._running = running
        self._tokens = tokens

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """A request."""
        self.transport.write(HEAD)
        self._running[self] = self._tokens
        self._begun.set()

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone."""
        self._running.pop(self, None)


def write_all(running: dict[Connection, int]) -> None:
    """A token for each that is in the middle of an answer."""
    for one, left in list(running.items()):
        last = left == 1
        one.transport.write(chunk(TEXT) + (chunk(DONE) + b"0\r\n\r\n" if last else b""))
        if last:
            del running[one]
        else:
            running[one] = left - 1


async def main(port: int, tokens: int, gap_s: float) -> None:
    """Listen until ended."""
    running: dict[Connection, int] = {}
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(running, begun, tokens), "127.0.0.1", port)
    async with server:
        while True:
            await begun.wait()
            while running:
                await asyncio.sleep(gap_s)
                write_all(running)
            begun.clear()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
