"""
Whether the books of a record close.  A mismatch is a bug of ours: it is counted and logged, never raised.
"""

from collections.abc import Iterator

from telemetry.records import RequestRecord, StepRecord
from telemetry.vocabulary import FINISHED_OUTCOMES

Mismatch = tuple[str, int]
"""A book of `vocabulary.BOOKS`, and by how many ns, slots or tokens it fails to close."""


def request_mismatches(record: RequestRecord) -> Iterator[Mismatch]:
    """The latency book, the token book and the limit book of one request."""
    if lost_ns := record.imbalance():
        yield "latency", lost_ns
    elif any(spent_ns < 0 for spent_ns in record.states.values()):
        yield "latency", min(record.states.values())
    elif lost_ns := record.part_imbalance():
        yield "latency", lost_ns
    if unnamed_ns := record.states.get("stalled", 0) - sum(record.stalled_for.values()):
        yield "latency", unnamed_ns
    if lost_tokens := _prompt_imbalance(record):
        yield "token", lost_tokens
    if lost_drafts := record.drafted_tokens - record.draft_accepted_tokens - record.draft_rejected_tokens:
        yield "token", lost_drafts
    if uncharged := _limit_imbalance(record):
        yield "limit", uncharged


def step_mismatches(record: StepRecord) -> Iterator[Mismatch]:
    """The step book, the interconnect book, the KV book and the draft line of the token book of one step."""
    if lost_ns := record.imbalance():
        yield "step", lost_ns
    exchanged = record.parts.get("interconnect_wait", 0) - record.interconnect.wait_ns
    exchanged = exchanged or record.parts.get("bubble", 0) - record.interconnect.bubble_ns
    exchanged = exchanged or record.parts.get("interconnect_transfer", 0) - record.interconnect.transfer_ns
    if lost := exchanged or record.interconnect.imbalance():
        yield "interconnect", lost
    if lost_slots := record.kv.imbalance():
        yield "kv", lost_slots
    if lost_drafts := record.drafted_tokens - record.draft_accepted_tokens - record.draft_rejected_tokens:
        yield "token", lost_drafts


def _prompt_imbalance(record: RequestRecord) -> int:
    """
    Prompt tokens that were neither computed nor found; a prompt that was cut short may only have too few.

    Each choice of a request computes what it does not find, but its prompt is billed once: the costs of several
    choices lie between one whole prompt and one for each.
    """
    if record.upstream:  # It may say what it found, never what it computed.
        return min(0, record.prompt_tokens - record.cached_tokens)
    paid = record.computed_tokens + record.cached_tokens
    served = record.steps > 0 or paid > 0  # Echo without generation never reaches the engine.
    if record.outcome in FINISHED_OUTCOMES and served and paid < record.prompt_tokens:
        return record.prompt_tokens - paid
    return min(0, record.prompt_tokens * max(1, record.choices) - paid)


def _limit_imbalance(record: RequestRecord) -> int:
    """Tokens that the limits were not charged with, and should have been: all that `usage` says; of others no more."""
    used = record.prompt_tokens + record.output_tokens
    if not record.reserved_tokens:
        return -record.charged_tokens
    if record.outcome in FINISHED_OUTCOMES:
        return used - record.charged_tokens
    return min(0, used - record.charged_tokens)
