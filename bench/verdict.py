"""
What limits scaling, in one line, by rules.

It is said of the most ranks that have processors of their own.  They scale if each processor does at least
`SCALES_MIN` of what it does under one rank.  Otherwise what costs the largest share of the step time is named:

wait        some ranks wait for others that come later; the straggler is named if it is one in `STRAGGLER_MIN` of steps
transfer    the wire, once all ranks have come
idle        there is not enough load
compute     beyond its part of what one rank computes for a token: work that every rank does, or that got slower
rank 0      planning, sampling and the like, which the other ranks do not share

Whatever it is, it is added if other programs had much of the processors, because all of this may be their doing.
"""

from collections.abc import Sequence

import msgspec

SCALES_MIN = 0.85
STRAGGLER_MIN = 0.5
EXPLAINS_MIN = 0.02  # a smaller share explains nothing
OTHERS_MAX = 0.1  # of the processors' time; more of it for other programs is to be known
BETTER_MIN = 1.05  # replicas that give more than that many times as much are worth a word
ALONE = ("publish", "plan", "draft", "batch", "sample", "commit")  # parts of a step that only rank 0 has


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration; figures are medians over rounds, and 0 where it was refused."""

    ranks: int = 1
    replicas: int = 1
    processors: int
    """That its threads can use."""
    refused: str = ""
    """Why it did not run; empty: it did."""
    interconnect: str = "none"
    tokens_per_s: float = 0.0
    rounds_tokens_per_s: tuple[float, ...] = ()
    first_p50_ms: float = 0.0
    first_p99_ms: float = 0.0
    gap_p50_ms: float = 0.0
    gap_p99_ms: float = 0.0
    speedup: float = 0.0
    """Throughput by that of one rank; 0: that is not known."""
    efficiency: float = 0.0
    """`speedup` by the number of processes."""
    shares: dict[str, float] = {}
    """Of the step time: each part of a step, of rank 0."""
    part_us: dict[str, float] = {}
    """The same for each output token."""
    others_share: float = 0.0
    """Of the processors' time: what other programs had."""
    straggler_shares: dict[str, float] = {}
    """By rank: in how many of the steps it was the one that the others waited for."""

    @property
    def processes(self) -> int:
        """That compute."""
        return self.ranks * self.replicas

    @property
    def name(self) -> str:
        """For people."""
        many, what = (self.replicas, "replica") if self.replicas > 1 else (self.ranks, "rank")
        return f"{many} {what}{'s' if many > 1 else ''}"

    @property
    def straggler(self) -> tuple[str, float]:
        """The rank that the others waited for most often, and in which share of steps; empty: there is none."""
        return max(self.straggler_shares.items(), key=lambda item: item[1], default=("", 0.0))


def verdict(rows: Sequence[Row], processors: int) -> str:
    """One line.  `processors`: those of this machine that may be used."""
    base = next((row for row in rows if row.processes == 1), None)
    several = [row for row in rows if row.ranks > 1]
    ran = [row for row in several if not row.refused]
    if base is None or not several:
        return "no verdict: one rank and several are needed, such as --ranks 1,2"
    if base.refused or not ran:
        refused = base if base.refused else several[0]
        return f"no verdict: {refused.name} did not run: {refused.refused}"
    fit = [row for row in ran if row.ranks <= processors]
    if fit:
        subject = max(fit, key=lambda row: row.ranks)
        beyond = [row for row in ran if row.ranks > processors]
        said = [_scales(subject, base) or _loss(subject, base)]
        said += [_too_few(min(beyond, key=lambda row: row.ranks), processors)] if beyond else []
    else:
        subject = min(ran, key=lambda row: row.ranks)
        said = [f"{_too_few(subject, processors)}, {subject.speedup:.2f} times as fast as one rank"]
    said += [
        f"{row.name} give {row.tokens_per_s / subject.tokens_per_s:.2f} times as many tokens"
        for row in rows
        if row.replicas == subject.ranks and row.tokens_per_s > BETTER_MIN * subject.tokens_per_s
    ]
    others = max(row.others_share for row in rows)
    said += [f"but other programs had {others:.0%} of the processors' time"] if others > OTHERS_MAX else []
    return "; ".join(said)


def _too_few(row: Row, processors: int) -> str:
    return f"fewer processors than ranks: {row.name} on {processors} processor{'s' if processors > 1 else ''}"


def _scales(subject: Row, base: Row) -> str:
    """Empty: it does not."""
    if subject.speedup * base.processors / subject.processors < SCALES_MIN:
        return ""
    if subject.processors > base.processors:
        return f"it scales: {subject.name} are {subject.speedup:.2f} times as fast, efficiency {subject.efficiency:.2f}"
    return (
        f"it scales as far as it can: one rank used all {base.processors} processors already, and "
        f"{subject.name} on the same are {subject.speedup:.2f} times as fast"
    )


def _loss(subject: Row, base: Row) -> str:
    """What costs most, in words."""
    shares = subject.shares
    total_us = sum(subject.part_us.values())
    own_us = base.part_us.get("compute", 0.0) * base.processors / subject.processors
    more_us = subject.part_us.get("compute", 0.0) - own_us
    costs = {
        "wait": shares.get("interconnect_wait", 0.0),
        "transfer": shares.get("interconnect_transfer", 0.0),
        "idle": shares.get("idle", 0.0),
        "compute": max(0.0, more_us / total_us) if total_us else 0.0,
        "rank 0": sum(shares.get(part, 0.0) for part in ALONE),
    }
    cause = max(costs, key=lambda name: costs[name])
    share = costs[cause]
    if share < EXPLAINS_MIN:
        return f"no part of the step explains it: {subject.name} are {subject.speedup:.2f} times as fast as one"
    return {
        "wait": f"wait: {share:.0%} of the step, and {_straggler(subject)}",
        "transfer": f"transfer: {share:.0%} of the step is the wire ({subject.interconnect})",
        "idle": f"idle: the engine has nothing to do in {share:.0%} of the time; give more --streams",
        "compute": f"compute that is not divided: {share:.0%} of the step, beyond each rank's part of one's work",
        "rank 0": f"what rank 0 does alone: {share:.0%} of the step is planning, sampling and the like",
    }[cause]


def _straggler(subject: Row) -> str:
    rank, share = subject.straggler
    if share >= STRAGGLER_MIN:
        return f"rank {rank} is the straggler in {share:.0%} of steps"
    return f"no rank is the straggler in more than {share:.0%} of steps: they are disturbed in turn"
