"""
Speculation on against off: tokens per second on three workloads at several numbers of streams, with the same output.

    python -m tests.bench.bench_speculate [--model FILE.gguf] [--quantization none] [--streams 1 8 32] [--rounds 3]

The engine alone: scheduler and runner in one process, what a loop would do less sockets.  The prompts are those of
speculate_prompts.toml, 30 a workload, through the model's chat template; editing and code are greedy, chat is sampled
with a seed for each prompt.  Both sides use one runner, interleaved: with one stream prompt by prompt, else workload by
workload, and who begins changes.  Each side keeps its scheduler for all rounds of a workload, as a server would; a
round is a tenant of its own, so no answer is found in what the same prompt was answered before.  No prefix cache.

Rates count all output tokens over all time, prompts included; `decode` only steps in which no prompt is computed.
Ratios are medians over rounds.  Answers have to be equal, or the run fails.
"""

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as engine.__main__ does, before torch is loaded

import msgspec
import torch

from engine.api import GenerateRequest, Sampling
from engine.config import EngineOptions, SchedulerConfig
from engine.device.runner import Runner
from engine.scheduler import Scheduler
from gateway.tokens import ModelText, load
from gateway.wire import ChatMessage
from launch.known import DEFAULT_MODEL
from launch.parse import DRAFTS_AUTO_MAX
from launch.store import Store, data_dir

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = Path(__file__).with_name("speculate_prompts.toml")
CHAT_TEMPERATURE = 0.7


