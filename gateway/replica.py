"""
One engine as the gateway sees it: the connection to it, made again with back-off when it breaks, and its calls.

Nothing here queues: unread news of a call are at most its tokens, the connection's write buffer has a bound, and what
does not fit is refused.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec
import structlog

from engine.api import (
    Abort,
    Delta,
    FrameError,
    FrameReader,
    Hello,
    Load,
    Look,
    Ping,
    Pong,
    PrefixNews,
    Sight,
    StepFrame,
    decode_frame,
    encode,
)
from gateway import errors
from gateway.calls import Call
from gateway.config import GatewayOptions
from gateway.connection import CONNECT_TIMEOUT_S, CannotConnect, connection
from gateway.errors import ApiError
from telemetry import clock
from telemetry.evidence import Facts, facts_of
from telemetry.records import StepRecord

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0
READ_BYTES_MAX = 256 * 1024
WRITE_BUFFER_BYTES_MAX = 16 * 1024 * 1024
STEPS_MISSED = 5
LOOK_COST_MAX = 100
"""An engine that has spent so long on a look is left alone for so many times as long: at most 1 % of its time."""
STALE_S = 2.0

_log = structlog.get_logger("pellucid.gateway")


class Watcher(Protocol):
    """Who wants to know what the engines report: the telemetry hub."""

    def step(self, record: StepRecord) -> None:
        """A replica has made a step."""

    def engine_up(self, replica: int, *, epoch: str, block_slots: int, facts: Facts) -> None:
        """A replica is there."""

    def engine_down(self, replica: int) -> None:
        """A replica is gone."""


class Losses(Protocol):
    """Who takes up the calls of an engine that is gone."""

    def strand(self, calls: Sequence[Call], error: ApiError, *, died: bool) -> None:
        """
        Nobody has these any more.

        Args:
            calls: unfinished ones.
            error: what their clients get where nobody takes them up.
            died: the engine went without a word; else it has handed them back.
        """


class Caches(Protocol):
    """Who keeps count of what is in the prefix caches of engines: `gateway.routing.Router`."""

    def heard(self, epoch: str, news: PrefixNews) -> None:
        """What has changed there."""

    def ended(self, epoch: str) -> None:
        """There will be no more news of it."""


class Replica:
    """One engine process.  `run` keeps the connection; everything else is a look or a write."""

    def __init__(
        self,
        number: int,
        address: str,
        watcher: Watcher,
        losses: Losses,
        caches: Caches,
        options: GatewayOptions,
    ) -> None:
        """
        Args:
            number: what it is called here, whatever it calls itself: engines of other hosts do not know of each other.
            address: `unix:PATH` or `tcp:HOST:PORT`.
            watcher: is told what the engine reports.
            losses: is told which calls it has lost.
            caches: is told what its engine has in the prefix cache, if it is we who are told.
            options: the secret of engines on a network, and how long an engine may be silent.
        """
        self.number = number
        self.address = address
        self.hello: Hello | None = None  # None: not connected
        self.load: Load | None = None  # as it last said; None: it has not
        self.calls: dict[str, Call] = {}
        self._looked_ns = 0  # what its last sight has cost it; remembered also while nobody looks
        self.sight: Sight | None = None  # what it last showed us; None: we do not look, or it has not yet
        self.seen_ns = 0  # when that came
        self._watcher = watcher
        self._losses = losses
        self._caches = caches
        self._options = options
        self._away = ""
        """Why there is no connection, where that is worth a word."""
        self._patience = self._new_patience()
        self._epoch = ""
        self._writer: asyncio.StreamWriter | None = None
        self._one_clock = False
        self._owes_since_ns = 0
        """Since when the engine owes us a frame; 0: it does not.  Only a frame or the end of the connection clears it:
        that we gave up on a call makes no engine well."""
        self._backoff_s = BACKOFF_MIN_S
        self._loss: ApiError | None = None  # why we have broken the connection

    @property
    def working(self) -> int:
        """Calls that the engine has not finished."""
        return sum(call.finish is None for call in self.calls.values())

    def silent_s(self, now_ns: int) -> float:
        """How long nothing has come although it was asked something; 0 where it has answered."""
        return max(0.0, (now_ns - self._owes_since_ns) / 1e9) if self._owes_since_ns else 0.0

    def is_stale(self, now_ns: int) -> bool:
        """Whether it owes an answer for longer than its steps take: what it last said of its load may be wrong."""
        return self.silent_s(now_ns) > self._patience.stale_s

    def trouble(self, now_ns: int) -> str:
        """Why no request should be sent here; empty: none."""
        if self.hello is None:
            return f"not connected: {self._away}" if self._away else "not connected"
        if self._loss is not None:
            return self._loss.message
        silent_s = self.silent_s(now_ns)
        return f"owes an answer and has been silent for {silent_s:.1f} s" if silent_s > self._limit_s() else ""

    def send(self, call: Call) -> None:
        """Give the call to the engine.  Raises ApiError when it cannot be sent."""
        if self.hello is None or self._writer is None or self._buffered() > WRITE_BUFFER_BYTES_MAX:
            raise errors.no_engine()
        now_ns = clock.now_ns()
        self._owes_since_ns = self._owes_since_ns or now_ns
        call.sent(self, one_clock=self._one_clock, fingerprint=self.hello.fingerprint, now_ns=now_ns)
        self.calls[call.request_id] = call
        self._writer.write(encode(call.message))

    def abort(self, call: Call) -> None:
        """Tell the engine to stop; harmless when it has.  It owes no answer to that: it may have finished just now."""
        if self._writer is None or call.finish is not None:
            return
        if self._buffered() > WRITE_BUFFER_BYTES_MAX:
            self.give_up(errors.engine_lost())  # It has not read for long: breaking the connection ends all of it.
            return
        self._writer.write(encode(Abort(call.request_id)))

    def release(self, call: Call) -> None:
        """Nobody waits for news of it any more."""
        self.calls.pop(call.request_id, None)

    def probe(self, now_ns: int) -> None:
        """Ask an idle engine whether it is there, and give up on one that owes an answer for too long."""
        if self.hello is None or self._writer is None:
            return
        if not self._owes_since_ns:
            self._owes_since_ns = now_ns
            self._writer.write(encode(Ping()))
        elif self.silent_s(now_ns) > (limit_s := self._limit_s()):
            self._patience.double()
            self.give_up(errors.engine_timeout(f"The engine has been silent for {limit_s:g} s."))

    def look(self, now_ns: int) -> None:
        """Ask what is before it, unless that would cost it too much.  `sight` has the answer, when there is one."""
        spent_ns = self._looked_ns
        if self._writer is not None and now_ns >= self.seen_ns + LOOK_COST_MAX * spent_ns and not self._buffered():
            self._writer.write(encode(Look()))

    def look_away(self) -> None:
        """Nobody wants to know any more."""
        self.sight = None

    def give_up(self, error: ApiError) -> None:
        """Break the connection; `error` is what becomes of its calls where nobody takes them up."""
        if self._writer is not None:
            self._loss = self._loss or error
            self._writer.transport.abort()

    def _new_patience(self) -> "_Patience":
        return _Patience(self._options.silence_s, self._options.first_frame_timeout_s)

    def _limit_s(self) -> float:
        return self._patience.limit_s(working=self.working > 0)

    def _buffered(self) -> int:
        return self._writer.transport.get_write_buffer_size() if self._writer else 0

    async def run(self) -> None:
        """Connect, read, and again, until cancelled."""
        while True:
            try:
                async with connection(self.address, self._options.engine_secret) as (reader, writer):
                    self._writer = writer
                    await self._read(reader)
                    reason = "the engine closed the connection"
            except CannotConnect as error:
                reason = str(error)
            except (OSError, TimeoutError, FrameError) as error:
                reason = str(error) or type(error).__name__
            finally:
                working = self._lose()
            if working is not None:  # Not reached when we stop, which loses nothing.
                _log.warning("engine lost", replica=self.number, calls=working)
            if reason and reason != self._away:
                _log.warning("no connection to an engine", replica=self.number, address=self.address, reason=reason)
            self._away = reason
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(self._backoff_s * 2, BACKOFF_MAX_S)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = FrameReader()
        async with asyncio.timeout(CONNECT_TIMEOUT_S) as hello_limit:
            while data := await reader.read(READ_BYTES_MAX):
                for body in frames.feed(data):
                    frame = decode_frame(body)
                    if isinstance(frame, Hello):
                        if frame.model != self._options.model_name:
                            raise FrameError(f"it serves {frame.model!r}, and not {self._options.model_name!r}")
                        hello_limit.reschedule(None)
                        self._greet(frame)
                    elif isinstance(frame, Pong):
                        self._heard(clock.now_ns())
                    elif isinstance(frame, Sight):
                        self.sight, self.seen_ns, self._looked_ns = frame, clock.now_ns(), frame.spent_ns
                        self._heard(self.seen_ns)
                    else:
                        self._take(frame)

    def _greet(self, hello: Hello) -> None:
        self.hello = msgspec.structs.replace(hello, replica=self.number)
        self._one_clock = clock.shares_clock(hello.clock_id)
        self._backoff_s = BACKOFF_MIN_S
        if hello.epoch != self._epoch:
            self._epoch, self._patience = hello.epoch, self._new_patience()
        slots = hello.blocks_max * hello.block_slots
        facts = facts_of(hello.details, weights=hello.weights.label, kv_slots=slots)
        self._watcher.engine_up(self.number, epoch=hello.epoch, block_slots=hello.block_slots, facts=facts)
        _log.info("engine connected", replica=self.number, model=hello.model, fingerprint=hello.fingerprint)

    def _heard(self, now_ns: int) -> None:
        """Something has come; what is still owed is owed from now on."""
        self._owes_since_ns = now_ns if self.working else 0

    def _take(self, frame: StepFrame) -> None:
        now_ns = clock.now_ns()
        handed_back: list[Call] = []
        for delta in frame.deltas:
            call = self.calls.get(delta.request_id)
            if call is None:
                continue
            if _hands_back(delta, call):
                call.take(msgspec.structs.replace(delta, finish=None), now_ns)
                handed_back.append(call)
            else:
                call.take(delta, now_ns)
        if handed_back:
            leaving = errors.no_engine("The engine is shutting down; try again shortly.")
            if any(delta.finish is not None and delta.finish.reason == "shutdown" for delta in frame.deltas):
                self.give_up(leaving)
            self._hand_on(handed_back, leaving, died=False)
        self._heard(now_ns)
        self.load = frame.load or self.load
        if frame.prefixes is not None and self.hello is not None:
            self._caches.heard(self.hello.epoch, frame.prefixes)
        if frame.step is None:
            return
        step = self._as_ours(frame.step, now_ns)
        self._patience.learn(step)
        for record in step.finished:
            call = self.calls.get(record.request_id)
            if call is not None:
                call.end(record)
        self._watcher.step(step)

    def _as_ours(self, step: StepRecord, now_ns: int) -> StepRecord:
        """By our number of the replica and by our clock: where the engine has another, it ended as we heard of it."""
        if self._one_clock:
            return step if step.replica == self.number else msgspec.structs.replace(step, replica=self.number)
        ahead_ns = now_ns - step.ended_ns
        finished = tuple(
            msgspec.structs.replace(one, accepted_ns=one.accepted_ns + ahead_ns, finished_ns=one.finished_ns + ahead_ns)
            for one in step.finished
        )
        return msgspec.structs.replace(step, replica=self.number, ended_ns=now_ns, finished=finished)

    def _lose(self) -> int | None:
        """The connection is gone, and every call with it: how many were under way, None if there was no engine."""
        working = self.working if self.hello is not None else None
        if self.hello is not None:
            self._watcher.engine_down(self.number)
            self._caches.ended(self.hello.epoch)
        error, self._loss = self._loss or errors.engine_lost(), None
        self.hello = self.load = self.sight = self._writer = None
        self._owes_since_ns = 0
        self._hand_on(list(self.calls.values()), error, died=True)
        return working

    def _hand_on(self, calls: Sequence[Call], error: ApiError, *, died: bool) -> None:
        now_ns = clock.now_ns()
        lost: list[Call] = []
        for call in calls:
            call.release()
            if call.finish is None and not call.stopped:
                call.lose(now_ns)
                lost.append(call)
            else:
                call.abandon(now_ns)
        if lost:
            self._losses.strand(lost, error, died=died)


def _hands_back(delta: Delta, call: Call) -> bool:
    """Whether the engine has ended a call in which nothing is wrong: another one may go on with it."""
    if delta.finish is None or call.stopped:
        return False
    return delta.finish.reason == "shutdown" or (delta.finish.reason == "overloaded" and bool(call.lives))


class _Patience:
    """
    For how long an engine that owes an answer may be silent before it is taken for gone.

    It cannot answer within a step, and how long its steps are it alone knows: STEPS_MISSED of its longest one so far,
    and twice as long each time that we gave up on it, so that a slow one is not given up for ever.
    """

    def __init__(self, least_s: float, most_s: float) -> None:
        self._most_s = most_s
        self._limit_s = min(least_s, most_s)
        self.stale_s = STALE_S
        """It should have said something after so long: twice its longest step."""
        self._knows_steps = False

    def limit_s(self, *, working: bool) -> float:
        """For one with work of ours, or for one that has only to say that it is there."""
        return self._limit_s if self._knows_steps or not working else self._most_s

    def learn(self, step: StepRecord) -> None:
        """From a step that it has made."""
        worked_s = (step.step_ns - step.parts.get("idle", 0)) / 1e9
        self._limit_s = min(self._most_s, max(self._limit_s, STEPS_MISSED * worked_s))
        self.stale_s = max(self.stale_s, 2 * worked_s)
        self._knows_steps = True

    def double(self) -> None:
        """It was in vain, or too early."""
        self._limit_s = min(self._most_s, 2 * self._limit_s)
