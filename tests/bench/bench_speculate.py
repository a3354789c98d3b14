"""
Speculation on against off: tokens per second on three workloads at several numbers of streams, with the same output.

    python -m tests.bench.bench_speculate [--model FILE.gguf] [--quantization none] [--streams 1 8 32] [--rounds 3]
    python -m tests.bench.bench_speculate --draft-model DIR      a draft model guesses too
    python -m tests.bench.bench_speculate --deeper 4 | --shallow 4     see below

The engine alone: scheduler and runner in one process, what a loop would do less sockets.  The prompts are those of
speculate_prompts.toml, 30 a workload, through the model's chat template; editing and code are greedy, chat is sampled
with a seed for each prompt.  Each side has a runner and a scheduler of its own, which it keeps for all rounds of a
workload, as a server would; they take turns of BITE_NS, so that both see the machine in the same state.  A round is a
tenant of its own: no answer is found in what the same prompt was answered before.  No prefix cache.

Rates count all output tokens over all time, prompts included; `decode` only steps in which no prompt is computed.
Ratios are medians over rounds.  Answers have to be equal, or the run fails.

There is no good draft model for a model this small.  `--deeper N` makes a pair: the model, which drafts, and one with N
times as many layers, of which those added change nothing.  Guesses at greedy text are all right, a pass costs 1 / N:
what can be gained at best.  With `--shallow N` the first N layers draft for the whole: what it costs to find out that
they are bad at it.
"""

import argparse
import asyncio
import os
import statistics
import time
import tomllib
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as engine.__main__ does, before torch is loaded

import msgspec

from bench.host import commit, host
from engine.__main__ import scheduler_config
from engine.api import GenerateRequest, Sampling
from engine.config import EngineOptions
from engine.device.pair import load_pair
from engine.outcome import Outcome
from engine.scheduler import Scheduler
from gateway.tokens import ModelText, load
from gateway.wire import ChatMessage
from launch.known import DEFAULT_MODEL
from launch.parse import DRAFTS_AUTO_MAX
from launch.store import Store, data_dir
from tests.bench.draft_pairs import deeper, shallow
from tests.bench.machine import Machine

BITE_NS = 50_000_000
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
    """A runner and a scheduler, with or without speculation."""

    def __init__(self, options: EngineOptions) -> None:
        self.runner, self._drafter = load_pair(options)
        self._options = options
        self.renew()

    def renew(self) -> None:
        """A scheduler that knows nothing."""
        draft = self._drafter.facts if self._drafter is not None else None
        self._scheduler = Scheduler(scheduler_config(self._options, self.runner, draft))

    def play(self, requests: list[GenerateRequest], streams: int) -> Generator[int, None, Score]:
        """
        All requests, so many at a time; the next one comes when one has ended.

        Yields the ns spent so far, after each step.
        """
        score, waiting, running = Score(), list(requests), 0
        said: dict[str, list[int]] = {request.request_id: [] for request in requests}
        while waiting or running:
            began_ns = time.monotonic_ns()
            while waiting and running < streams:
                self._scheduler.apply(waiting.pop(0), began_ns)
                running += 1
            outcome = self._step()
            for delta in outcome.deltas:
                said[delta.request_id] += delta.tokens
                running -= delta.finish is not None
            step_ns = time.monotonic_ns() - began_ns
            score.spent_ns += step_ns
            score.tokens += outcome.emitted_tokens
            score.drafted += outcome.drafted_tokens
            score.accepted += outcome.draft_accepted_tokens
            if outcome.emitted_tokens and not outcome.prefill_tokens:
                score.decode_tokens += outcome.emitted_tokens
                score.decode_ns += step_ns
            yield score.spent_ns
        score.answers = {name: tuple(tokens) for name, tokens in said.items()}
        return score

    def _step(self) -> Outcome:
        if self._drafter is not None:
            wishes = self._scheduler.wishes()
            if wishes.slices:
                self._scheduler.drafted(wishes, self._drafter.draft(wishes))
        plan = self._scheduler.plan(time.monotonic_ns())  # guesses are no part of the step
        return self._scheduler.commit(plan, self.runner.run(plan), time.monotonic_ns())


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


def interleaved(sides: list[Side], requests: list[GenerateRequest], streams: int, first: int) -> list[Score]:
    """Both sides, in turns of BITE_NS; who is behind goes on until it is that much ahead."""
    players = [side.play(requests, streams) for side in sides]
    spent_ns, scores = [0] * len(sides), dict[int, Score]()
    turn = first % len(sides)
    while len(scores) < len(sides):
        try:
            spent_ns[turn] = next(players[turn])
        except StopIteration as end:
            scores[turn] = end.value
        going = [place for place in range(len(sides)) if place not in scores]
        if going and (turn in scores or spent_ns[turn] > min(spent_ns[place] for place in going) + BITE_NS):
            turn = min(going, key=spent_ns.__getitem__)
    assert all(score.answers == scores[0].answers for score in scores.values()), "speculation has changed an answer"
    return [scores[place] for place in range(len(sides))]


