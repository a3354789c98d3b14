"""
The engine alone: scheduler, loop and runner in one process, no gateway, no sockets.

    python -m tests.bench.bench_engine [--model FILE.gguf] [--repetitions 5] [--set quantization=int8] [--out FILE.json]

Decode is measured in windows of steps around a context, prefill by whole prompts; medians, each with the state of the
machine.  Options are those of `pellucid serve` at its defaults, but for speculation, which is off.  "around" is the
share of a step that is neither compute nor sampling, by the step's own record.  Where ../shared/reference/int8_step
lies, the prototype runs in turn with us, in a process of its own: what it reaches is what this machine allows.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as engine.__main__ does, before torch is loaded

import msgspec

from bench.host import commit, host
from engine.__main__ import scheduler_config
from engine.api import GenerateRequest, Message, Sampling, StepFrame, encode
from engine.config import EngineOptions
from engine.device.form import choose_form
from engine.device.kv import BLOCK_SLOTS, block_bytes
from engine.device.runner import Runner
from engine.loop import Loop
from engine.scheduler import Scheduler
from launch.known import DEFAULT_MODEL
from launch.options import read_options
from launch.serve import engine_options
from launch.store import Model, Store, data_dir
from quant.formats.checkpoint import open_checkpoint
from telemetry.records import STEP_PARTS, StepRecord
from tests.bench.int8_step import resident_bytes
from tests.bench.machine import ROOT, Machine

SLOTS = 38_400  # of KV memory, for both sides
SEQUENCES_MAX = 64
SHORT, LONG = 192, 1024
DECODES = (*((batch, SHORT) for batch in (1, 4, 8, 16, 32, 64)), *((batch, LONG) for batch in (1, 8, 32)))
PREFILLS = (128, 512, 2048)
OUTPUT_TOKENS = 2048  # more than any window uses: nobody ends


@dataclass(frozen=True)
class Row:
    """One point, measured."""

    name: str
    rates: list[float]  # tokens per second, one for each repetition
    reference: list[float]  # of the prototype, in turn with `rates`
    around: float  # share of the steps' time that was neither compute nor sampling
    parts_us: dict[str, float]  # of a mean step
    states: list[str]

    @property
    def ratio(self) -> float:
        """Of the prototype's rate: the median of the pairs."""
        pairs = zip(self.rates, self.reference, strict=False)
        return statistics.median([mine / theirs for mine, theirs in pairs] or [0.0])


class Desk:
    """The loop's `Link`: hands in what is asked for, encodes each frame as the server would, keeps its record."""

    def __init__(self, inbox: list[Message]) -> None:
        self.inbox = inbox
        self.records: list[StepRecord] = []

    def poll(self, timeout_s: float | None) -> list[Message]:
        """Everything at once; a benchmark that waits for ever is our bug."""
        assert self.inbox or timeout_s is not None
        taken, self.inbox = self.inbox, []
        return taken

    def publish(self, frame: StepFrame) -> list[Message]:
        """Nobody listens, but the frame is made."""
        encode(frame)
        if frame.step is not None:
            self.records.append(frame.step)
        return []


