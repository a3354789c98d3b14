"""
The engines as the gateway sees them: one connection to each replica, and the calls in their hands.

    Call       one sequence: sent, accepted, tokens, finish, record.  News that nobody has read yet merge.
    Flight     the calls of one HTTP request, and whatever ends all of them at once (client gone, engine lost, drain)
    Replica    one connection, made again with back-off when it breaks
    Backend    all replicas: chooses, and watches the deadlines

Nothing here queues: unread news of a call are at most its tokens, a connection's write buffer has a bound, and what
does not fit is refused.  A call keeps all that is needed to send it again: its message, and every token it has emitted.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

import structlog

from engine.api import (
    Abort,
    Delta,
    Finish,
    FrameError,
    FrameReader,
    GenerateRequest,
    Hello,
    StepFrame,
    TokenLogprobs,
    Usage,
    decode_frame,
    encode,
)
from gateway import errors
from gateway.config import GatewayOptions
from gateway.errors import ApiError
from telemetry import clock
from telemetry.records import RequestRecord, StepRecord

CONNECT_TIMEOUT_S = 5.0
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0
READ_BYTES_MAX = 256 * 1024
WRITE_BUFFER_BYTES_MAX = 16 * 1024 * 1024
DEADLINE_GRACE_S = 2.0  # the engine enforces the deadline itself; this is for one that does not

_log = structlog.get_logger("pellucid.gateway")


class Watcher(Protocol):
    """Who wants to know what the engines report: the telemetry hub."""

    def step(self, record: StepRecord) -> None:
        """A replica has made a step."""

    def engine_up(self, replica: int, *, epoch: str, block_slots: int) -> None:
        """A replica is there."""

    def engine_down(self, replica: int) -> None:
        """A replica is gone."""


class Flight:
    """The calls of one request.  One reader waits for news of any of them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.error: ApiError | None = None
        self._news = asyncio.Event()

    def interrupt(self, error: ApiError) -> None:
        """Something ends the whole request; the first such thing counts."""
        self.error = self.error or error
        self._news.set()

    def wake(self) -> None:
        """A call has news."""
        self._news.set()

    async def wait(self) -> None:
        """Until there is news.  Raises ApiError when the request is interrupted."""
        if self.error is None:
            await self._news.wait()
            self._news.clear()
        if self.error is not None:
            raise self.error


class Call:
    """One sequence in the hands of a replica."""

    def __init__(self, message: GenerateRequest, flight: Flight) -> None:
        self.message = message
        self.flight = flight
        self.emitted: list[int] = []
        """All tokens so far: with the message, enough to go on elsewhere."""
        self.sent_ns = 0
        self.accepted_ns = 0  # when we heard of it; 0: not yet
        self.first_token_ns = 0
        self.finish: Finish | None = None
        self.finished_ns = 0  # when we heard of it
        self.record: RequestRecord | None = None
        self.record_came = asyncio.Event()
        self.stopped = False
        """We have what we wanted (a stop string), and whatever finish the engine reports is a good end."""
        self._read = 0  # of `emitted`
        self._logprobs: list[TokenLogprobs] = []  # of the unread tokens
        flight.calls.append(self)

    @property
    def request_id(self) -> str:
        """The engine's name of it."""
        return self.message.request_id

    def take(self, delta: Delta, now_ns: int) -> None:
        """News from the engine."""
        if self.finish is not None:
            return  # We gave up on it, or the engine repeats itself.
        refused = delta.finish is not None and delta.finish.reason in ("refused", "overloaded")
        if not refused:
            self.accepted_ns = self.accepted_ns or now_ns
        if delta.tokens:
            self.first_token_ns = self.first_token_ns or now_ns
            self.emitted.extend(delta.tokens)
            self._logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            self.finish, self.finished_ns = delta.finish, now_ns
        self.flight.wake()

    def unread(self) -> Iterable[tuple[int, TokenLogprobs | None]]:
        """Tokens since the last call of this."""
        tokens, logprobs = self.emitted[self._read :], self._logprobs
        self._read, self._logprobs = len(self.emitted), []
        if len(logprobs) != len(tokens):
            return [(token, None) for token in tokens]
        return list(zip(tokens, logprobs, strict=True))

    def end(self, record: RequestRecord) -> None:
        """The engine's book of it."""
        self.record = record
        self.record_came.set()

    def abandon(self, now_ns: int) -> None:
        """Stop waiting for the engine's last word."""
        if self.finish is None:
            self.finish = Finish("abort", Usage(len(self.message.prompt), 0, len(self.emitted)))
            self.finished_ns = now_ns
        self.record_came.set()
        self.flight.wake()


