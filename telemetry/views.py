"""
The JSON of the `/debug/*` routes.  Names are part of the interface: tools read them.
"""

import msgspec

from telemetry.live import LiveRequest
from telemetry.recent import Replica
from telemetry.records import KvBook, RequestRecord, StepRecord
from telemetry.vocabulary import NS_PER_S

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
JsonObject = dict[str, Json]


def request_json(request: RequestRecord | LiveRequest, now_ns: int) -> JsonObject:
    """One request; one in flight has `outcome: null`, its states so far, and no closing facts yet."""
    return _live_json(request, now_ns) if isinstance(request, LiveRequest) else _record_json(request)


_ENGINES_OWN = (
    "computed_tokens", "recomputed_tokens", "drafted_tokens", "draft_accepted_tokens", "draft_rejected_tokens",
    "preemptions", "resumes", "steps", "kv_block_ns", "interconnect_wait_ns", "interconnect_transfer_ns",
    "interconnect_wait_max_ns", "engine_ns", "stalled_for", "gap_step", "kv_at_admission", "kv_worst", "kv_at_end",
    "degenerate", "replica", "routing", "promised_tokens",
)  # fmt: skip
"""What an upstream does not tell: left out, since 0 would be an invention."""


def _record_json(record: RequestRecord) -> JsonObject:
    fields: JsonObject = msgspec.to_builtins(record)
    for name in _ENGINES_OWN if record.upstream else ("upstream", "usage_estimated"):
        del fields[name]
    fields["e2e_ns"] = record.finished_ns - record.accepted_ns
    fields["imbalance_ns"] = record.imbalance()
    return fields


def _live_json(live: LiveRequest, now_ns: int) -> JsonObject:
    states = live.ledger.spent(max(now_ns, live.ledger.opened_ns))
    return {
        "request_id": live.request_id,
        "tenant": live.tenant,
        "outcome": None,
        "accepted_ns": live.ledger.opened_ns,
        "e2e_ns": sum(states.values()),
        "state": live.ledger.state,
        "states": dict(states),
        "prompt_tokens": live.prompt_tokens,
        "cached_tokens": live.cached_tokens,
        "output_tokens": live.output_tokens,
        "first_token_ns": live.first_token_ns,
        "model": live.model,
        "route": live.route,
        "stream": live.stream,
        "choices": live.choices,
        "trace_id": live.trace.trace_id,
        "replica": live.replica,
        "routing": live.routing,
        "promised_tokens": live.promised_tokens,
    }


def step_json(step: StepRecord) -> JsonObject:
    """One step; it names no request, since all may see it."""
    fields: JsonObject = msgspec.to_builtins(step, str_keys=True)
    del fields["finished"], fields["requests"]
    fields["imbalance_ns"] = step.imbalance()
    interconnect: JsonObject = msgspec.to_builtins(step.interconnect)
    interconnect["exchanges"] = {
        name: msgspec.structs.asdict(one)
        | {"bytes_per_s": one.bytes * NS_PER_S / one.transfer_ns if one.transfer_ns else 0.0}
        for name, one in step.interconnect.exchanges.items()
    }
    interconnect["rank_wait_ns"] = list(step.interconnect.rank_wait_ns)
    fields["slices"] = [list(piece) for piece in step.slices]
    fields["interconnect"] = interconnect
    return fields


def kv_json(replicas: dict[int, Replica], *, now_ns: int, stale_ns: int) -> JsonObject:
    """Where the KV slots are: the sum over all replicas that have told, and each one when there are several."""
    told = [(number, replica, replica.last_step) for number, replica in sorted(replicas.items())]
    books: dict[str, JsonObject] = {}
    blocks: dict[str, int] = dict.fromkeys(_BLOCK_PLACES, 0)
    slots: list[KvBook] = []
    for number, replica, step in told:
        if step is None:
            continue
        own_blocks = _blocks(step.kv, replica.block_slots)
        blocks = {place: count + own_blocks[place] for place, count in blocks.items()}
        slots.append(step.kv)
        books[str(number)] = _book_json(step.kv, own_blocks) | {
            "age_ns": max(0, now_ns - replica.heard_ns),
            "stale": replica.current_step(now_ns, stale_ns) is None,
            "step_id": step.step_id,
        }
    if len(books) == len(replicas) == 1:
        return next(iter(books.values()))
    return _book_json(_sum(slots), blocks) | ({"replicas": dict(books)} if books else {})


_BLOCK_PLACES = ("total", "free", "cached_idle", "held", "fenced")


def _blocks(book: KvBook, block_slots: int) -> dict[str, int]:
    """The same book in whole blocks: filled slots and tails share blocks, so only their sum is a number of blocks."""
    held = book.filled + book.tail + book.lookahead
    counts = (book.total, book.free, book.cached_idle, held, book.fenced)
    return {place: slots // block_slots for place, slots in zip(_BLOCK_PLACES, counts, strict=True)}


def _sum(books: list[KvBook]) -> KvBook:
    return KvBook(**{name: sum(getattr(book, name) for book in books) for name in KvBook.__struct_fields__})


def _book_json(book: KvBook, blocks: dict[str, int]) -> JsonObject:
    return {
        "slots": msgspec.structs.asdict(book),
        "blocks": dict(blocks),
        "utilization": book.utilization,
        "token_occupancy": book.token_occupancy,
        "internal_fragmentation": book.internal_fragmentation,
        "external_fragmentation": 0.0,  # One pool of equal blocks: any free block serves any request.
        "imbalance_slots": book.imbalance(),
    }
