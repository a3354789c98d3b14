"""
What is the matter with a system: which cause carries its slow requests.

For each quantity (time to the first token, longest gap, whole time) the slowest requests are taken apart: all beyond
p99, and all beyond p99.9.  A cause is reported that carries a good part of one of them, and enough time to be felt.
Growing memory is no part of any request: it is judged by its slope.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil

import msgspec

from diagnosis.causes import BY_NAME
from diagnosis.slope import slope
from diagnosis.split import Shares, Split, shares_in_gap, shares_over, split
from diagnosis.why import FELT_NS, TIME_UP, UNREAD_LONG_NS, UNSERVED, duration
from telemetry.evidence import GATEWAY, Evidence, Memory
from telemetry.records import RequestRecord

EvidenceValue = int | float | str
CARRIES = 0.2
"""Of a quantity of the slowest, what a cause must carry to be reported; and FELT_NS it must be, of one request."""
CROWD_NS, STARVED_NS = 150_000_000, 50_000_000
"""The same for what others' work does: where several are served, or other programs run, some of it is as usual."""
LEAST_NS = dict.fromkeys(("neighbours", "concurrency", "step_tokens"), CROWD_NS) | {"cpu_starvation": STARVED_NS}
GROWTH_BYTES_PER_S_MIN = 300_000.0
GROWTH_BYTES_MIN = {GATEWAY: 128_000_000}
"""In all, before it is worth a word: a gateway remembers requests and steps, up to so much."""
GROWTH_BYTES_ELSE = 8_000_000
UNSERVED_MIN = 3
"""Requests that were not served, before that is a finding; or all that there were."""
UNREAD_SHARE = 0.001
"""Of all requests, so many must have lain unread: the tails begin there, too."""
SHOWN_MAX = 5
"""Requests of a tail that are named."""


class Quantity(msgspec.Struct, frozen=True):
    """One that people feel."""

    name: str
    title: str
    amount: Callable[[RequestRecord], int]
    states: Callable[[RequestRecord], Mapping[str, int]]


QUANTITIES = (
    Quantity("ttft", "time to the first token", lambda one: one.first_token_ns, lambda one: one.first_token_states),
    Quantity("gap", "longest gap between tokens", lambda one: one.gap_max_ns, lambda one: one.gap_states),
    Quantity("e2e", "whole time", lambda one: one.finished_ns - one.accepted_ns, lambda one: one.states),
)
TAILS = {"p99": 0.99, "p99.9": 0.999}
MEAN = {"mean": 0.0}
"""Where a mean is all there is."""


class Tail(msgspec.Struct, frozen=True):
    """The slowest requests by one quantity."""

    quantile_ns: int
    requests: tuple[str, ...]


class Carried(msgspec.Struct, frozen=True):
    """What a cause carries of one quantity of the slowest."""

    share: float
    felt_ns: int  # of one request, on average
    quantity: str  # in words


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One cause, as the doctor reports it."""

    cause: str
    title: str
    share: float  # the most that it carries of any of the quantities
    quantities: dict[str, float]  # its share of each
    words: str
    evidence: dict[str, EvidenceValue]
    change: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the doctor says of a stretch of time; no findings: all is well."""

    window_s: float
    requests: int
    steps: int
    tails: dict[str, Tail]
    findings: tuple[Diagnosis, ...]
    in_flight: int = 0  # requests that have not ended: nothing is known of them but how long they have been there
    oldest_ns: int = 0  # of them
    workers_silent: list[int] = []  # workers of the gateway that did not answer: what they know is missing


