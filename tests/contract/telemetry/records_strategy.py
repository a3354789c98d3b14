"""
Random records whose books close, as the real ones do.
"""

import msgspec
from hypothesis import strategies as st

from telemetry.records import (
    COMPUTE_PARTS,
    ENGINE_STATES,
    EXCHANGES,
    STEP_PARTS,
    Exchange,
    InterconnectBook,
    KvBook,
    KvReading,
    MemoryReading,
    RequestRecord,
    StepRecord,
)
from telemetry.views import JsonObject
from telemetry.vocabulary import FINISHED_OUTCOMES, OUTCOMES, ROUTES, ROUTINGS, STATES

MODEL = "tiny"
UPSTREAM = "far"
counts = st.integers(0, 5000)
spans_ns = st.integers(0, 200_000_000_000)
kv_readings = st.builds(KvReading, *(st.floats(0, 1) for _ in range(3)))


@st.composite
def request_records(draw: st.DrawFn) -> RequestRecord:  # long: a line for each field
    """One ended request, of any outcome."""
    states = draw(st.dictionaries(st.sampled_from(STATES), spans_ns, max_size=len(STATES)))
    accepted_ns = draw(st.integers(0, 2**60))
    finished_ns = accepted_ns + sum(states.values())
    outcome = draw(st.sampled_from(OUTCOMES))
    computed, cached, accepted, rejected = (draw(counts) for _ in range(4))
    cut_short = 0 if outcome in FINISHED_OUTCOMES else draw(counts)
    output = draw(counts)
    used = computed + cached + cut_short + output
    reserved = draw(st.integers(1, 5000)) if draw(st.booleans()) else 0
    first_token_states = {state: draw(st.integers(0, spent_ns)) for state, spent_ns in states.items()}
    gap_states = draw(st.dictionaries(st.sampled_from(STATES), spans_ns, max_size=3))
    charged = used if outcome in FINISHED_OUTCOMES else draw(st.integers(0, used))
    record = RequestRecord(
        request_id=draw(st.uuids()).hex,
        tenant=draw(st.sampled_from(("", "blue", "green"))),
        outcome=outcome,
        accepted_ns=accepted_ns,
        finished_ns=finished_ns,
        states=states,
        prompt_tokens=computed + cached + cut_short,
        cached_tokens=cached,
        computed_tokens=computed,
        recomputed_tokens=draw(counts),
        output_tokens=output,
        drafted_tokens=accepted + rejected,
        draft_accepted_tokens=accepted,
        draft_rejected_tokens=rejected,
        preemptions=draw(st.integers(0, 3)),
        steps=draw(counts),
        kv_block_ns=draw(spans_ns),
        interconnect_wait_ns=draw(spans_ns),
        interconnect_transfer_ns=draw(spans_ns),
        interconnect_wait_max_ns=draw(spans_ns),
        first_token_ns=sum(first_token_states.values()),
        first_token_states=first_token_states,
        gap_max_ns=sum(gap_states.values()),
        gap_states=gap_states,
        gap_step=draw(counts),
        engine_ns=draw(spans_ns),
        stalled_for={"other": states["stalled"]} if states.get("stalled") else {},
        kv_at_admission=draw(st.none() | kv_readings),
        kv_worst=draw(st.none() | kv_readings),
        kv_at_end=draw(st.none() | kv_readings),
        unread_ns=draw(spans_ns),
        gc_pause_ns=draw(spans_ns),
        loop_lag_ns=draw(spans_ns),
        model=MODEL,
        route=draw(st.sampled_from(ROUTES)),
        status=draw(st.sampled_from((200, 400, 404, 429, 499, 500, 503))),
        stream=draw(st.booleans()),
        choices=draw(st.integers(1, 8)),
        reserved_tokens=reserved,
        charged_tokens=charged if reserved else 0,
        charged_micros=draw(counts) if reserved else 0,
        trace_id=f"{draw(st.integers(1, 2**128 - 1)):032x}",
        routing=draw(st.sampled_from(("", *ROUTINGS))),
        promised_tokens=draw(st.none() | counts),
    )
    return record if draw(st.booleans()) else _of_upstream(record, estimated=draw(st.booleans()))


def _of_upstream(record: RequestRecord, *, estimated: bool) -> RequestRecord:
    """The same, but an upstream answered, which tells less."""
    unknown = (
        *("computed_tokens", "recomputed_tokens", "drafted_tokens", "draft_accepted_tokens", "draft_rejected_tokens"),
        *("preemptions", "resumes", "steps", "kv_block_ns", "interconnect_wait_ns", "interconnect_transfer_ns"),
        *("interconnect_wait_max_ns", "engine_ns"),
    )
    cached = 0 if estimated else record.cached_tokens
    placed = {"replica": -1, "routing": "", "promised_tokens": None}
    placed |= {"kv_at_admission": None, "kv_worst": None, "kv_at_end": None, "gap_step": -1}
    known = {"upstream": UPSTREAM, "usage_estimated": estimated, "cached_tokens": cached, **placed}
    return msgspec.structs.replace(record, **dict.fromkeys(unknown, 0), **known)


