"""
An engine that misbehaves on purpose, over a real socket with real frames.

A test gives it a behaviour, a coroutine that is run for each request:

    async def behave(job: Job) -> None:
        await job.accept()
        await job.emit(tokens)
        await job.finish("stop")

All other engine behaviour is tested against the real engine shell.  It keeps a true ledger, so its records close.
"""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from engine.api import (
    Abort,
    Delta,
    Fault,
    Finish,
    FinishReason,
    FrameReader,
    GenerateRequest,
    Hello,
    Look,
    Ping,
    Pong,
    StepFrame,
    TokenLogprobs,
    Usage,
    decode_message,
    encode,
)
from telemetry.clock import CLOCK_ID, now_ns
from telemetry.ledger import Ledger
from telemetry.records import RequestRecord, StepRecord

WAIT_S = 10.0


class Job:
    """One request in the fake's hands."""

    def __init__(self, engine: "FakeEngine", request: GenerateRequest, writer: asyncio.StreamWriter) -> None:
        self.engine = engine
        self.request = request
        self.prompt_tokens = len(request.prompt) - request.resume
        self.output = list(request.prompt[self.prompt_tokens :])
        self.aborted = asyncio.Event()
        self.writer = writer
        self.spent: dict[str, int] = {}
        """Further numbers of its record."""
        self._ledger = Ledger("prefill", now_ns())
        self._finished = False

    async def accept(self) -> None:
        """The empty delta."""
        await self._send(Delta(self.request.request_id))

    async def emit(self, tokens: Sequence[int], *, logprob: float = -0.5) -> None:
        """Some tokens in one frame."""
        self._ledger.enter("decode", now_ns())
        self.output += tokens
        await self._send(Delta(self.request.request_id, tuple(tokens), self._logprobs(tokens, logprob)))

    async def finish(
        self,
        reason: FinishReason,
        *,
        tokens: Sequence[int] = (),
        stop_id: int | None = None,
        fault: Fault | None = None,
        logprob: float = -0.5,
    ) -> None:
        """The last delta, with the record in the same frame.  Once: later calls do nothing."""
        if self._finished:
            return
        self._finished = True
        self.output += tokens
        finish = Finish(reason, Usage(self.prompt_tokens, 0, len(self.output)), stop_id, fault)
        delta = Delta(self.request.request_id, tuple(tokens), self._logprobs(tokens, logprob), finish)
        await self._send(delta, self._record(reason))

    async def until_aborted(self) -> None:
        """Do nothing until the gateway aborts, then say so."""
        await self.aborted.wait()
        await self.finish("abort")

    def hang_up(self) -> None:
        """Break the connection."""
        self.writer.transport.abort()

    def _logprobs(self, tokens: Sequence[int], logprob: float) -> tuple[TokenLogprobs, ...]:
        top = self.request.sampling.logprobs
        if top is None:
            return ()
        return tuple(
            TokenLogprobs(logprob, tuple((token + step, logprob - step) for step in range(top))) for token in tokens
        )

    def _record(self, reason: str) -> RequestRecord:
        ended_ns = now_ns()
        record = RequestRecord(
            request_id=self.request.request_id,
            outcome=reason,
            accepted_ns=self._ledger.opened_ns,
            finished_ns=ended_ns,
            states=self._ledger.spent(ended_ns),
            prompt_tokens=self.prompt_tokens,
            computed_tokens=self.prompt_tokens,
            output_tokens=len(self.output),
        )
        return msgspec.structs.replace(record, **self.spent)

    async def _send(self, delta: Delta, *records: RequestRecord) -> None:
        step = StepRecord(step_id=self.engine.next_step(), ended_ns=now_ns(), step_ns=0, parts={}, finished=records)
        self.writer.write(encode(StepFrame(deltas=(delta,), step=step)))
        await self.writer.drain()


Behaviour = Callable[[Job], Awaitable[None]]


async def greet_and_stop(job: Job) -> None:
    """What a fake does by itself: three tokens in one frame, so that transcripts are always the same."""
    await job.accept()
    await job.finish("length", tokens=[40, 41, 42])


class FakeEngine:
    """Listens on a Unix socket, in a thread with a loop of its own."""

    def __init__(
        self,
        path: str,
        *,
        vocab_size: int,
        eos_id: int,
        context_max: int = 512,
        greets: bool = True,
        fingerprint: str = "fp-fake",
    ) -> None:
        self.path = path
        self.behaviour: Behaviour = greet_and_stop
        self.requests: list[GenerateRequest] = []
        self.aborts: list[tuple[str, int]] = []
        self.mute = False
        """Whether it leaves pings unanswered, as one that is wedged."""
        self.greets = greets
        self.connections = 0
        self._hello = Hello(
            epoch="fake",
            replica=0,
            clock_id=CLOCK_ID,
            model="tiny",
            fingerprint=fingerprint,
            reproducible=True,
            vocab_size=vocab_size,
            context_max=context_max,
            block_slots=16,
            blocks_max=64,
            sequences_max=8,
            waiting_max=8,
            eos_ids=(eos_id,),
        )
        self._steps = 0
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._change = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake engine", daemon=True)

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(WAIT_S)

    def stop(self) -> None:
        """Hang up and go."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def next_step(self) -> int:
        """A new step's number."""
        self._steps += 1
        return self._steps

    def wait_for_requests(self, count: int) -> None:
        """Until so many requests have come."""
        self._wait(lambda: len(self.requests) >= count)

    def wait_for_abort(self, request_id: str, number: int = 0) -> int:
        """When the abort of this request's sequence `number` came."""
        name = re.compile(re.escape(request_id) + rf"#[0-9a-f]{{8}}-{number}")
        self._wait(lambda: any(name.fullmatch(aborted) for aborted, _ in self.aborts))
        return next(at_ns for aborted, at_ns in self.aborts if name.fullmatch(aborted))

    def _wait(self, true: Callable[[], bool]) -> None:
        with self._change:
            assert self._change.wait_for(true, WAIT_S), "the gateway did not do what the test waits for"

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for job in self._jobs.values():
            job.hang_up()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._tasks.add(serving)
        frames = FrameReader()
        self.connections += 1
        try:
            if self.greets:
                writer.write(encode(self._hello))
            while data := await reader.read(1 << 16):
                for body in frames.feed(data):
                    self._take(body, writer)
        except (OSError, asyncio.CancelledError):
            pass  # A test has ended.
        finally:
            self._tasks.discard(serving)
            self.connections -= 1
            writer.transport.abort()

    def _take(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        message = decode_message(body)
        with self._change:
            if isinstance(message, Abort):
                self.aborts.append((message.request_id, now_ns()))
                if message.request_id in self._jobs:
                    self._jobs[message.request_id].aborted.set()
            elif isinstance(message, Ping):
                if not self.mute:
                    writer.write(encode(Pong()))
            elif not isinstance(message, Look):  # which it never answers
                self.requests.append(message)
                job = self._jobs[message.request_id] = Job(self, message, writer)
                task = asyncio.ensure_future(_behave(self.behaviour, job))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self._change.notify_all()


async def _behave(behaviour: Behaviour, job: Job) -> None:
    try:
        await behaviour(job)
    except OSError:
        pass  # The gateway has left.
