"""
Tokens per second against `transformers.generate`: same machine, model, precision, prompts; rounds interleaved.

    python -m tests.bench.bench_generate --model FILE.gguf [--dtype float32] [--streams 1 16]

Ours is the scheduler and the runner without sockets.  At several streams transformers is measured both ways, as one
batch (all prompts have one length, so it wastes nothing on padding) and one after another; the ratio is against the
better of the two, which is the harder comparison: a server of independent streams cannot batch with `generate`.
`decode` leaves out the time until every stream has its first token.
"""

import argparse
import os
import platform
import random
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from engine.api import GenerateRequest, Sampling
from engine.config import EngineOptions, SchedulerConfig
from engine.device.machine import choose_dtype
from engine.device.runner import Runner
from engine.scheduler import Scheduler
from tests.torch.oracle import model_from_gguf

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Timing:
    """Seconds of one run."""

    total_s: float
    first_s: float  # until every stream has its first token


def ours(runner: Runner, prompts: list[tuple[int, ...]], output_tokens: int) -> Timing:
    """All prompts at once through a fresh scheduler."""
    facts = runner.facts
    config = SchedulerConfig(
        blocks_max=facts.blocks_max,
        block_slots=facts.block_slots,
        context_max=facts.context_max,
        vocab_size=facts.vocab_size,
        prefix_cache=False,
    )
    scheduler = Scheduler(config)
    runner.reset()
    started, first_s = time.perf_counter(), 0.0
    for number, prompt in enumerate(prompts):
        request = GenerateRequest(
            request_id=str(number), prompt=prompt, sampling=Sampling(temperature=0), tokens_max=output_tokens
        )
        scheduler.apply(request, time.monotonic_ns())
    emitted: set[str] = set()
    while scheduler.has_work:
        plan = scheduler.plan(time.monotonic_ns())
        outcome = scheduler.commit(plan, runner.run(plan), time.monotonic_ns())
        emitted.update(delta.request_id for delta in outcome.deltas if delta.tokens)
        if not first_s and len(emitted) == len(prompts):
            first_s = time.perf_counter() - started
    return Timing(time.perf_counter() - started, first_s)


def theirs(model: transformers.PreTrainedModel, prompts: list[tuple[int, ...]], output_tokens: int) -> Timing:
    """One batched `generate`."""
    ids = torch.tensor(prompts)

    def generate(count: int) -> float:
        started = time.perf_counter()
        transformers.GenerationMixin.generate(
            model,
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    with torch.inference_mode():
        first_s = generate(1)
        return Timing(generate(output_tokens), first_s)


def measure(arguments: argparse.Namespace, runner: Runner, model: transformers.PreTrainedModel) -> None:
    """Print one line per number of streams."""
    count, dice = arguments.output_tokens, random.Random(arguments.seed)
    single_rate = 0.0
    print("streams      ours tok/s     transformers tok/s (batch | one by one)    ratio    decode: ours  theirs  ratio")
    for streams in arguments.streams:
        timings: tuple[list[Timing], list[Timing]] = ([], [])
        for _ in range(arguments.rounds):
            prompts = [
                tuple(dice.randrange(runner.facts.vocab_size) for _ in range(arguments.prompt_tokens))
                for _ in range(streams)
            ]
            timings[0].append(ours(runner, prompts, count))
            timings[1].append(theirs(model, prompts, count))
        total = [streams * count / statistics.median(timing.total_s for timing in side) for side in timings]
        decode = [
            streams * (count - 1) / statistics.median(timing.total_s - timing.first_s for timing in side)
            for side in timings
        ]
        single_rate = total[1] if streams == 1 else single_rate
        better = max(total[1], single_rate)
        print(
            f"{streams:7} {total[0]:15.1f} {total[1]:29.1f} | {single_rate:10.1f} {total[0] / better:8.2f}"
            f" {decode[0]:15.1f} {decode[1]:7.1f} {decode[0] / decode[1]:6.2f}"
        )


def _load_theirs(path: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    if path.is_file():
        return model_from_gguf(path, dtype)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.eval()
    return model


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    """Parse, load both, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    dtype = choose_dtype(arguments.dtype)
    options = EngineOptions(
        model=str(arguments.model), model_name="bench", listen="", dtype=arguments.dtype, kv_memory_bytes=1 << 29
    )
    runner = Runner.load(options)
    model = _load_theirs(arguments.model, dtype)
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout  # none outside a clone
    print(
        f"commit {commit.strip()}   processor {_processor()}, {torch.get_num_threads()} threads   seed {arguments.seed}"
    )
    print(f"model {arguments.model.name}   {runner.facts.details}   transformers {transformers.__version__}")
    print(
        f"prompt {arguments.prompt_tokens} tokens, output {arguments.output_tokens}, rounds {arguments.rounds}, medians"
    )
    print(f"load average before {os.getloadavg()[0]:.1f}")
    measure(arguments, runner, model)
    print(f"load average after {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
