"""
What quantized weights and quantized KV cost together, as the engine computes them: its logits against its float32 ones.

    python -m tests.bench.bench_quality [--model ...] [--tokens 600] [--only int8] [--write]

`tests.bench.bench_quantize` measures the converter's own arithmetic; here every row is computed by a `Runner`, with
whatever kernels it chooses on this machine.  Four bits are compared with plain rounding to the same groups.  With
`--write` (`make quality`) the table goes into docs/quantization.md, between its marks.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineOptions
from engine.device.kv import BLOCK_SLOTS
from engine.device.runner import Runner
from engine.plan import Slice, StepPlan
from launch.known import DEFAULT_MODEL
from launch.store import Store, data_dir
from quant.formats.checkpoint import open_checkpoint
from quant.formats.scheme import Scheme
from quant.quality import Comparison
from quant.report import Quality
from quant.text_files import tokenizing
from quant.texts import EVALUATION, read_evaluation
from tests.bench.bench_quantize import commit, convert, write
from tests.torch.rounded import write_rounded_file

CHUNK_TOKENS = 256  # whose logits are in memory together
GPTQ = Scheme(method="gptq", bits=4, granularity="group", group_size=64)
HEADER = (
    "| weights and KV | perplexity | rise | top-1 | KL, nats | KL, 99th percentile |",
    "|---|---|---|---|---|---|",
)
BEGIN, END = "<!-- engine quality: begin, made by make quality -->", "<!-- engine quality: end -->"


@dataclass(frozen=True)
class Run:
    """One row: a model in some form; `serve` takes "int8, int8 KV" by itself where there are native kernels."""

    label: str
    quantization: str = "none"
    kv_dtype: str = "auto"
    dtype: str = "auto"
    make: Callable[[str, Path], None] | None = None  # (source, directory): a checkpoint to be made first


def by_gptq(source: str, directory: Path) -> None:
    """By the real command, whatever its gate says."""
    convert(source, ("gptq", "--max-ppl-increase", "9", "--min-top1", "0"), directory)


def by_rounding(source: str, directory: Path) -> None:
    """The nearest integers in the same groups."""
    write_rounded_file(Path(source), directory, GPTQ)


SERVED = "int8, int8 KV"  # by default
SOLVED, PLAIN = "gptq-4bit-g64, int8 KV", "gptq-4bit-g64 by plain rounding, int8 KV"
KL_MAX, TOP1_MIN, RISE_MAX = 0.012, 0.92, 0.015
GPTQ_SHARE_MAX = 0.75
RUNS = (
    Run("bfloat16"),
    Run("bfloat16, int8 KV", kv_dtype="int8"),
    Run("int8 weights and activations, the rest in float32", quantization="int8", dtype="float32"),
    Run(SERVED, quantization="int8", kv_dtype="int8"),
    Run(SOLVED, kv_dtype="int8", make=by_gptq),
    Run(PLAIN, kv_dtype="int8", make=by_rounding),
)


def load(model: Path, run: Run) -> Runner:
    """The engine, as `serve` would start it."""
    options = EngineOptions(
        model=str(model),
        model_name=model.name,
        listen="unix:/nowhere",
        dtype=run.dtype,
        quantization=run.quantization,
        kv_dtype=run.kv_dtype,
        context_max=2048,
        kv_memory_bytes=128 << 20,
    )
    return Runner.load(options)


def logits(runner: Runner, tokens: list[int]) -> list[Tensor]:
    """Logits behind each token of a passage, in chunks; reading them is reading the cache as well."""
    runner.reset()
    blocks = tuple(range(-(-len(tokens) // BLOCK_SLOTS)))
    chunks = [tokens[start : start + CHUNK_TOKENS] for start in range(0, len(tokens), CHUNK_TOKENS)]
    found = []
    for number, chunk in enumerate(chunks):
        end = number * CHUNK_TOKENS + len(chunk)
        table = blocks[: -(-end // BLOCK_SLOTS)]
        piece = Slice(sequence=1, start=number * CHUNK_TOKENS, tokens=tuple(chunk), blocks=table)
        found.append(runner.logits(StepPlan(step_id=number, slices=(piece,))))
    return found


def measure(source: Runner, runner: Runner, passages: list[list[int]]) -> Quality:
    """The one against the other on all passages."""
    comparison = Comparison(lambda x: x, lambda x: x)
    for passage in passages:
        expected, found = torch.cat(logits(source, passage)), torch.cat(logits(runner, passage))
        comparison.add(torch.tensor(passage), expected, found)
    return comparison.result()


def passages_of(model: Path, tokens_max: int) -> list[list[int]]:
    """The text that ships with Pellucid, in this model's tokens, or its first ones."""
    with tokenizing(model) as tokenize:
        whole = read_evaluation(EVALUATION, tokenize, open_checkpoint(model).architecture)
    taken: list[list[int]] = []
    for tensor in whole:
        passage: list[int] = tensor.tolist()
        room = tokens_max - sum(map(len, taken))
        if room > 1:
            taken.append(passage[:room])
    return taken


