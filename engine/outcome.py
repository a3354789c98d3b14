"""
What a step comes to, in numbers and in news.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many

import msgspec

from engine.api import Delta, Load, PrefixNews
from engine.blocks import BlockPool
from engine.fairness import FairQueue
from engine.interference import shares
from engine.plan import StepPlan, StepResult
from engine.sequence import Sequence, Status
from telemetry.records import KvBook, RequestRecord


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The news since the last commit: what clients are told, and what the step's record says of the core."""

    deltas: tuple[Delta, ...]
    finished: tuple[RequestRecord, ...]
    prefill_tokens: int
    recompute_tokens: int
    decode_tokens: int
    emitted_tokens: int
    drafted_tokens: int
    draft_accepted_tokens: int
    draft_rejected_share: float  # of the step's time, by the model of its cost
    cached_tokens: int
    preemptions: int
    evictions: int
    load: Load
    served_ns: int  # what is shared out among those that were served
    requests: dict[int, str]  # of those, who is served for the first time: the sequence's number, and its request
    waits: dict[str, int]  # waiting sequences by state
    kv: KvBook
    prefixes: PrefixNews | None


class Tally:
    """What the slices of one step come to, in tokens."""

    def __init__(self) -> None:
        self.prefill = self.recompute = self.decode = self.emitted = self.drafted = self.accepted = 0
        self.served_ns = 0
        self.requests: dict[int, str] = {}

    def share_out(self, in_flight: Mapping[int, Sequence], plan: StepPlan, result: StepResult, step_ns: int) -> None:
        """The time of the step, among those that it has served and that are still here, by their rows."""
        self.requests = {one.number: one.request.request_id for one in in_flight.values() if not one.steps}
        served = [(in_flight[piece.sequence], len(piece.tokens)) for piece in plan.slices]
        here = [(one, rows) for one, rows in served if one.status is not Status.FINISHED]
        if here:
            self.served_ns = step_ns
            for (one, _), share_ns in zip(here, shares(step_ns, [rows for _, rows in here]), strict=True):
                one.meet(result.interconnect, share_ns)

    def add(self, *, prefill: int, recompute: int, emitted: int, drafted: int, accepted: int) -> None:
        """What one slice comes to, but for its decode rows."""
        self.prefill += prefill
        self.recompute += recompute
        self.emitted += emitted
        self.drafted += drafted
        self.accepted += accepted


def load_of(running: Many[Sequence], waiting: FairQueue, pool: BlockPool) -> Load:
    """What there is to do, and how much of the KV pool is taken."""
    return Load(
        running=len(running),
        waiting=len(waiting),
        owed_tokens=sum(sequence.debt for sequence in running) + sum(sequence.debt for sequence in waiting),
        used_slots=(pool.blocks_max - pool.available) * pool.block_slots,
    )


def waits_of(waiting: FairQueue) -> dict[str, int]:
    """How many wait for what."""
    return dict(Counter(sequence.ledger.state for sequence in waiting))


def merged(deltas: list[Delta]) -> tuple[Delta, ...]:
    """One delta per request, in the order in which the requests were first heard of."""
    newest: dict[str, Delta] = {}
    for delta in deltas:
        before = newest.get(delta.request_id)
        newest[delta.request_id] = before.merge(delta) if before else delta
    return tuple(newest.values())
