"""
A quantity of one request, split into causes: whole nanoseconds that sum to it.

What is stamped as a state of its own (waiting for KV, for Redis, for the client) is taken as it is.  The time of steps
is shared out by what the steps were spent on (`Shares`): an estimate.  What overlaps with states (garbage collection,
a late event loop, threads without a processor) is taken out of the states of its process.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from telemetry.evidence import Evidence, Facts
from telemetry.records import RequestRecord, StepRecord
from telemetry.totals import StepTotals

Split = dict[str, int]
"""Nanoseconds by cause."""

_REDIS = ("auth", "limit", "route")
_GATEWAY = ("parse", "tokenize", "deliver", "detokenize", "send", "finalize")
_KV = ("queue_kv_full", "preempted", "recompute")
_PLACES = ("queue_batch_full", "queue_fairness")
_STEPS = ("dispatch", "prefill", "decode", "stalled")
"""The states in which the engine computes, for it or for others."""
_STAMPED = {"send_blocked": "client", "lost": "cold_start", "resume": "cold_start", "upstream": "upstream"}

FRAGMENTED = 0.3
"""Above this share of unfilled slots, while somebody waits for KV, that is what is to be said of it."""
REPEATED_TOKENS_MIN = 32
FULL_STEPS = 0.4
"""Of all rows those in steps that had as many as any: from here on the window decides, and not the load."""
JUDGED_STEPS_MIN = 10
"""Fewer steps do not tell what is usual for them: all of the window are asked."""
STARVED = 0.35
"""Of busy time, a thread of an engine has no processor for so long where gateway and clients use the same ones."""
TRANSFER = 0.3
"""Of busy time, exchanges take so long between ranks that use the same processors: what is beyond it is the wire."""
ONE_RANK = 0.5
"""By so much of all lateness one rank must be later than the others together."""
FLOAT_WASTE = 0.5
"""Of products with weights of 16 bits, what those of 8 save where reading them is what takes the time."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the busy time of steps, the share of each cause; what is left is computing."""

    of: Mapping[str, float] = field(default_factory=dict)
    fixed: float = 0.0
    """Of a full step, what it costs whatever its rows are; 0 where the window does not decide."""
    prompts: float = 0.0
    """Of computing steps in which somebody's output grows, what goes into the rows of prompts."""
    missed: float = 0.0
    """Of the prompts that were computed, what a prefix cache could have had."""


def shares_over(
    evidence: Evidence, steps: Iterable[StepRecord] | None = None, *, usual: Shares | None = None
) -> Shares:
    """
    Over all of it, or over these steps; what single steps cannot tell is taken from all of them, or from `usual`, which
    is of all of them.
    """
    whole, facts = evidence.totals, evidence.facts
    totals = whole
    if steps is not None:
        totals = StepTotals()
        for step in steps:
            totals.add(step)
    busy_ns = totals.busy_ns
    if busy_ns <= 0:
        return Shares()
    judged = totals if totals.steps >= JUDGED_STEPS_MIN else whole
    spent = {
        "garbage_collection": float(totals.gc_pause_ns),
        "cpu_starvation": totals.starved_ns - STARVED * busy_ns,
        "straggler": _late_ns(totals, judged),
        "interconnect": _wire_ns(totals, judged),
        "speculation": totals.draft_rejected_ns + _wrong(totals) * totals.parts.get("draft", 0),
        "dequantize": FLOAT_WASTE * totals.parts.get("compute", 0) if _made_floats(facts) else 0.0,
    }
    shares: dict[str, float] = {}
    left = 1.0
    for name, amount_ns in spent.items():
        shares[name] = min(left, max(0.0, amount_ns / busy_ns))
        left -= shares[name]
    fixed = whole.fixed_share() if totals.prefill_tokens and _full(totals, evidence) else 0.0
    beside = max(1, totals.decode_steps)
    prompts = whole.row_share(totals.beside_tokens / beside, totals.decode_step_tokens / beside)
    return Shares(shares, fixed, prompts, _missed(evidence.requests) if usual is None else usual.missed)


def shares_of(record: RequestRecord, steps: Iterable[StepRecord], evidence: Evidence) -> Shares:
    """
    Over the steps that served it; if none of them is remembered, what is usual.  Its own prompt is not among those that
    were beside its output.
    """
    known = list(steps)
    if not known:
        return shares_over(evidence)
    began_ns = record.accepted_ns + record.first_token_ns
    own = shares_over(evidence, known)
    writing = shares_over(evidence, [step for step in known if step.ended_ns > began_ns], usual=own)
    return replace(own, prompts=writing.prompts)


def shares_in_gap(record: RequestRecord, usual: Shares, evidence: Evidence) -> Shares:
    """Over the step that ended its longest gap; if that is forgotten, what is usual."""
    step = evidence.steps.get((record.replica, record.gap_step))
    if step is None or not record.accepted_ns <= step.ended_ns <= record.finished_ns:
        return usual  # Or it is a step of another life of that engine.
    return shares_over(evidence, [step], usual=usual)


def _full(totals: StepTotals, evidence: Evidence) -> bool:
    """Whether steps are as large as they may be, in general and here."""
    whole, most = evidence.totals, evidence.facts.tokens_step_max
    as_large = whole.tokens_max if most is None else most
    often = whole.full_tokens > FULL_STEPS * whole.tokens
    return often and min(whole.tokens_max, totals.tokens_max) >= as_large > 0


def _made_floats(facts: Facts) -> bool:
    """
    Whether weights are held in few bits and multiplied as floats.  Who asks for floats has what was asked for; INT8 is
    multiplied as such in torch, too.
    """
    return bool(facts.why_torch) and facts.weights not in ("", "float", "int8")


