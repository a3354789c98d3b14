"""
Why one request took so long.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from diagnosis.causes import BY_NAME, CAUSES
from diagnosis.split import Split, shares_in_gap, shares_of, shares_over, split
from telemetry.evidence import Evidence
from telemetry.records import RequestRecord, StepRecord, request_of

OTHERS_MAX = 8
BASELINE_MAX = 500
"""As many of the newest requests say what is usual."""
BASELINE_MIN = 5
"""Requests that there have to be before anybody speaks of what is usual."""
WORTH = 0.02
"""Of the request's time: less is not a cause."""
BLAMED, BLAMED_UNUSUAL = 0.2, 0.1
"""Of the request's time, what a fault must have taken to be named before the request's own work; if it is unusual."""
FELT_NS = 20_000_000
"""And so long it must be."""
UNREAD_NS, UNREAD_LONG_NS = 20_000_000, 150_000_000
"""
Shorter than that nothing is said of what came before a request was taken up, and nobody is blamed for it: a loop on a
busy machine is late by some ten ms at times.
"""
TIME_UP = ("deadline", "timeout")
"""Outcomes of who was given up."""
PAUSE_NS = 100_000_000
"""A gap between tokens that a reader notices, if it is also PAUSE_TIMES as long as the others."""
PAUSE_TIMES = 5
PAUSE_WORTH = 0.5
"""Of such a gap, what a cause must carry to be named."""
UNSERVED = {
    "no_healthy_engine": ("cold_start", "there was no engine"),
    "engine_lost": ("cold_start", "their engine died"),
    "overloaded": ("concurrency", "as many waited already as may"),
    "keys_unavailable": ("redis", "the server of keys could not be asked"),
    "limits_unavailable": ("redis", "the server of limits could not be asked"),
    "upstream_failed": ("upstream", "no upstream answered"),
}
"""Outcomes of who was not served, the cause of that, and its words."""
UNUSUAL = 1.5
"""So many times what it usually takes."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause."""

    cause: str
    title: str
    ns: int
    share: float  # of the request's time
    baseline_ns: int | None  # of other requests lately, the median; None: there are too few
    estimate: bool  # computed from shares of steps, and not stamped
    words: str
    change: str


class Other(msgspec.Struct, frozen=True):
    """A request that was in the same steps, or was served instead."""

    request_id: str
    ns: int  # of the time of those steps, its share


class Absent(msgspec.Struct, frozen=True):
    """What it is not."""

    cause: str
    words: str


class Why(msgspec.Struct, frozen=True, kw_only=True, rename={"absent": "not"}):
    """The answer; the causes sum to the request's time."""

    request_id: str
    outcome: str | None
    e2e_ns: int
    summary: str
    blamed: str | None  # the fault that made it slow, pause or fail, if there was one; None: it was its own work
    change: str | None  # what would help against that
    causes: tuple[Finding, ...]
    others: tuple[Other, ...]
    steps_known: int  # of the steps that it was in, those that are still remembered
    absent: tuple[Absent, ...]
    workers_silent: list[int] = []  # workers of the gateway that did not answer: what they know is missing


def why(record: RequestRecord, evidence: Evidence) -> Why:
    """The causes of `record`'s time, most first; `evidence` is what else has happened lately."""
    steps = list(steps_of(record, evidence))
    e2e_ns = record.finished_ns - record.accepted_ns
    found = split(record.states, record, shares_of(record, steps, evidence), evidence)
    usual = _baseline(record, evidence)
    findings = tuple(
        Finding(
            cause=name,
            title=BY_NAME[name].title,
            ns=spent_ns,
            share=spent_ns / max(1, e2e_ns),
            baseline_ns=None if usual is None else usual.get(name, 0),
            estimate=BY_NAME[name].estimated,
            words=BY_NAME[name].words,
            change=BY_NAME[name].change(evidence),
        )
        for name, spent_ns in sorted(found.items(), key=lambda one: -one[1])
        if spent_ns >= WORTH * e2e_ns or BY_NAME[name].ordinary
    )
    blames = list(_blames(record, e2e_ns, findings, evidence))
    return Why(
        request_id=record.request_id,
        outcome=record.outcome or None,
        e2e_ns=e2e_ns,
        summary=_summary(record, e2e_ns, findings, blames),
        blamed=blames[0].cause if blames else None,
        change=BY_NAME[blames[0].cause].change(evidence) if blames else None,
        causes=findings,
        others=_others(record, steps, evidence),
        steps_known=len(steps),
        absent=tuple(
            Absent(cause.name, cause.absent)
            for cause in CAUSES
            if cause.absent
            and record.outcome  # Before its end nobody can tell.
            and cause.name not in {blame.cause for blame in blames}
            and found.get(cause.name, 0) < (1 if cause.ordinary else WORTH * e2e_ns)
            and (evidence.totals.steps or not cause.estimated)  # Without steps nobody can tell.
        ),
        workers_silent=evidence.workers_silent,
    )


def steps_of(record: RequestRecord, evidence: Evidence) -> Iterator[StepRecord]:
    """Those steps that served it, as far as they are remembered."""
    numbers = {spot for spot, name in evidence.names.items() if request_of(name) == record.request_id}
    for (replica, _), step in evidence.steps.items():
        if any((replica, number) in numbers for number, _ in step.slices):
            yield step


