"""
One connection that everybody shares: commands go out as they come, and the replies come back in that order.

A caller may leave at any time.  Its reply is taken from its place in the order when it comes, and dropped, so nobody
else ever gets to see it, and nothing need be connected anew (tests/cache/test_cancellation.py).  A reply that misses
its deadline retires the connection: what else is on it may still be answered, and who comes next gets a new one.

A wait that was our own fault, because the event loop was busy elsewhere, is not the server's (cache.deadline).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, cast

import hiredis

from cache.deadline import Deadline, patience
from cache.errors import ScriptMissing, Unavailable
from telemetry import clock

COMMANDS_MAX = 1024
"""On one connection, those whose callers have left included."""
REASON_CHARS_MAX = 200
Words = Sequence[str | bytes | int]
Connect = Callable[["Callable[[], Wire]"], Awaitable["Wire"]]
"""Connects, and lets the Wire that it makes speak; raises OSError or Unavailable."""
_MORE: Final = object()


class _Command:
    """What is expected of the server, in its turn."""

    __slots__ = ("deadline", "future")

    def __init__(self, future: "asyncio.Future[object]", deadline: Deadline) -> None:
        self.future = future
        self.deadline = deadline


class Wire(asyncio.Protocol):
    """One connection, from its beginning to its end."""

    def __init__(self, ended: Callable[["Wire"], object]) -> None:
        self.lost = asyncio.Event()
        self.retired = False
        self._ended = ended
        self._commands: deque[_Command] = deque()
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._transport: asyncio.Transport | None = None

    @property
    def usable(self) -> bool:
        """Whether it takes commands."""
        return not self.retired and self._transport is not None and not self._transport.is_closing()

    def send(self, words: Words, timeout_s: float) -> "asyncio.Future[object]":
        """Its reply, or hiredis.ReplyError as a value; may be cancelled.  Raises Unavailable, as the future does."""
        if self._transport is None or not self.usable:
            raise Unavailable("the connection was lost")
        if len(self._commands) >= COMMANDS_MAX:
            raise Unavailable(f"{COMMANDS_MAX} commands are waiting already")
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._commands.append(_Command(future, Deadline(timeout_s, partial(self._late, future, timeout_s))))
        self._transport.write(hiredis.pack_command(tuple(words)))  # type: ignore[arg-type]  # its stub allows one word
        return future

    def retire(self) -> None:
        """Take nothing new, and end once nobody waits for anything that is on its way."""
        self.retired = True
        if self._transport is not None and all(command.future.done() for command in self._commands):
            self._transport.abort()

    def abort(self) -> None:
        """End now."""
        self.retired = True
        if self._transport is not None:
            self._transport.abort()
        else:
            self.connection_lost(None)  # it has never been one

    async def answered(self) -> None:
        """Until nobody waits for anything, which their deadlines bound."""
        waiting = [command.future for command in self._commands if not command.future.done()]
        if waiting:
            await asyncio.wait(waiting)

    def _late(self, future: "asyncio.Future[object]", timeout_s: float) -> None:
        if not future.done():
            future.set_exception(Unavailable(f"no answer within {timeout_s * 1000:.0f} ms", maybe_ran=True))
        self.retire()

    # ---- what the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It speaks."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Hand each reply to whose turn it is."""
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _MORE:
                command = self._commands.popleft()
                command.deadline.cancel()
                if not command.future.done():
                    command.future.set_result(reply)
        except (hiredis.ProtocolError, IndexError):  # what is no reply, or nobody's
            self._fail("what came from it is no answer of a Redis")
            self.abort()
        if self.retired:
            self.retire()

    def connection_lost(self, error: Exception | None) -> None:
        """It says no more."""
        self._fail(f"the connection was lost{f': {error}' if error else ''}"[:REASON_CHARS_MAX])
        self.lost.set()
        self._ended(self)

    def _fail(self, reason: str) -> None:
        for command in self._commands:
            command.deadline.cancel()
            if not command.future.done():
                command.future.set_exception(Unavailable(reason, maybe_ran=True))
        self._commands.clear()


class Link:
    """The way to one server: a Wire, and another one when that has ended."""

    def __init__(self, connect: Connect, *, greeting: Sequence[Words], connect_timeout_s: float) -> None:
        """`greeting`: what is said first on each connection, and must be answered without an error."""
        self._connect = connect
        self._greeting = greeting
        self._connect_timeout_s = connect_timeout_s
        self._wire: Wire | None = None
        self._wires: set[Wire] = set()
        self._connecting: asyncio.Task[Wire] | None = None
        self._closed = False

    async def execute(self, words: Words, timeout_s: float) -> object:
        """The reply to a command.  Raises Unavailable.  May be cancelled; then it has run, or will, or will not."""
        wire = self._wire
        if wire is None or not wire.usable:
            began_ns = clock.now_ns()
            wire = await self._connected(timeout_s)
            # Half of it at the least: it may be us who were slow.
            timeout_s = max(timeout_s / 2, timeout_s - (clock.now_ns() - began_ns) / 1e9)
        reply = await wire.send(words, timeout_s)
        if isinstance(reply, hiredis.ReplyError):
            if str(reply).startswith("READONLY"):
                wire.retire()  # the master is another one by now: look again where
            raise _of_reply(reply)
        return reply

    async def aclose(self) -> None:
        """Let what was asked be answered, which deadlines bound, and disconnect."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        for wire in list(self._wires):
            await wire.answered()
            wire.abort()
            await wire.lost.wait()

    async def _connected(self, timeout_s: float) -> Wire:
        """Those who come at the same time wait for one connection, each for as long as it likes."""
        if self._closed:
            raise Unavailable("this connection is closed")
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._begin(), name="connect to redis")
            self._connecting.add_done_callback(self._begun)
        try:
            async with patience(timeout_s):
                return await asyncio.shield(self._connecting)
        except TimeoutError:
            raise Unavailable(f"no connection within {timeout_s * 1000:.0f} ms") from None

    def _begun(self, task: "asyncio.Task[Wire]") -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not complain where all have left

    async def _begin(self) -> Wire:
        made: list[Wire] = []

        def make() -> Wire:
            wire = Wire(self._wires.discard)
            made.append(wire)
            self._wires.add(wire)
            return wire

        try:
            async with patience(self._connect_timeout_s):
                wire = await self._connect(make)
                answers = [wire.send(words, self._connect_timeout_s) for words in self._greeting]
                for reply in await asyncio.gather(*answers):
                    if isinstance(reply, hiredis.ReplyError):
                        raise _of_reply(reply)
        except BaseException as error:
            for one in made:
                one.abort()
                self._wires.discard(one)  # where connecting was broken off uvloop never says that it is lost
            if not isinstance(error, OSError):
                raise
            reason = str(error) or f"no connection within {self._connect_timeout_s * 1000:.0f} ms"
            raise Unavailable(f"{type(error).__name__}: {reason}"[:REASON_CHARS_MAX]) from error
        self._wire = wire
        return wire


def _of_reply(error: hiredis.ReplyError) -> Unavailable:
    """What an error of the server means for us."""
    text = str(error)
    if text.startswith("NOSCRIPT"):
        return ScriptMissing(text)
    return Unavailable(text[:REASON_CHARS_MAX], maybe_ran=True)
