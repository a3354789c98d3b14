"""
Why something was slow, as the routes have it: `diagnosis`, on what all workers remember.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from diagnosis.doctor import Report, examine
from diagnosis.why import Other, Why, why
from engine.api import Hello
from gateway import errors
from gateway.admission import Ticket
from gateway.backend import Backend
from gateway.errors import ApiError
from gateway.siblings import Siblings
from telemetry import clock
from telemetry.evidence import Evidence, Facts, facts_of
from telemetry.views import Json

WHY_WINDOW_S = 600.0
"""What is usual is what was usual lately."""
SECONDS_MAX = 3600
"""What is remembered reaches no further."""
SECONDS: dict[str, Json] = {"type": "number", "minimum": 1, "maximum": SECONDS_MAX}
"""For the document."""
SOMEBODY = "another tenant's"
"""The name of a request that is not for these eyes."""


class Explain:
    """Answers about requests, and about a stretch of time."""

    def __init__(self, siblings: Siblings, backend: Backend) -> None:
        self._siblings = siblings
        self._backend = backend

    async def request(self, request_id: str, ticket: Ticket) -> Why:
        """Why this one took so long.  Raises ApiError: it is unknown, or not for these eyes."""
        record = await self._siblings.record(request_id)
        if record is None or not ticket.sees(record.tenant):
            raise ApiError(404, "not_found", "No such request is remembered.", outcome="not_found")
        evidence = await self._evidence(WHY_WINDOW_S)
        seen = {one.request_id for one in evidence.requests if ticket.sees(one.tenant)}
        answer = why(record, evidence)
        return msgspec.structs.replace(answer, others=_masked(answer.others, seen, everything=ticket.sees_all))

    async def system(self, seconds: str, ticket: Ticket) -> Report:
        """What carries the slow requests of the last `seconds`.  Raises ApiError: that is no such number."""
        report = examine(await self._evidence(_seconds(seconds)))
        if ticket.sees_all:
            return report
        tails = {name: msgspec.structs.replace(tail, requests=()) for name, tail in report.tails.items()}
        return msgspec.structs.replace(report, tails=tails)

    async def _evidence(self, seconds: float) -> Evidence:
        found = await self._siblings.evidence(clock.now_ns() - int(seconds * 1e9))
        found.facts = _facts(self._backend.hellos())
        return found


def _seconds(text: str) -> float:
    try:
        seconds: float = msgspec.convert(text, Annotated[float, msgspec.Meta(ge=1, le=SECONDS_MAX)], strict=False)
    except msgspec.ValidationError:
        raise errors.invalid(f"'seconds' must be a number from 1 to {SECONDS_MAX}.", "seconds") from None
    return seconds


def _facts(hellos: Sequence[Hello]) -> Facts:
    if not hellos:
        return Facts()
    slots = sum(hello.blocks_max * hello.block_slots for hello in hellos)
    return facts_of(hellos[0].details, replicas=len(hellos), weights=hellos[0].weights.label, kv_slots=slots)


def _masked(others: Sequence[Other], seen: set[str], *, everything: bool) -> tuple[Other, ...]:
    """With the names of others' requests taken out, where they are none of the reader's business."""
    if everything:
        return tuple(others)
    shown = [one for one in others if one.request_id in seen]
    hidden_ns = sum(one.ns for one in others if one.request_id not in seen)
    return tuple([*shown, Other(SOMEBODY, hidden_ns)] if hidden_ns else shown)