def measure(
    arguments: argparse.Namespace, sides: list[Side], name: str, prompts: list[tuple[int, ...]], streams: int
) -> str:
    """One line of the table."""
    temperature = CHAT_TEMPERATURE if name == "chat" else 0.0
    pairs = []
    for side in sides:
        side.renew()
    for turn in range(arguments.rounds):
        template = GenerateRequest(
            request_id=str(turn),
            prompt=(),
            sampling=Sampling(temperature=temperature, seed=arguments.seed),
            tokens_max=arguments.output_tokens,
            stop_ids=sides[0].runner.facts.eos_ids,
        )
        requests = round_of(template, prompts[: arguments.prompts], streams)
        pairs.append(interleaved(sides, requests, streams, turn))
    drafted, accepted = sum(auto.drafted for _, auto in pairs), sum(auto.accepted for _, auto in pairs)
    cells = [f"{name:10} {streams:7}"]
    for rate in (Score.rate, Score.decode_rate):
        off, auto = [rate(pair[0]) for pair in pairs], [rate(pair[1]) for pair in pairs]
        ratio = statistics.median(after / before for before, after in zip(off, auto, strict=True))
        cells.append(f"{statistics.median(off):10.1f} {statistics.median(auto):10.1f} {ratio:6.3f}")
    return " ".join((*cells, f"{drafted:8} {accepted:8} {accepted / max(1, drafted):6.2f}"))


def options_of(arguments: argparse.Namespace) -> EngineOptions:
    """As `serve` would, with room for all."""
    return EngineOptions(
        model=str(arguments.model),
        model_name="bench",
        listen="",
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        kv_dtype=arguments.kv_dtype,
        threads=arguments.threads,
        prefix_cache=False,
        kv_memory_bytes=1 << 29,
    )


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF; default: the default model, pulled if need be")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, default=30, help="of each workload, at most 30")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--drafts-max", type=int, default=DRAFTS_AUTO_MAX)
    parser.add_argument("--workloads", nargs="+", default=["editing", "code", "chat"])
    drafting = parser.add_mutually_exclusive_group()
    drafting.add_argument("--draft-model", type=Path)
    drafting.add_argument("--deeper", type=int, metavar="N")
    drafting.add_argument("--shallow", type=int, metavar="N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def models_of(arguments: argparse.Namespace, folder: Path) -> tuple[Path, Path | None]:
    """What is served, and what drafts for it."""
    if arguments.deeper:
        return deeper(arguments.model, arguments.deeper, folder / f"{arguments.deeper} times as deep"), arguments.model
    if arguments.shallow:
        return arguments.model, shallow(
            arguments.model, arguments.shallow, folder / f"first {arguments.shallow} layers"
        )
    return arguments.model, arguments.draft_model


def main() -> None:
    """Parse, load, measure."""
    arguments = arguments_of()
    if arguments.model is None:
        arguments.model = Store(data_dir("", dict(os.environ))).pull(DEFAULT_MODEL).path
    with TemporaryDirectory() as folder:
        model, draft = models_of(arguments, Path(folder))
        packed = str(Path(folder, "packed"))
        plain = msgspec.structs.replace(options_of(arguments), model=str(model), packed_directory=packed)
        guessing = msgspec.structs.replace(plain, drafts_max=arguments.drafts_max, draft_model=str(draft or ""))
        sides = [Side(plain), Side(guessing)]
    text = load(arguments.model)
    prompts = {name: asyncio.run(tokens_of(text, texts)) for name, texts in read_prompts().items()}
    machine = Machine()
    print(f"commit {commit()}   {host()}   seed {arguments.seed}   rounds {arguments.rounds}, medians")
    print(f"model {model.name}   draft model {draft.name if draft else 'none'}   {sides[0].runner.facts.details}")
    print(f"{arguments.prompts} prompts, {arguments.output_tokens} output tokens")
    print(
        f"{'workload':10} {'streams':>7} {'off tok/s':>10} {'auto tok/s':>10} {'ratio':>6} {'decode off':>10}"
        f" {'auto':>10} {'ratio':>6} {'drafted':>8} {'accepted':>8} {'share':>6}"
    )
    for streams in arguments.streams:
        for name in arguments.workloads:
            print(measure(arguments, sides, name, prompts[name], streams), machine.state(), flush=True)


if __name__ == "__main__":
    main()
