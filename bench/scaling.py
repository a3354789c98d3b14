"""
`pellucid bench scaling`: the same load on one rank, on several, and on as many replicas, in turns.
"""

import asyncio
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import click
import msgspec

from bench.appliance import Appliance, Books, Refused, serving
from bench.host import busy_s, commit, host, tree_s
from bench.load import Answers, Load, ServerError, drive, warm
from bench.table import Report, print_report
from bench.verdict import Row, verdict
from launch.cores import share_of, usable_cpus
from launch.errors import UserError
from launch.store import Model, Store, data_dir

NAME = "measured"
OURS = ("port", "host", "data-dir", "config", "model", "model-name", "engine", "replicas", "tensor-parallel", "threads")
NS_PER_S = 1e9
NS_PER_MS = 1e6
US_PER_S = 1e6


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    model: str
    ranks: tuple[int, ...]
    replicas: bool
    threads: int
    """Of each process; 0: all processors are shared out."""
    rounds: int
    load: Load
    serve_options: tuple[str, ...]


class Sample(msgspec.Struct, frozen=True):
    """One run of one configuration."""

    answers: Answers
    books: Books
    interconnect: str
    others_share: float
    """Of the time of this machine's processors: what programs had that were not measured."""


def run(settings: Settings, data: str, environ: dict[str, str], *, as_json: bool) -> int:
    """Measure and print; the exit code, 1 if nothing ran.  Raises UserError."""
    for option in settings.serve_options:
        name = option.removeprefix("--").partition("=")[0]
        if option.startswith("--") and name in OURS:
            raise UserError(f"--{name} behind `--`: the comparison sets it itself")
    model = Store(data_dir(data, environ)).pull(settings.model)
    with tempfile.TemporaryDirectory(prefix="pellucid-bench-") as folder:
        rows = asyncio.run(_measure(settings, model, Path(folder), environ))
    cpus = usable_cpus()
    report = Report(
        commit=commit(),
        host=host(),
        processors=len(cpus),
        model=model.name,
        settings=msgspec.to_builtins(settings),
        rows=rows,
        verdict=verdict(rows, len(cpus)),
    )
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print_report(report)
    return 0 if any(not row.refused for row in rows) else 1


def configurations(settings: Settings, processors: int) -> list[Row]:
    """What is compared, without figures: each number of ranks, then as many replicas."""
    several = [(1, count) for count in settings.ranks if count > 1] if settings.replicas else []
    rows = []
    for ranks, replicas in [*((count, 1) for count in settings.ranks), *several]:
        share = share_of(0, replicas, ranks, settings.threads, tuple(range(processors)))
        used = min(processors, (share.threads or processors) * ranks * replicas)
        rows.append(Row(ranks=ranks, replicas=replicas, processors=used))
    return rows


async def _measure(settings: Settings, model: Model, folder: Path, environ: dict[str, str]) -> tuple[Row, ...]:
    """All rounds; a configuration that was refused once is left out of the others."""
    rows = configurations(settings, len(usable_cpus()))
    samples: list[list[Sample]] = [[] for _ in rows]
    refused = [""] * len(rows)
    for number in range(settings.rounds):
        for index, row in enumerate(rows):
            if refused[index]:
                continue
            say = f"round {number + 1} of {settings.rounds}: {row.name}: "
            try:
                sample = await _run_once(settings, row, model, folder, environ)
            except (Refused, ServerError, aiohttp.ClientError, TimeoutError, ValueError) as error:
                refused[index] = str(error) or type(error).__name__
                click.echo(say + refused[index], err=True)
            else:
                samples[index].append(sample)
                click.echo(f"{say}{_tokens_per_s(sample):.1f} tokens/s", err=True)
    base = next((own for row, own in zip(rows, samples, strict=True) if row.processes == 1), [])
    base_tokens_per_s = statistics.median(map(_tokens_per_s, base)) if base else 0.0
    return tuple(
        msgspec.structs.replace(row, refused=why) if why else summary(row, own, base_tokens_per_s)
        for row, own, why in zip(rows, samples, refused, strict=True)
    )