def row(run: Run, quality: Quality) -> str:
    """One line of the table."""
    return (
        f"| {run.label} | {quality.perplexity:.2f} | {quality.perplexity_increase:+.2%} | {quality.top1:.2%} "
        f"| {quality.kl_mean:.4f} | {quality.kl_p99:.4f} |"
    )


def closing(source: Runner, model: Path, quality: Quality) -> list[str]:
    """What it was measured on."""
    details = source.facts.details
    return [
        "",
        f"{model.stem}: perplexity {quality.source_perplexity:.2f} in float32 on {quality.tokens} predictions of the",
        "text that ships with Pellucid, both sides computed by the engine.  "
        f"Commit {commit()}, torch {details['torch']}, {details['processor']}, {details['threads']} threads.",
    ]


def misses(found: dict[str, Quality]) -> Iterator[str]:
    """What is worse than what the default model is served with may be."""
    served = found.get(SERVED)
    if served is not None and (
        served.kl_mean > KL_MAX or served.top1 < TOP1_MIN or served.perplexity_increase > RISE_MAX
    ):
        yield f"{SERVED}: wanted are a KL of {KL_MAX}, {TOP1_MIN:.0%} and a rise of {RISE_MAX:.1%} at most"
    solved, plain = found.get(SOLVED), found.get(PLAIN)
    if solved is not None and plain is not None and solved.kl_mean > GPTQ_SHARE_MAX * plain.kl_mean:
        yield f"{SOLVED}: wanted is a KL of {GPTQ_SHARE_MAX:.0%} of that of plain rounding"


def main() -> None:
    """Measure all runs, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="at most so many")
    parser.add_argument("--only", default="", help="the runs whose label begins so")
    parser.add_argument("--write", action="store_true", help="into docs/quantization.md")
    arguments = parser.parse_args()
    runs = [run for run in RUNS if run.label.startswith(arguments.only)]
    if not runs:
        parser.exit(message=f"no run begins with {arguments.only}\n")
    model = Store(data_dir("", dict(os.environ))).pull(arguments.model).path
    passages = passages_of(model, arguments.tokens)
    source = load(model, Run("float32", dtype="float32"))
    lines, qualities = list(HEADER), list[Quality]()
    for run in runs:
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="pellucid-bench-") as folder:
            place = model
            if run.make is not None:
                place = Path(folder) / "model"
                run.make(str(model), place)
            runner = load(place, run)
            qualities.append(measure(source, runner, passages))
        lines.append(row(run, qualities[-1]))
        took_s = time.monotonic() - started_s
        print(lines[-1], f"{took_s:.0f} s, kernels {runner.facts.details['kernels']}", flush=True)
    lines += closing(source, model, qualities[-1])
    print("\n".join(lines[-3:]))
    if arguments.write:
        write("\n".join(lines), BEGIN, END)
    if missed := list(misses({run.label: quality for run, quality in zip(runs, qualities, strict=True)})):
        parser.exit(1, "\n".join(missed) + "\n")


if __name__ == "__main__":
    main()