def _baseline(record: RequestRecord, evidence: Evidence) -> Split | None:
    """What other requests of its route spend on each cause, the median of each."""
    others = [one for one in evidence.requests if one.route == record.route and one.request_id != record.request_id]
    others = others[:BASELINE_MAX]
    if len(others) < BASELINE_MIN:
        return None
    shares = shares_over(evidence)
    splits = [split(one.states, one, shares, evidence) for one in others]
    return {cause.name: int(median(one.get(cause.name, 0) for one in splits)) for cause in CAUSES}


def _others(record: RequestRecord, steps: Sequence[StepRecord], evidence: Evidence) -> tuple[Other, ...]:
    """Who was in its steps, by their share of them, and who was served while it stalled."""
    spent: dict[str, int] = dict(record.stalled_for)
    spent.pop("", None)
    spent.pop(record.request_id, None)  # Another choice of its own.
    names = _names(evidence)
    for step in steps:
        rows = sum(count for _, count in step.slices)
        for number, count in step.slices:
            name = names.get((step.replica, number), "")
            if name not in ("", record.request_id):
                spent[name] = spent.get(name, 0) + step.served_ns * count // max(1, rows)
    most = sorted(spent.items(), key=lambda one: -one[1])[:OTHERS_MAX]
    return tuple(Other(name, spent_ns) for name, spent_ns in most)


def _names(evidence: Evidence) -> Mapping[tuple[int, int], str]:
    return {spot: request_of(name) for spot, name in evidence.names.items()}


class _Blame(NamedTuple):
    """A fault, and what is to be said of it beside what most of the time went into."""

    cause: str
    words: str


def _blames(record: RequestRecord, e2e_ns: int, findings: Sequence[Finding], evidence: Evidence) -> Iterator[_Blame]:
    """The worst first: that it was not served, then what made it slow, made it pause, or kept it from being read."""
    unserved, because = UNSERVED.get(record.outcome, ("", ""))
    if unserved:
        yield _Blame(unserved, f"It was not served: {because}.")
    fault = _fault(findings)
    if fault is not None and fault.cause != unserved:
        yield _Blame(fault.cause, "")
    pause = _pause(record, evidence)
    if pause is not None and (fault is None or pause.cause != fault.cause):
        yield pause
    if record.unread_ns >= UNREAD_LONG_NS and record.unread_ns >= BLAMED * (record.unread_ns + e2e_ns):
        yield _Blame("event_loop", "")


def _fault(findings: Sequence[Finding]) -> Finding | None:
    """Of what it spent its time on, the first that ought not to be."""
    return next((one for one in findings if not BY_NAME[one.cause].ordinary and _is_blamed(one)), None)


def _pause(record: RequestRecord, evidence: Evidence) -> _Blame | None:
    """Its longest gap between tokens, if that is one to notice and a fault made it."""
    gap_ns = record.gap_max_ns
    if gap_ns < max(PAUSE_NS, PAUSE_TIMES * (record.token_gap_mean_ns() or 0)):
        return None
    found = split(record.gap_states, record, shares_in_gap(record, shares_over(evidence), evidence), evidence)
    cause = max(found, key=found.__getitem__, default=None)  # A book that does not close may say nothing of it.
    if cause is None or found[cause] < PAUSE_WORTH * gap_ns or BY_NAME[cause].ordinary:
        return None
    return _Blame(cause, f"Its longest gap between tokens, {duration(gap_ns)}, came because {BY_NAME[cause].words}.")


def _summary(record: RequestRecord, e2e_ns: int, findings: Sequence[Finding], blames: Sequence[_Blame]) -> str:
    """In sentences."""
    said = [f"It took {duration(e2e_ns)}."]
    if findings:
        most = _fault(findings) or findings[0]
        usual = "" if most.baseline_ns is None else f" (usually {duration(most.baseline_ns)})"
        spent = f"{'about ' if most.estimate else ''}{duration(most.ns)}, {most.share:.0%}"
        said = [f"Of {duration(e2e_ns)}, {spent}, went because {BY_NAME[most.cause].words}{usual}."]
        if not blames:
            said.append("No fault stands out.")
    said += [one.words for one in blames if one.words]
    if record.outcome in TIME_UP:
        said.append(f"Its time was up ({record.outcome}): it might have taken longer.")
    if record.unread_ns >= max(UNREAD_NS, WORTH * e2e_ns):
        lain = f"it may have lain unread for {duration(record.unread_ns)}"
        said.append(f"Before that {lain}: the event loop was held up.")
    if record.first_token_ns:
        said.append(f"The first token came after {duration(record.first_token_ns)}.")
    return " ".join(said)


def _is_blamed(one: Finding) -> bool:
    unusual = one.baseline_ns is not None and one.ns >= UNUSUAL * one.baseline_ns
    if one.baseline_ns is not None and one.ns * UNUSUAL < one.baseline_ns:
        return False  # It is better off than others.
    return one.ns >= FELT_NS and one.share >= (BLAMED_UNUSUAL if unusual else BLAMED)


def duration(spent_ns: int) -> str:
    """For people."""
    if spent_ns >= 10_000_000_000:
        return f"{spent_ns / 1e9:.1f} s"
    return f"{spent_ns / 1e9:.2f} s" if spent_ns >= 1_000_000_000 else f"{spent_ns / 1e6:.1f} ms"