async def _run_once(settings: Settings, row: Row, model: Model, folder: Path, environ: dict[str, str]) -> Sample:
    data = folder / f"{row.ranks}x{row.replicas}"  # the same in all rounds: packed weights are found again
    data.mkdir(exist_ok=True)
    options = ["--model", str(model.path), "--model-name", NAME, "--threads", str(settings.threads)]
    options += ["--tensor-parallel", str(row.ranks), "--replicas", str(row.replicas), "--drain", "0"]
    options += ["--speculative", "off", "--log-level", "warning"]  # what is guessed ahead depends on the text
    async with serving((*options, *settings.serve_options), data, environ, replicas=row.replicas) as appliance:
        sample = await _sample(appliance, settings.load)
    if row.ranks > 1 and sample.interconnect == "none":
        raise Refused("the engine says that it ran on one rank")
    return sample


async def _sample(appliance: Appliance, load: Load) -> Sample:
    await warm(appliance.session, appliance.url, NAME, load)
    before = await appliance.books()
    others_s = busy_s() - tree_s(os.getpid())
    answers = await drive(appliance.session, appliance.url, NAME, load)
    others_s = busy_s() - tree_s(os.getpid()) - others_s
    after = await appliance.books()
    others_share = max(0.0, others_s * NS_PER_S / answers.wall_ns / (os.cpu_count() or 1))
    return Sample(answers, after.since(before), await appliance.interconnect(), others_share)


def _tokens_per_s(sample: Sample) -> float:
    return sample.answers.output_tokens * NS_PER_S / sample.answers.wall_ns


def summary(row: Row, samples: Sequence[Sample], base_tokens_per_s: float) -> Row:
    """`row` with its figures; `samples` are of all rounds."""

    def median(of: Callable[[Sample], float]) -> float:
        return statistics.median(of(sample) for sample in samples)

    def first_ms(share: float) -> float:
        return median(lambda one: percentile([answer.first_ns for answer in one.answers.answers], share) / NS_PER_MS)

    def gap_ms(share: float) -> float:
        gaps = [[gap for answer in sample.answers.answers for gap in answer.gaps_ns] for sample in samples]
        return statistics.median(percentile(own, share) for own in gaps) / NS_PER_MS

    def part(name: str) -> float:
        return median(lambda one: one.books.parts_s.get(name, 0) * US_PER_S / one.answers.output_tokens)

    def straggles(rank: str) -> float:
        return median(lambda one: one.books.straggler_steps.get(rank, 0) / max(1, one.books.steps))

    part_us = {name: part(name) for name in sorted({name for one in samples for name in one.books.parts_s})}
    total_us = sum(part_us.values())
    ranks = sorted({rank for sample in samples for rank in sample.books.straggler_steps}, key=int)
    tokens_per_s = median(_tokens_per_s)
    speedup = tokens_per_s / base_tokens_per_s if base_tokens_per_s else 0.0
    return msgspec.structs.replace(
        row,
        interconnect=samples[-1].interconnect,
        others_share=median(lambda one: one.others_share),
        tokens_per_s=tokens_per_s,
        rounds_tokens_per_s=tuple(map(_tokens_per_s, samples)),
        first_p50_ms=first_ms(0.5),
        first_p99_ms=first_ms(0.99),
        gap_p50_ms=gap_ms(0.5),
        gap_p99_ms=gap_ms(0.99),
        speedup=speedup,
        efficiency=speedup / row.processes,
        shares={name: spent / total_us for name, spent in part_us.items()} if total_us else {},
        part_us=part_us,
        straggler_shares={rank: straggles(rank) for rank in ranks},
    )


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest of `values` that at least `share` of them are not above; 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * share // 1) - 1)] if ordered else 0