def examine(evidence: Evidence) -> Report:
    """Look at all of it; the first finding carries most."""
    carried: dict[str, dict[str, Carried]] = {}
    tails: dict[str, Tail] = {}
    usual = shares_over(evidence)
    for quantity in QUANTITIES:
        measured = [one for one in evidence.requests if quantity.amount(one) > 0 and one.route and not _failed(one)]
        measured.sort(key=quantity.amount, reverse=True)
        for tail, quantile in (MEAN if evidence.mean_of else TAILS).items():
            slowest = measured[: max(1, len(measured) - ceil(quantile * len(measured)) + 1)]
            if not slowest:
                continue
            name = f"{quantity.name}_{tail}"
            tails[name] = Tail(quantity.amount(slowest[-1]), tuple(one.request_id for one in slowest[:SHOWN_MAX]))
            parts = _joined(_taken_apart(one, quantity, usual, evidence) for one in slowest)
            whole = max(1, sum(parts.values()))
            for cause, spent_ns in parts.items():
                felt_ns = spent_ns // len(slowest)
                if (
                    spent_ns >= CARRIES * whole
                    and felt_ns >= LEAST_NS.get(cause, FELT_NS)
                    and not BY_NAME[cause].ordinary
                ):
                    shown = f"the mean {quantity.title}" if evidence.mean_of else f"the {quantity.title} at {tail}"
                    carried.setdefault(cause, {})[name] = Carried(spent_ns / whole, felt_ns, shown)
    found = [_diagnosis(name, shares, evidence) for name, shares in carried.items()]
    found += [*_unserved(evidence, carried), *_unread(evidence, carried), *_memory(evidence)]
    return Report(
        window_s=evidence.window_ns / 1e9,
        requests=evidence.mean_of or len(evidence.requests),
        steps=evidence.totals.steps,
        tails=tails,
        findings=tuple(sorted(found, key=lambda one: -one.share)),
        in_flight=len(evidence.in_flight_ns),
        oldest_ns=max(evidence.in_flight_ns, default=0),
        workers_silent=evidence.workers_silent,
    )


def _failed(record: RequestRecord) -> bool:
    """Who was refused was not slow; who left, or was given up, may have been."""
    slow = record.status == 499 or (record.status >= 500 and record.outcome in TIME_UP)
    return record.status >= 400 and not slow


def _taken_apart(record: RequestRecord, quantity: Quantity, usual: Shares, evidence: Evidence) -> Split:
    shares = shares_in_gap(record, usual, evidence) if quantity.name == "gap" else usual
    return split(quantity.states(record), record, shares, evidence)


def _joined(splits: Iterable[Split]) -> Split:
    whole: Split = {}
    for one in splits:
        for cause, spent_ns in one.items():
            whole[cause] = whole.get(cause, 0) + spent_ns
    return whole


def _diagnosis(name: str, carried: Mapping[str, Carried], evidence: Evidence) -> Diagnosis:
    cause = BY_NAME[name]
    most = max(carried.values(), key=lambda one: one.share)
    about = "about " if cause.estimated else ""
    failed, failures = _failures(name, evidence)
    return Diagnosis(
        cause=name,
        title=cause.title,
        share=most.share,
        quantities={quantity: one.share for quantity, one in carried.items()},
        words=f"{about}{most.share:.0%} of {most.quantity}, {duration(most.felt_ns)}, went because {cause.words}"
        + (f"; and {failures}" if failed else ""),
        evidence=_numbers(name, evidence),
        change=cause.change(evidence),
    )


def _unserved(evidence: Evidence, carried: Mapping[str, object]) -> Iterable[Diagnosis]:
    """Requests that failed before anybody could be slow; where others were slow for the same cause, see `_failures`."""
    for name in dict.fromkeys(cause for cause, _ in UNSERVED.values()):
        failed, because = _failures(name, evidence)
        if failed < min(UNSERVED_MIN, len(evidence.requests)) or not failed or name in carried:
            continue
        cause = BY_NAME[name]
        yield Diagnosis(
            cause=cause.name,
            title=cause.title,
            share=failed / len(evidence.requests),
            quantities={},
            words=because,
            evidence={"failed_requests": failed, "engine_starts": evidence.starts},
            change=cause.change(evidence),
        )


def _failures(name: str, evidence: Evidence) -> tuple[int, str]:
    """How many requests failed because of that cause, and that in words."""
    outcomes = Counter(one.outcome for one in evidence.requests if UNSERVED.get(one.outcome, ("",))[0] == name)
    failed = outcomes.total()
    because = " or ".join(UNSERVED[outcome][1] for outcome, _ in outcomes.most_common())
    return failed, f"{failed} of {len(evidence.requests)} requests failed, because {because}"