def _late_ns(totals: StepTotals, judged: StepTotals) -> float:
    """What one rank kept the others waiting; ranks that are late in turns only disturb each other."""
    late = judged.late_ranks
    latest = max(late, key=late.__getitem__, default="")
    beside = sum(ns for name, ns in late.items() if name.partition(":")[0] == latest.partition(":")[0])
    if not late or 2 * late[latest] - beside < ONE_RANK * beside:
        return 0.0
    return float(totals.late_ranks.get(latest, 0))


def _wire_ns(totals: StepTotals, judged: StepTotals) -> float:
    """What exchanges took beyond what they take anyway; a single step may always have been disturbed."""
    if judged.parts.get("interconnect_transfer", 0) <= TRANSFER * judged.busy_ns:
        return 0.0
    return totals.parts.get("interconnect_transfer", 0) - TRANSFER * totals.busy_ns


def _wrong(totals: StepTotals) -> float:
    return totals.draft_rejected_tokens / totals.drafted_tokens if totals.drafted_tokens else 0.0


def _missed(records: Iterable[RequestRecord]) -> float:
    computed = missed = 0
    for record in records:
        computed += record.computed_tokens
        missed += missed_tokens(record)
    return missed / computed if computed else 0.0


def missed_tokens(record: RequestRecord) -> int:
    """Of its prompt, what was computed although an earlier prompt had begun with it."""
    missed = min(record.repeated_tokens - record.cached_tokens, record.computed_tokens)
    return missed if missed >= REPEATED_TOKENS_MIN else 0


def split(states: Mapping[str, int], record: RequestRecord, shares: Shares, evidence: Evidence) -> Split:
    """`states` of that request (all, or those up to its first token, or in its longest gap), by cause."""
    found: Split = {}
    _gateway(found, states, record)
    _queues(found, states, shares, evidence)
    for state in _STEPS:
        if record.outcome:
            _computed(found, state, states.get(state, 0), record, shares, evidence)
        else:  # Of a request in flight that is the gateway's guess.
            _add(found, "engine", states.get(state, 0))
    for state, cause in _STAMPED.items():
        _add(found, cause, states.get(state, 0))
    _add(found, "unaccounted", sum(states.values()) - sum(found.values()))
    return {cause: spent_ns for cause, spent_ns in found.items() if spent_ns}


def _add(found: Split, cause: str, spent_ns: int) -> None:
    if spent_ns:
        found[cause] = found.get(cause, 0) + spent_ns


def _gateway(found: Split, states: Mapping[str, int], record: RequestRecord) -> None:
    """
    What overlaps comes first: a loop that is held up makes everything that it does look slow.

    It is held up, and collects, while it works on something; for a processor it waits at any time, so of that these
    states have their share.
    """
    redis_ns = sum(states.get(state, 0) for state in _REDIS)
    own_ns = sum(states.get(state, 0) for state in _GATEWAY)
    e2e_ns = max(1, record.finished_ns - record.accepted_ns)
    overlaps = {
        "event_loop": record.loop_lag_ns,
        "garbage_collection": record.gc_pause_ns,
        "cpu_starvation": record.starved_ns * (own_ns + redis_ns) // e2e_ns,
    }
    for cause, overlap_ns in overlaps.items():
        taken_ns = min(max(0, overlap_ns), own_ns + redis_ns)
        from_own_ns = min(own_ns, taken_ns)
        own_ns -= from_own_ns
        redis_ns -= taken_ns - from_own_ns
        _add(found, cause, taken_ns)
    _add(found, "redis", redis_ns)
    _add(found, "gateway", own_ns)


def _queues(found: Split, states: Mapping[str, int], shares: Shares, evidence: Evidence) -> None:
    totals = evidence.totals
    tail = totals.kv_wait_fragmentation / totals.kv_waits if totals.kv_waits else 0.0
    _add(found, "fragmentation" if tail > FRAGMENTED else "kv_starvation", sum(states.get(one, 0) for one in _KV))
    _add(found, "concurrency", sum(states.get(state, 0) for state in _PLACES))
    budget = "step_tokens" if shares.fixed > 0.2 else "neighbours"
    _add(found, budget, states.get("queue_token_budget", 0))


def _computed(
    found: Split, state: str, spent_ns: int, record: RequestRecord, shares: Shares, evidence: Evidence
) -> None:
    """Steps that served it, or others while it waited."""
    left_ns = spent_ns
    for cause, share in shares.of.items():
        taken_ns = int(spent_ns * share)
        _add(found, cause, taken_ns)
        left_ns -= taken_ns
    if state == "prefill":
        again_ns = left_ns * missed_tokens(record) // max(1, record.computed_tokens)
        fixed_ns = int((left_ns - again_ns) * shares.fixed)
        _add(found, "prompt", left_ns - again_ns - fixed_ns)
    else:  # decode: others' prompts are in its steps; else it waited for a step to end, or for one of its own
        others_ns = int(left_ns * shares.prompts) if state == "decode" else left_ns
        again_ns = int(others_ns * shares.missed)
        fixed_ns = int((others_ns - again_ns) * shares.fixed) if state == "stalled" else 0
        _add(found, "neighbours", others_ns - again_ns - fixed_ns)
        _add(found, "generation", left_ns - others_ns)
    _add(found, _prefix(evidence), again_ns)
    _add(found, "step_tokens", fixed_ns)


def _prefix(evidence: Evidence) -> str:
    """Why a beginning was computed again; if it was in the cache of another engine, or not yet in one, it had to be."""
    if evidence.facts.prefix_cache is False:
        return "prefix_off"
    if evidence.totals.evictions:
        return "prefix_lost"
    return "cold_start" if evidence.starts else "prompt"