class Replica:
    """One engine process.  `run` keeps the connection; everything else is a look or a write."""

    def __init__(self, address: str, watcher: Watcher, *, silence_max_s: float) -> None:
        self.address = address
        self.hello: Hello | None = None  # None: not connected
        self.calls: dict[str, Call] = {}
        self._watcher = watcher
        self._silence_max_s = silence_max_s
        self._writer: asyncio.StreamWriter | None = None
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


class Backend:
    """All replicas."""

    def __init__(self, options: GatewayOptions, watcher: Watcher) -> None:
        self._options = options
        self.replicas = [
            Replica(address, watcher, silence_max_s=options.first_frame_timeout_s) for address in options.engines
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to connect."""
        self._tasks = [
            asyncio.create_task(replica.run(), name=f"engine {replica.address}") for replica in self.replicas
        ]
        self._tasks.append(asyncio.create_task(self._watch(), name="engine deadlines"))

    async def stop(self) -> None:
        """Let all connections go."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def choose(self) -> tuple[Replica, Hello]:
        """The healthy replica with the fewest calls.  Raises ApiError when there is none."""
        now_ns = clock.now_ns()
        healthy = [
            (replica, replica.hello) for replica in self.replicas if replica.hello and not replica.trouble(now_ns)
        ]
        if not healthy:
            raise errors.no_engine()
        return min(healthy, key=lambda one: len(one[0].calls))

    def hellos(self) -> Sequence[Hello]:
        """What the connected replicas said of themselves."""
        return [replica.hello for replica in self.replicas if replica.hello]

    def troubles(self) -> dict[str, str]:
        """What is wrong with which replica."""
        now_ns = clock.now_ns()
        found = {str(number): replica.trouble(now_ns) for number, replica in enumerate(self.replicas)}
        return {number: trouble for number, trouble in found.items() if trouble}

    def knows(self, request_id: str) -> bool:
        """Whether a call of this name is in flight."""
        return any(request_id in replica.calls for replica in self.replicas)

    async def _watch(self) -> None:
        """Time out the calls of engines that are silent, or that do not keep the deadline."""
        tick_s = min(1.0, self._options.first_frame_timeout_s / 4)
        while True:
            await asyncio.sleep(tick_s)
            now_ns = clock.now_ns()
            for replica in self.replicas:
                silent_s = replica.silent_s(now_ns)
                for call in list(replica.calls.values()):
                    error = self._overdue(call, silent_s, now_ns)
                    if error is not None:
                        replica.abort(call)
                        call.flight.interrupt(error)

    def _overdue(self, call: Call, silent_s: float, now_ns: int) -> ApiError | None:
        if call.finish is not None:
            return None
        age_s = (now_ns - call.sent_ns) / 1e9
        limit_s = self._options.first_frame_timeout_s
        if not call.accepted_ns and age_s > limit_s:
            return errors.engine_timeout(f"The engine did not take the request within {limit_s:g} s.")
        if silent_s > limit_s and age_s > limit_s:
            return errors.engine_timeout(f"The engine has been silent for {limit_s:g} s.")
        if age_s > self._options.request_timeout_s + DEADLINE_GRACE_S:
            return errors.engine_timeout(f"The request took longer than {self._options.request_timeout_s:g} s.")
        return None


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