def _unread(evidence: Evidence, carried: Mapping[str, object]) -> Sequence[Diagnosis]:
    """Requests that came while the gateway was held up: they waited before anybody kept a book of them."""
    late = [one for one in evidence.requests if one.unread_ns >= UNREAD_LONG_NS]
    if not late or len(late) < UNREAD_SHARE * len(evidence.requests) or "event_loop" in carried:
        return ()
    cause = BY_NAME["event_loop"]
    worst = max(late, key=lambda one: one.unread_ns)
    return [
        Diagnosis(
            cause=cause.name,
            title=cause.title,
            share=worst.unread_ns / (worst.unread_ns + worst.finished_ns - worst.accepted_ns),
            quantities={},
            words=f"{len(late)} requests may have lain unread, one for {duration(worst.unread_ns)}: {cause.words}",
            evidence={"unread_requests": len(late), "unread_ns_max": worst.unread_ns},
            change=cause.change(evidence),
        )
    ]


def _numbers(name: str, evidence: Evidence) -> dict[str, EvidenceValue]:
    """What can be looked up elsewhere."""
    totals = evidence.totals
    steps, busy_ns = max(1, totals.steps), max(1, totals.busy_ns)
    known: dict[str, dict[str, EvidenceValue]] = {
        "concurrency": {"waiting": totals.waiting / steps, "running": totals.running / steps},
        "kv_starvation": {
            "preemptions": totals.preemptions,
            "recomputed_tokens": totals.recompute_tokens,
            "utilization_while_waiting": totals.kv_wait_utilization / max(1, totals.kv_waits),
        },
        "fragmentation": {"unfilled_while_waiting": totals.kv_wait_fragmentation / max(1, totals.kv_waits)},
        "prefix_lost": {"evictions": totals.evictions, **_repeats(evidence)},
        "prefix_off": _repeats(evidence),
        "cold_start": {"engine_starts": evidence.starts, **_repeats(evidence)},
        "speculation": {"drafted_tokens": totals.drafted_tokens, "rejected_tokens": totals.draft_rejected_tokens},
        "step_tokens": {"step_tokens_max": totals.tokens_max, "fixed_share_of_a_step": totals.fixed_share()},
        "dequantize": {"weights": evidence.facts.weights, "why": evidence.facts.why_torch},
        "straggler": {f"rank_{rank}_late_ns": late_ns for rank, late_ns in sorted(totals.late_ranks.items())},
        "interconnect": {"transfer_share": totals.parts.get("interconnect_transfer", 0) / busy_ns},
        "garbage_collection": {"engine_pause_share": totals.gc_pause_ns / busy_ns},
        "cpu_starvation": {"engine_starved_ns_per_busy_ns": totals.starved_ns / busy_ns, **_machine(evidence)},
        "neighbours": {"prompt_rows_share": totals.prefill_tokens / max(1, totals.tokens)},
    }
    return known.get(name, {})


def _repeats(evidence: Evidence) -> dict[str, EvidenceValue]:
    return {
        "repeated_tokens": sum(one.repeated_tokens for one in evidence.requests),
        "cached_tokens": sum(one.cached_tokens for one in evidence.requests),
    }


def _machine(evidence: Evidence) -> dict[str, EvidenceValue]:
    pressure = evidence.pressure.get("cpu")
    return {} if pressure is None else {"machine_cpu_pressure": pressure}


def _memory(evidence: Evidence) -> Sequence[Diagnosis]:
    """A process whose memory surely grows, the worst."""
    grows = sorted(_growth(evidence.memory), reverse=True)
    if not grows:
        return ()
    least, most, process, bytes_now = grows[0]
    cause = BY_NAME["memory_growth"]
    return [
        Diagnosis(
            cause=cause.name,
            title=cause.title,
            share=CARRIES,
            quantities={},
            words=f"{process} takes {least / 1e6:.2f} to {most / 1e6:.2f} MB more each second (95 %): {cause.words}",
            evidence={
                "process": process,
                "resident_bytes": bytes_now,
                "bytes_per_s_least": least,
                "bytes_per_s_most": most,
            },
            change=cause.change(evidence),
        )
    ]


def _growth(memory: Memory) -> Iterable[tuple[float, float, str, int]]:
    for process, samples in memory.items():
        interval = slope([(at_ns / 1e9, float(size)) for at_ns, size in samples])
        grown = samples[-1][1] - samples[0][1] if samples else 0
        enough = grown >= GROWTH_BYTES_MIN.get(process.partition(" ")[0], GROWTH_BYTES_ELSE)
        if enough and interval is not None and interval[0] >= GROWTH_BYTES_PER_S_MIN:
            yield *interval, process, samples[-1][1]
