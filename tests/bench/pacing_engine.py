"""
An engine for measuring what is before it: accepts at once, and makes a step every `GAP_S`, a token of each sequence.

    python -m tests.bench.pacing_engine SOCKET EPOCH VOCAB_SIZE GAP_S
"""

import asyncio
import sys
from typing import NamedTuple

import uvloop

from engine.api import (
    Delta,
    Finish,
    FrameReader,
    GenerateRequest,
    Hello,
    Ping,
    Pong,
    StepFrame,
    Usage,
    decode_message,
    encode,
)
from telemetry.clock import CLOCK_ID, now_ns
from telemetry.records import RequestRecord, StepRecord

TOKENS = range(40, 60)


class Job(NamedTuple):
    """A sequence on its way."""

    request: GenerateRequest
    writer: asyncio.StreamWriter
    began_ns: int


class Engine:
    """One frame a step, for all that are in the batch, as the real one."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._jobs: dict[str, Job] = {}
        self._made: dict[str, int] = {}
        self._steps = 0
        self._work = asyncio.Event()

    def take(self, request: GenerateRequest, writer: asyncio.StreamWriter) -> None:
        """Accept, at once; the first token comes with the next step, which is now if nothing else runs."""
        self._jobs[request.request_id] = Job(request, writer, now_ns())
        self._made[request.request_id] = 0
        writer.write(encode(StepFrame(deltas=(Delta(request.request_id),))))
        self._work.set()

    async def run(self) -> None:
        """Steps, `gap_s` apart."""
        while True:
            await self._work.wait()
            while self._jobs:
                self._step()
                await asyncio.sleep(self._gap_s)
            self._work.clear()

    def _step(self) -> None:
        self._steps += 1
        ended_ns = now_ns()
        deltas: dict[asyncio.StreamWriter, list[Delta]] = {}
        finished = []
        for name, job in list(self._jobs.items()):
            number = self._made[name] = self._made[name] + 1
            request = job.request
            finish = None
            if number == request.tokens_max:
                finish = Finish("length", Usage(len(request.prompt), 0, number))
                finished.append(_record(request, job.began_ns, ended_ns))
                del self._jobs[name], self._made[name]
            deltas.setdefault(job.writer, []).append(Delta(name, (TOKENS[number % len(TOKENS)],), finish=finish))
        step = StepRecord(
            step_id=self._steps,
            ended_ns=ended_ns,
            step_ns=0,
            parts={},
            sequences=sum(map(len, deltas.values())),
            finished=tuple(finished),
        )
        for writer, own in deltas.items():
            writer.write(encode(StepFrame(deltas=tuple(own), step=step)))


def _record(request: GenerateRequest, began_ns: int, ended_ns: int) -> RequestRecord:
    return RequestRecord(
        request_id=request.request_id,
        outcome="length",
        accepted_ns=began_ns,
        finished_ns=ended_ns,
        states={"decode": ended_ns - began_ns},
        prompt_tokens=len(request.prompt),
        computed_tokens=len(request.prompt),
        output_tokens=request.tokens_max,
        steps=request.tokens_max,
    )


async def main(path: str, epoch: str, vocab_size: int, gap_s: float) -> None:
    """Listen until ended."""
    hello = Hello(
        epoch=epoch,
        replica=0,
        clock_id=CLOCK_ID,
        model="tiny",
        fingerprint="pacing",
        reproducible=True,
        vocab_size=vocab_size,
        context_max=8192,
        block_slots=16,
        blocks_max=4096,
        sequences_max=256,
        waiting_max=256,
        eos_ids=(0,),
    )

    engine = Engine(gap_s)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(hello))
        frames = FrameReader()
        while data := await reader.read(1 << 18):
            for body in frames.feed(data):
                message = decode_message(body)
                if isinstance(message, Ping):
                    writer.write(encode(Pong()))
                elif isinstance(message, GenerateRequest):
                    engine.take(message, writer)

    server = await asyncio.start_unix_server(serve, path)
    async with server:
        await engine.run()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
