"""
One engine as the gateway sees it: the connection to it, made again with back-off when it breaks, and its calls.

Nothing here queues: unread news of a call are at most its tokens, the connection's write buffer has a bound, and what
does not fit is refused.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

import structlog

from engine.api import Abort, FrameError, FrameReader, Hello, StepFrame, decode_frame, encode
from gateway import errors
from gateway.calls import Call
from telemetry import clock
from telemetry.records import StepRecord

CONNECT_TIMEOUT_S = 5.0
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0
READ_BYTES_MAX = 256 * 1024
WRITE_BUFFER_BYTES_MAX = 16 * 1024 * 1024

_log = structlog.get_logger("pellucid.gateway")


class Watcher(Protocol):
    """Who wants to know what the engines report: the telemetry hub."""

    def step(self, record: StepRecord) -> None:
        """A replica has made a step."""

    def engine_up(self, replica: int, *, epoch: str, block_slots: int) -> None:
        """A replica is there."""

    def engine_down(self, replica: int) -> None:
        """A replica is gone."""


class Replica:
    """One engine process.  `run` keeps the connection; everything else is a look or a write."""

    def __init__(self, address: str, watcher: Watcher, *, silence_max_s: float) -> None:
        self.address = address
        self.hello: Hello | None = None  # None: not connected
        self.calls: dict[str, Call] = {}
        self._watcher = watcher
        self._silence_max_s = silence_max_s
        self._writer: asyncio.StreamWriter | None = None
        self._one_clock = False
        self._owes_since_ns = 0
        """Since when the engine owes us a frame; 0: it does not.  Only a frame or the end of the connection clears it:
        that we gave up on a call makes no engine well."""
        self._backoff_s = BACKOFF_MIN_S

    @property
    def working(self) -> int:
        """Calls that the engine has not finished."""
        return sum(call.finish is None for call in self.calls.values())

    def silent_s(self, now_ns: int) -> float:
        """How long nothing has come although it was given work; 0 where it has answered all of it."""
        return max(0.0, (now_ns - self._owes_since_ns) / 1e9) if self._owes_since_ns else 0.0

    def trouble(self, now_ns: int) -> str:
        """Why no request should be sent here; empty: none."""
        if self.hello is None:
            return "not connected"
        silent_s = self.silent_s(now_ns)
        return f"has work and has been silent for {silent_s:.1f} s" if silent_s > self._silence_max_s else ""

    def send(self, call: Call) -> None:
        """Give the call to the engine.  Raises ApiError when it cannot be sent."""
        if self._writer is None or self._buffered() > WRITE_BUFFER_BYTES_MAX:
            raise errors.no_engine()
        now_ns = clock.now_ns()
        self._owes_since_ns = self._owes_since_ns or now_ns
        call.sent_ns = now_ns
        call.engine, call.one_clock = self, self._one_clock
        self.calls[call.request_id] = call
        self._writer.write(encode(call.message))

    def abort(self, call: Call) -> None:
        """Tell the engine to stop; harmless when it has.  It owes no answer to that: it may have finished just now."""
        if self._writer is None or call.finish is not None:
            return
        if self._buffered() > WRITE_BUFFER_BYTES_MAX:
            self._writer.transport.abort()  # It has not read for long: breaking the connection ends all of it.
            return
        self._writer.write(encode(Abort(call.request_id)))

    def release(self, call: Call) -> None:
        """Nobody waits for news of it any more."""
        self.calls.pop(call.request_id, None)

    def _buffered(self) -> int:
        return self._writer.transport.get_write_buffer_size() if self._writer else 0

    async def run(self) -> None:
        """Connect, read, and again, until cancelled."""
        while True:
            try:
                async with _connection(self.address) as (reader, writer):
                    self._writer = writer
                    await self._read(reader)
                    reason = "the engine closed the connection"
            except (OSError, TimeoutError, FrameError) as error:
                reason = str(error) or type(error).__name__
            finally:
                self._lose()
            _log.debug("engine connection lost", address=self.address, reason=reason, retry_s=self._backoff_s)
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(self._backoff_s * 2, BACKOFF_MAX_S)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = FrameReader()
        async with asyncio.timeout(CONNECT_TIMEOUT_S) as hello_limit:
            while data := await reader.read(READ_BYTES_MAX):
                for body in frames.feed(data):
                    frame = decode_frame(body)
                    if isinstance(frame, Hello):
                        hello_limit.reschedule(None)
                        self._greet(frame)
                    else:
                        self._take(frame)

    def _greet(self, hello: Hello) -> None:
        self.hello = hello
        self._one_clock = clock.shares_clock(hello.clock_id)
        self._backoff_s = BACKOFF_MIN_S
        self._watcher.engine_up(hello.replica, epoch=hello.epoch, block_slots=hello.block_slots)
        _log.info("engine connected", replica=hello.replica, model=hello.model, fingerprint=hello.fingerprint)

    def _take(self, frame: StepFrame) -> None:
        now_ns = clock.now_ns()
        for delta in frame.deltas:
            call = self.calls.get(delta.request_id)
            if call is not None:
                call.take(delta, now_ns)
        self._owes_since_ns = now_ns if self.working else 0
        if frame.step is None:
            return
        for record in frame.step.finished:
            call = self.calls.get(record.request_id)
            if call is not None:
                call.end(record)
        self._watcher.step(frame.step)

    def _lose(self) -> None:
        """The connection is gone, and every call with it."""
        if self.hello is not None:
            self._watcher.engine_down(self.hello.replica)
            _log.warning("engine lost", replica=self.hello.replica, calls=self.working)
        self.hello = self._writer = None
        self._owes_since_ns = 0
        now_ns = clock.now_ns()
        for call in list(self.calls.values()):
            if call.finish is None and not call.stopped:
                call.flight.interrupt(errors.engine_lost())
            call.abandon(now_ns)
        self.calls.clear()


@contextlib.asynccontextmanager
async def _connection(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to `unix:PATH` or `tcp:HOST:PORT`, closed at the end."""
    kind, _, where = address.partition(":")
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        if kind == "unix":
            reader, writer = await asyncio.open_unix_connection(where)
        else:
            host, _, port = where.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