@st.composite
def interconnect_books(draw: st.DrawFn) -> InterconnectBook:
    """Of one rank or of several; it closes."""
    ranks = draw(st.integers(1, 4))
    if ranks == 1:
        return InterconnectBook()
    exchanges = draw(
        st.dictionaries(st.sampled_from(EXCHANGES), st.builds(Exchange, counts, spans_ns, spans_ns, counts), min_size=1)
    )
    return InterconnectBook(
        kind="shared-memory",
        wait_ns=sum(one.wait_ns for one in exchanges.values()),
        transfer_ns=sum(one.transfer_ns for one in exchanges.values()),
        bubble_ns=draw(spans_ns),
        bytes=sum(one.bytes for one in exchanges.values()),
        straggler=draw(st.integers(-1, ranks - 1)),
        exchanges=exchanges,
        rank_wait_ns=tuple(draw(st.lists(spans_ns, min_size=ranks, max_size=ranks))),
        clock_error_ns=draw(counts),
    )


@st.composite
def kv_books(draw: st.DrawFn) -> KvBook:
    """A book that closes."""
    places = [draw(counts) for _ in range(6)]
    return KvBook(sum(places), *places)


@st.composite
def step_records(draw: st.DrawFn) -> StepRecord:
    """One step of one of three replicas."""
    interconnect = draw(interconnect_books())
    parts = {part: draw(spans_ns) for part in STEP_PARTS}
    parts |= {"interconnect_wait": interconnect.wait_ns, "interconnect_transfer": interconnect.transfer_ns}
    parts["bubble"] = interconnect.bubble_ns
    prefill, recompute, decode, abandoned, accepted, rejected = (draw(counts) for _ in range(6))
    return StepRecord(
        step_id=draw(st.integers(0, 2**40)),
        replica=draw(st.integers(0, 2)),
        ended_ns=draw(st.integers(0, 2**60)),
        step_ns=sum(parts.values()),
        parts=parts,
        compute_parts={part: draw(spans_ns) for part in COMPUTE_PARTS} if draw(st.booleans()) else {},
        tokens=prefill + recompute + decode + accepted + rejected + abandoned,
        prefill_tokens=prefill,
        recompute_tokens=recompute,
        decode_tokens=decode,
        emitted_tokens=draw(counts),
        sequences=draw(st.integers(0, 300)),
        running=draw(st.integers(0, 300)),
        waiting=draw(st.integers(0, 300)),
        preemptions=draw(counts),
        cached_tokens=draw(counts),
        evictions=draw(counts),
        drafted_tokens=accepted + rejected,
        draft_accepted_tokens=accepted,
        draft_rejected_tokens=rejected,
        draft_rejected_ns=draw(spans_ns),
        interconnect=interconnect,
        slices=tuple(draw(st.lists(st.tuples(counts, counts), max_size=4))),
        requests=draw(st.dictionaries(counts, st.sampled_from(("a", "b")), max_size=2)),
        served_ns=draw(spans_ns),
        waits=draw(st.dictionaries(st.sampled_from(ENGINE_STATES), counts, max_size=3)),
        gc_pause_ns=draw(spans_ns),
        starved_ns=draw(spans_ns),
        memory=draw(st.none() | st.builds(MemoryReading, counts, counts, counts, counts)),
        kv=draw(kv_books()),
    )


def interconnect_json(step: StepRecord) -> JsonObject:
    """As the debug routes show it."""
    return {
        "kind": step.interconnect.kind,
        "wait_ns": step.parts["interconnect_wait"],
        "transfer_ns": step.parts["interconnect_transfer"],
        "bubble_ns": step.parts["bubble"],
        "bytes": step.interconnect.bytes,
        "straggler": step.interconnect.straggler,
        "rank_wait_ns": list(step.interconnect.rank_wait_ns),
        "clock_error_ns": step.interconnect.clock_error_ns,
        "exchanges": {
            name: {
                "calls": one.calls,
                "wait_ns": one.wait_ns,
                "transfer_ns": one.transfer_ns,
                "bytes": one.bytes,
                "bytes_per_s": one.bytes * 1e9 / one.transfer_ns if one.transfer_ns else 0.0,
            }
            for name, one in step.interconnect.exchanges.items()
        },
    }