class Bench:
    """One runner; a fresh scheduler for each point."""

    def __init__(self, options: EngineOptions, seed: int) -> None:
        self._options = options
        self.runner = Runner.load(options)
        self._dice = random.Random(seed)
        self._start([])

    def open(self, batch: int, context: int) -> None:
        """`batch` sequences that have computed about `context` tokens and are decoding."""
        self._start([self._request(str(number), context, OUTPUT_TOKENS) for number in range(batch)])
        while not self._desk.records or self._desk.records[-1].emitted_tokens < batch:
            self._loop.step()

    def window(self, steps: int) -> list[StepRecord]:
        """The records of `steps` steps; the two before them hold the end of the last window and the pause."""
        self._desk.records.clear()
        while len(self._desk.records) < steps + 2:
            self._loop.step()
        return self._desk.records[2:]

    def prefill(self, tokens: int) -> list[StepRecord]:
        """The records of one prompt's steps."""
        self._start([self._request("0", tokens, 1)])
        self._loop.step()
        while self._scheduler.has_work:
            self._loop.step()
        self._loop.stop()
        self._loop.run()  # publishes the last record, and ends
        return self._desk.records

    def _start(self, requests: list[Message]) -> None:
        self.runner.reset()
        self._desk, self._scheduler = Desk(requests), Scheduler(scheduler_config(self._options, self.runner))
        self._loop = Loop(self._scheduler, self.runner, self._desk)

    def _request(self, name: str, tokens: int, output_tokens: int) -> GenerateRequest:
        prompt = tuple(self._dice.randrange(self.runner.facts.vocab_size) for _ in range(tokens))
        sampling = Sampling(temperature=0)
        return GenerateRequest(request_id=name, prompt=prompt, sampling=sampling, tokens_max=output_tokens)


