"""
Tokens per second against `transformers.generate`: same machine, model, precision, prompts; rounds interleaved.

    python -m tests.bench.bench_generate [--model FILE.gguf] [--dtype float32] [--streams 1 16]

Ours is the scheduler and the runner without sockets.  At several streams transformers is measured both ways: one
request after another, which is how `generate` serves independent streams (`SEQUENTIAL_MAX` of them, to keep a round
short), and as one static batch, which it can do only for requests that come and end together; all prompts have one
length here, so that batch wastes nothing on padding.  Both ratios are printed.
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

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as engine.__main__ does, before torch is loaded; for both sides

import torch
import transformers

from engine.api import GenerateRequest, Sampling
from engine.config import EngineOptions, SchedulerConfig
from engine.device.machine import choose_dtype
from engine.device.runner import Runner
from engine.scheduler import Scheduler
from launch.known import DEFAULT_MODEL
from launch.store import Store, data_dir
from tests.torch.oracle import model_from_gguf

SEQUENTIAL_MAX = 4
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
    """Print one line per number of streams.  Each round runs all three sides one after the other."""
    count, dice = arguments.output_tokens, random.Random(arguments.seed)
    print("streams   ours   transformers: one by one  ratio   one batch  ratio    decode only: ours   one batch  ratio")
    for streams in arguments.streams:
        sides: tuple[list[Timing], list[Timing], list[float]] = ([], [], [])
        for _ in range(arguments.rounds):
            prompts = [
                tuple(dice.randrange(runner.facts.vocab_size) for _ in range(arguments.prompt_tokens))
                for _ in range(streams)
            ]
            some = prompts[:SEQUENTIAL_MAX]
            sides[0].append(ours(runner, prompts, count))
            sides[1].append(theirs(model, prompts, count))
            sides[2].append(len(some) * count / sum(theirs(model, [prompt], count).total_s for prompt in some))
        mine, batch = (streams * count / statistics.median(one.total_s for one in side) for side in sides[:2])
        single = statistics.median(sides[2])
        decode = [
            streams * (count - 1) / statistics.median(one.total_s - one.first_s for one in side) for side in sides[:2]
        ]
        print(
            f"{streams:7} {mine:6.1f} {single:24.1f} {mine / single:6.2f} {batch:11.1f} {mine / batch:6.2f}"
            f" {decode[0]:20.1f} {decode[1]:11.1f} {decode[0] / decode[1]:6.2f}"
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
    parser.add_argument("--model", type=Path, help="default: the default model, pulled if need be")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.model is None:
        arguments.model = Store(data_dir("", dict(os.environ))).pull(DEFAULT_MODEL).path
    dtype = choose_dtype(arguments.dtype)
    options = EngineOptions(
        model=str(arguments.model),
        model_name="bench",
        listen="",
        dtype=arguments.dtype,
        quantization="none",
        kv_memory_bytes=1 << 29,
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
