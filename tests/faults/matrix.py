"""
The matrix: every fault at every strength, some times over, and runs without any; then the table of what was said.
"""

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import msgspec

from tests.faults.appliance import started
from tests.faults.examination import HEALTHY, RANKS, Verdict, examine, warm
from tests.faults.injections import DEFAULT, FAULTS, TWO_RANKS, TWO_REPLICAS, WITH_KEYS, Fault, Strength, common
from tests.faults.load import Background

WINDOW_S = 7.0
RIGHT_MIN = 0.95
RATES_S = (1.0, 2.5, 5.0)
HEALTHY_SETUPS = {"one process": DEFAULT, "two ranks": TWO_RANKS, "keys": WITH_KEYS, "two replicas": TWO_REPLICAS}


class Run(msgspec.Struct, frozen=True):
    """One line of the plan; without a fault nothing should be found."""

    fault: Fault | None
    strength: Strength
    seed: int


def healthy() -> Iterator[Strength]:
    """Nothing is wrong, at some rates on some setups; nor with prompts that are long, or that the cache has."""
    for name, setup in HEALTHY_SETUPS.items():
        for rate_s in RATES_S:
            yield Strength(f"{name}, {rate_s:g}/s", setup=setup, background=Background(rate_s=rate_s))
    yield Strength("long prompts", background=Background(rate_s=0.7, words=(300, 500), tokens=(8, 16)))
    yield Strength("repeated prompts", background=common(320))


def plan(causes: Sequence[str], strengths: Sequence[int], seeds: int) -> list[Run]:
    """All runs; those that can share an appliance are together."""
    wanted: list[tuple[Fault | None, Strength]] = []
    if HEALTHY in causes:
        wanted += [(None, strength) for strength in healthy()]
    for fault in FAULTS:
        if fault.cause in causes:
            wanted += [(fault, fault.strengths[number - 1]) for number in strengths]
    runs = [Run(fault, strength, seed) for fault, strength in wanted for seed in range(1, seeds + 1)]
    setups = list(dict.fromkeys(run.strength.setup for run in runs))
    return sorted(runs, key=lambda run: setups.index(run.strength.setup))


async def carried_out(runs: Sequence[Run], folder: Path, window_s: float, keep: BinaryIO | None) -> list[Verdict]:
    """One after the other, a line each; `keep` gets all that was said, a line of JSON each."""
    verdicts = []
    for setup, together in groupby(runs, key=lambda run: run.strength.setup):
        async with started(setup, folder) as patient:
            await warm(patient)
            for run in together:
                verdict = await examine(patient, run.fault, run.strength, run.seed, window_s)
                print(line(verdict), flush=True)
                verdicts.append(verdict)
                if keep is not None:
                    keep.write(msgspec.json.encode(verdict) + b"\n")
                    keep.flush()
    return verdicts


def line(verdict: Verdict) -> str:
    """One run."""
    bad = {status: count for status, count in verdict.statuses.items() if status != 200}
    said = f"doctor {verdict.doctor_rank}: {', '.join(verdict.doctor) or 'nothing'}"
    if verdict.why is not None:
        said += f"; why {verdict.why_rank}: {', '.join(verdict.why) or 'nothing'}"
    failed = f"; of {sum(verdict.statuses.values())} requests failed {bad}" if bad else ""
    return f"{verdict.cause:20} {verdict.strength:18} seed {verdict.seed}  {said}{failed}"


def tally(ranks: Iterable[str | None]) -> str:
    """How often right / second / wrong; nothing where nobody was asked."""
    counts = Counter(rank for rank in ranks if rank is not None)
    return " / ".join(str(counts[rank]) for rank in RANKS) if counts else "-"


def table(verdicts: Sequence[Verdict]) -> str:
    """By cause and strength, and what was said where it was not the cause."""
    rows = [f"{'cause':20} {'strength':18} {'doctor':>10} {'why':>10}   said first instead"]
    kinds = list(dict.fromkeys((verdict.cause, verdict.strength) for verdict in verdicts))
    for kind in kinds:
        own = [verdict for verdict in verdicts if (verdict.cause, verdict.strength) == kind]
        instead = Counter(
            f"{who}: {(said or ('nothing',))[0]}"
            for verdict in own
            for who, said, rank in (
                ("doctor", verdict.doctor, verdict.doctor_rank),
                ("why", verdict.why, verdict.why_rank),
            )
            if rank not in (None, "right")
        )
        doctor, why = tally(one.doctor_rank for one in own), tally(one.why_rank for one in own)
        rows.append(f"{kind[0]:20} {kind[1]:18} {doctor:>10} {why:>10}   {_counted(instead)}")
    return "\n".join(rows)


def _counted(said: Counter[str]) -> str:
    return ", ".join(f"{words} ({count})" if count > 1 else words for words, count in said.items())


def share(ranks: Iterable[str | None]) -> float:
    """Of those asked, who were right; 1 of nobody."""
    asked = [rank for rank in ranks if rank is not None]
    return sum(rank == "right" for rank in asked) / len(asked) if asked else 1.0


def main(arguments: Sequence[str]) -> int:
    """Run the matrix, or a part of it.  Returns 0 if enough was right."""
    everything = [HEALTHY, *(fault.cause for fault in FAULTS)]
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="The fault matrix.")
    parser.add_argument("--causes", default=",".join(everything), help="with commas; healthy: none")
    parser.add_argument("--strengths", default="1,2,3", help="of these, the weakest is 1")
    parser.add_argument("--seeds", type=int, default=3, help="how often each")
    parser.add_argument("--window", type=float, default=WINDOW_S, metavar="SECONDS", help="of one run")
    parser.add_argument("--json", type=argparse.FileType("wb"), metavar="FILE", help="keep all that was said, by lines")
    given = parser.parse_args(arguments)
    causes = given.causes.split(",")
    if unknown := set(causes) - set(everything):
        parser.error(f"no such cause: {', '.join(sorted(unknown))}; there are {', '.join(everything)}")
    runs = plan(causes, [int(number) for number in given.strengths.split(",")], given.seeds)
    with tempfile.TemporaryDirectory(prefix="pellucid-faults-") as folder:
        verdicts = asyncio.run(carried_out(runs, Path(folder), given.window, given.json))
    doctor = share(verdict.doctor_rank for verdict in verdicts if verdict.cause != HEALTHY)
    why = share(verdict.why_rank for verdict in verdicts if verdict.cause != HEALTHY)
    quiet = share(verdict.doctor_rank for verdict in verdicts if verdict.cause == HEALTHY)
    blameless = share(verdict.why_rank for verdict in verdicts if verdict.cause == HEALTHY)
    print(f"\nright / second / wrong\n\n{table(verdicts)}\n")
    print(
        f"doctor {doctor:.1%} right, why {why:.1%} right; of the healthy runs {quiet:.1%} without a finding, and"
        f" {blameless:.1%} with a slowest request for which nothing is blamed"
    )
    return 0 if min(doctor, why, blameless) >= RIGHT_MIN and quiet == 1 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