class Prototype:
    """The other side: `int8_step.py` with its pipe."""

    def __init__(self, folder: Path, model: Path) -> None:
        command = [sys.executable, "-m", "tests.bench.int8_step", str(folder), str(model), str(SLOTS)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.resident_before = self._answer()

    def ask(self, order: str, *numbers: int) -> float:
        """One order, one number."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([order, *numbers]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the prototype ended with code {self._process.wait()}")
        return float(line)

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()


Sides = tuple[Callable[[], list[StepRecord]], Callable[[], float] | None]


def rate_of(records: list[StepRecord], *, prompt: bool) -> float:
    """Tokens per second over some steps: of the prompt, or emitted."""
    tokens = sum(record.prefill_tokens if prompt else record.emitted_tokens for record in records)
    return tokens * 1e9 / sum(record.step_ns for record in records)


def measure(
    name: str,
    ours: Callable[[], list[StepRecord]],
    theirs: Callable[[], float] | None,
    machine: Machine,
    *,
    repetitions: int,
    prompt: bool,
) -> Row:
    """One point: both sides in turn."""
    rates, reference, states, records = [], [], [], []
    for _ in range(repetitions):
        states.append(str(machine.state()))
        found = ours()
        rates.append(rate_of(found, prompt=prompt))
        records += found
        if theirs is not None:
            reference.append(theirs())
    states.append(str(machine.state()))
    total_ns = sum(record.step_ns for record in records)
    parts = {part: sum(record.parts.get(part, 0) for record in records) for part in STEP_PARTS}
    return Row(
        name=name,
        rates=rates,
        reference=reference,
        around=1 - (parts["compute"] + parts["sample"]) / total_ns,
        parts_us={part: spent / len(records) / 1e3 for part, spent in parts.items() if spent},
        states=states,
    )


def decode(bench: Bench, prototype: Prototype | None, batch: int, context: int, repetitions: int) -> Sides:
    """Both sides with `batch` sequences, so that the middle of all windows is at `context`."""
    steps = 32 if batch < 16 else 16
    room = repetitions * (steps + 2)
    start = context - room // 2
    bench.open(batch, start)
    if prototype is None:
        return lambda: bench.window(steps), None
    prototype.ask("open", batch, start, room)
    return lambda: bench.window(steps), lambda: prototype.ask("window", steps)


def prefill(bench: Bench, prototype: Prototype | None, tokens: int) -> Sides:
    """Both sides with one prompt."""
    theirs = None if prototype is None else lambda: prototype.ask("prefill", tokens)
    return lambda: bench.prefill(tokens), theirs


def measure_all(
    bench: Bench, prototype: Prototype | None, machine: Machine, *, repetitions: int, only: list[str]
) -> list[Row]:
    """All points whose name holds one of `only`, printed as they come."""
    points: dict[str, Callable[[], Sides]] = {
        f"decode {batch} at {context}": partial(decode, bench, prototype, batch, context, repetitions)
        for batch, context in DECODES
    }
    points |= {f"prefill {tokens}": partial(prefill, bench, prototype, tokens) for tokens in PREFILLS}
    print("point                        tokens/s      (range)  prototype  ratio  around   parts of a step, us; states")
    rows = []
    for name, sides in points.items():
        if any(part in name for part in only):
            ours, theirs = sides()
            prompt = name.startswith("prefill")
            rows.append(measure(name, ours, theirs, machine, repetitions=repetitions, prompt=prompt))
            show(rows[-1])
    return rows


def show(row: Row) -> None:
    """One line."""
    reference = f"{statistics.median(row.reference):11.0f}{row.ratio:6.2f}x" if row.reference else " " * 18
    spread = f"({min(row.rates):.0f}-{max(row.rates):.0f})"
    parts = " ".join(f"{part} {spent:.0f}" for part, spent in row.parts_us.items())
    print(
        f"{row.name:<24}{statistics.median(row.rates):13.1f}{spread:>13}{reference}{row.around:8.1%}   {parts};"
        f" {' | '.join(dict.fromkeys(state.partition(' (')[0] for state in row.states))}, last {row.states[-1]}",
        flush=True,
    )


def options_of(model: Path, settings: list[str]) -> EngineOptions:
    """What `pellucid serve` would tell the engine, with the same room for keys and values as the prototype has."""
    serve = read_options({"speculative": "off", **dict(setting.split("=", 1) for setting in settings)}, {})
    data = data_dir("", dict(os.environ))
    options = engine_options(serve, Model(path=model, name="bench"), data, 0)
    form = choose_form(open_checkpoint(model), options)
    block = block_bytes(form.checkpoint.architecture, form.dtype, form.kv_dtype)
    kv_bytes = SLOTS // BLOCK_SLOTS * block
    return msgspec.structs.replace(options, kv_memory_bytes=kv_bytes, sequences_max=SEQUENCES_MAX)


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF; default: the default model, pulled if need be")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="points that hold one of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of `serve`")
    parser.add_argument("--prototype", type=Path, default=ROOT.parent / "shared/reference/int8_step")
    parser.add_argument("--no-prototype", action="store_true")
    parser.add_argument("--out", type=Path, help="all samples as JSON")
    return parser.parse_args()


def main() -> None:
    """Load, measure, print."""
    arguments = arguments_of()
    model = arguments.model or Store(data_dir("", dict(os.environ))).pull(DEFAULT_MODEL).path
    options = options_of(model, arguments.set)
    resident_before = resident_bytes()
    bench = Bench(options, arguments.seed)
    facts = bench.runner.facts
    with_prototype = arguments.prototype.is_dir() and not arguments.no_prototype
    prototype = Prototype(arguments.prototype, model) if with_prototype else None
    print(f"commit {commit()}   {host()}   seed {arguments.seed}   medians of {arguments.repetitions}")
    print(f"model {model.name}   weights {facts.weights.label}   {facts.details}")
    print(f"KV: {facts.blocks_max * facts.block_slots} slots, {options.kv_memory_bytes / 2**20:.0f} MiB")
    rows = measure_all(bench, prototype, Machine(), repetitions=arguments.repetitions, only=arguments.only)
    memory = {"ours": resident_bytes() - resident_before}
    if prototype is not None:
        memory["prototype"] = int(prototype.ask("resident") - prototype.resident_before)
        print(f"the prototype's matrices: {prototype.ask('weights') / 2**20:.0f} MiB")
        prototype.close()
    spoken = ", ".join(f"{side} {size / 2**20:.0f} MiB" for side, size in memory.items())
    print(f"resident, beyond the imports, with weights and the KV that was used: {spoken}")
    if arguments.out:
        facts_of_run = {"commit": commit(), "host": host(), "seed": arguments.seed, "when": time.strftime("%F %T %z")}
        rows_json = [asdict(row) for row in rows]
        arguments.out.write_text(json.dumps({**facts_of_run, "resident": memory, "rows": rows_json}, indent=1))


if __name__ == "__main__":
    main()