@dataclass
class Score:
    """What one side did in one round."""

    tokens: int = 0
    spent_ns: int = 0
    decode_tokens: int = 0
    decode_ns: int = 0
    drafted: int = 0
    accepted: int = 0
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.spent_ns * 1e9

    def decode_rate(self) -> float:
        """The same without the steps in which prompts are computed."""
        return self.decode_tokens / max(1, self.decode_ns) * 1e9

    def add(self, other: "Score") -> None:
        """Both together."""
        for name in ("tokens", "spent_ns", "decode_tokens", "decode_ns", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.answers |= other.answers


class Side:
    """A scheduler with or without speculation, on the runner of both."""

    def __init__(self, runner: Runner, drafts_max: int) -> None:
        facts = runner.facts
        config = SchedulerConfig(
            blocks_max=facts.blocks_max,
            block_slots=facts.block_slots,
            context_max=facts.context_max,
            vocab_size=facts.vocab_size,
            prefix_cache=False,
            drafts_max=drafts_max,
        )
        self._runner = runner
        self._scheduler = Scheduler(config)

    def play(self, requests: list[GenerateRequest], streams: int) -> Score:
        """All requests, so many at a time; the next one comes when one has ended."""
        score, waiting, running = Score(), list(requests), 0
        said: dict[str, list[int]] = {request.request_id: [] for request in requests}
        started_ns = time.monotonic_ns()
        while waiting or running:
            step_ns = time.monotonic_ns()
            while waiting and running < streams:
                self._scheduler.apply(waiting.pop(0), step_ns)
                running += 1
            plan = self._scheduler.plan(step_ns)
            result = self._runner.run(plan)
            outcome = self._scheduler.commit(plan, result, time.monotonic_ns())
            for delta in outcome.deltas:
                said[delta.request_id] += delta.tokens
                running -= delta.finish is not None
            score.tokens += outcome.emitted_tokens
            score.drafted += outcome.drafted_tokens
            score.accepted += outcome.draft_accepted_tokens
            if plan.slices and not outcome.prefill_tokens:
                score.decode_tokens += outcome.emitted_tokens
                score.decode_ns += time.monotonic_ns() - step_ns
        score.spent_ns = time.monotonic_ns() - started_ns
        score.answers = {name: tuple(tokens) for name, tokens in said.items()}
        return score


def read_prompts() -> dict[str, list[str]]:
    """The texts of each workload, each in each way that it is asked for."""
    table = tomllib.loads(PROMPTS.read_text(encoding="utf-8"))
    return {
        name: [way.format(**text) for text in workload["texts"] for way in workload["ways"]]
        for name, workload in table.items()
    }


async def tokens_of(text: ModelText, prompts: list[str]) -> list[tuple[int, ...]]:
    """As the gateway would send them."""
    rendered = [await text.render([ChatMessage(role="user", content=prompt)]) for prompt in prompts]
    return [tuple(await text.encode(prompt, add_special_tokens=False)) for prompt in rendered]


def round_of(template: GenerateRequest, prompts: list[tuple[int, ...]], streams: int) -> list[GenerateRequest]:
    """One round.  Where there are more streams than prompts, some come twice, for somebody else."""
    return [
        msgspec.structs.replace(
            template,
            request_id=f"{template.request_id}-{number}",
            prompt=prompts[number % len(prompts)],
            sampling=msgspec.structs.replace(template.sampling, seed=template.sampling.seed + number),
            tenant=f"{template.request_id}-{number // len(prompts)}",
        )
        for number in range(max(streams, len(prompts)))
    ]


def interleaved(sides: list[Side], requests: list[GenerateRequest], streams: int, turn: int) -> list[Score]:
    """Both sides, bite by bite."""
    bites = [[request] for request in requests] if streams == 1 else [requests]
    scores = [Score() for _ in sides]
    for number, bite in enumerate(bites):
        for place in range(len(sides)):
            index = (place + number + turn) % len(sides)
            scores[index].add(sides[index].play(bite, streams))
    first, *others = scores
    assert all(other.answers == first.answers for other in others), "speculation has changed an answer"
    return scores


def measure(
    arguments: argparse.Namespace, runner: Runner, name: str, prompts: list[tuple[int, ...]], streams: int
) -> str:
    """One line of the table."""
    sides = [Side(runner, 0), Side(runner, arguments.drafts_max)]
    temperature = CHAT_TEMPERATURE if name == "chat" else 0.0
    pairs = []
    for turn in range(arguments.rounds):
        template = GenerateRequest(
            request_id=str(turn),
            prompt=(),
            sampling=Sampling(temperature=temperature, seed=arguments.seed),
            tokens_max=arguments.output_tokens,
            stop_ids=runner.facts.eos_ids,
        )
        requests = round_of(template, prompts[: arguments.prompts], streams)
        pairs.append(interleaved(sides, requests, streams, turn))
    drafted, accepted = sum(auto.drafted for _, auto in pairs), sum(auto.accepted for _, auto in pairs)
    cells = [f"{name:10} {streams:7}"]
    for rate in (Score.rate, Score.decode_rate):
        off, auto = [rate(pair[0]) for pair in pairs], [rate(pair[1]) for pair in pairs]
        ratio = statistics.median(after / before for before, after in zip(off, auto, strict=True))
        cells.append(f"{statistics.median(off):10.1f} {statistics.median(auto):10.1f} {ratio:6.2f}")
    return " ".join((*cells, f"{drafted:8} {accepted:8} {accepted / max(1, drafted):6.2f}"))


def main() -> None:
    """Parse, load, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: the default model, pulled if need be")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, default=30, help="of each workload, at most 30")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--drafts-max", type=int, default=DRAFTS_AUTO_MAX)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.model is None:
        arguments.model = Store(data_dir("", dict(os.environ))).pull(DEFAULT_MODEL).path
    options = EngineOptions(
        model=str(arguments.model),
        model_name="bench",
        listen="",
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        kv_dtype=arguments.kv_dtype,
        threads=arguments.threads,
        kv_memory_bytes=1 << 29,
    )
    runner = Runner.load(options)
    text = load(arguments.model)
    prompts = {name: asyncio.run(tokens_of(text, texts)) for name, texts in read_prompts().items()}
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout  # none outside a clone
    print(f"commit {commit.strip()}   {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")
    print(f"model {arguments.model.name}   {runner.facts.details}   seed {arguments.seed}")
    print(f"{arguments.prompts} prompts, {arguments.output_tokens} output tokens, rounds {arguments.rounds}, medians")
    print(f"load average before {os.getloadavg()[0]:.1f}")
    print(
        f"{'workload':10} {'streams':>7} {'off tok/s':>10} {'auto tok/s':>10} {'ratio':>6} {'decode off':>10}"
        f" {'auto':>10} {'ratio':>6} {'drafted':>8} {'accepted':>8} {'share':>6}"
    )
    for streams in arguments.streams:
        for name, texts in prompts.items():
            print(measure(arguments, runner, name, texts, streams), flush=True)
    print(f"load average after {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
