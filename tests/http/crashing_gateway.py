"""
`python -m gateway` with crashes in it, for tests/http/test_canaries.py: where a request's header says so, also in tasks
and threads that nobody waits for, and of the whole process.  Each exception says all that it can get hold of,
as those of libraries do.
"""

import asyncio
import sys
import threading

from gateway.__main__ import main
from gateway.exchange import Exchange
from gateway.service import Gateway
from gateway.stream import ChatWriter
from gateway.text import Piece

HEADER = "x-crash"
seen: list[str] = []


def crash(exchange: Exchange, what: object) -> None:
    """One exception from another, with a note."""
    try:
        raise KeyError(str(what))
    except KeyError as error:
        error.add_note(f"it was {what}")
        raise RuntimeError(f"cannot do {what} for {exchange.headers}") from ExceptionGroup(str(what), [error])


async def crash_in_a_task(exchange: Exchange, what: object) -> None:
    """The same, where nobody waits."""
    crash(exchange, what)


def patch() -> None:
    """Put the crashes in."""
    read_body, delta, admit = Exchange.read_body, ChatWriter.delta, Gateway.authenticate

    async def reading(self: Exchange) -> bytes:
        body = await read_body(self)
        seen.append(f"{body.decode()} {self.headers}")
        match self.headers.get(HEADER):
            case "task":
                asyncio.get_running_loop().create_task(crash_in_a_task(self, body))
            case "process":
                asyncio.get_running_loop().call_soon(die)
            case "thread":
                threading.Thread(target=crash, args=(self, body)).start()
            case "body":
                crash(self, body)
        return body

    async def admitting(self: Gateway, exchange: Exchange) -> None:
        await admit(self, exchange)
        if exchange.headers.get(HEADER) == "handler":
            crash(exchange, seen)

    def telling(self: ChatWriter, index: int, piece: Piece) -> bytes:
        if self._head.id.startswith("crash"):
            raise RuntimeError(f"cannot tell {piece.text} {seen}")
        return delta(self, index, piece)

    Exchange.read_body = reading  # type: ignore[method-assign]
    Gateway.authenticate = admitting  # type: ignore[method-assign]
    ChatWriter.delta = telling  # type: ignore[method-assign]


def die() -> None:
    """The whole process: it is one of the two exceptions that an event loop lets through."""
    raise KeyboardInterrupt(f"the last words: {seen}")


if __name__ == "__main__":
    patch()
    sys.exit(main(sys.argv[1:]))
