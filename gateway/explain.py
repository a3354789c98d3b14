"""
Why something was slow, as the routes have it: `diagnosis`, on what all workers remember.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from diagnosis.doctor import Report, examine
from diagnosis.why import Other, Why, why
from gateway import errors
from gateway.admission import Ticket
from gateway.siblings import Siblings
from telemetry import clock
from telemetry.evidence import Evidence
from telemetry.records import RequestRecord
from telemetry.views import Json

WHY_WINDOW_S = 600.0
"""What is usual is what was usual lately."""
SECONDS_MAX = 3600
"""What is remembered reaches no further."""
SECONDS: dict[str, Json] = {"type": "number", "minimum": 1, "maximum": SECONDS_MAX}
"""For the document."""
SOMEBODY = "other requests"
"""Those that are not for these eyes, or still run."""


class Explain:
    """Answers about requests, and about a stretch of time."""

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings

    async def request(self, request_id: str, ticket: Ticket) -> Why:
        """Why this one took so long.  Raises ApiError: it is unknown, or not for these eyes."""
        records, silent = await self._siblings.records(request_id)
        record = max((one for one in records if ticket.sees(one.tenant)), key=_accepted_ns, default=None)
        if record is None:
            raise errors.not_remembered(silent)
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
        return await self._siblings.evidence(clock.now_ns() - int(seconds * 1e9))


def _seconds(text: str) -> float:
    try:
        seconds: float = msgspec.convert(text, Annotated[float, msgspec.Meta(ge=1, le=SECONDS_MAX)], strict=False)
    except msgspec.ValidationError:
        raise errors.invalid(f"'seconds' must be a number from 1 to {SECONDS_MAX}.", "seconds") from None
    return seconds


def _masked(others: Sequence[Other], seen: set[str], *, everything: bool) -> tuple[Other, ...]:
    """With the names of others' requests taken out, where they are none of the reader's business."""
    if everything:
        return tuple(others)
    shown = [one for one in others if one.request_id in seen]
    hidden_ns = sum(one.ns for one in others if one.request_id not in seen)
    return tuple([*shown, Other(SOMEBODY, hidden_ns)] if hidden_ns else shown)


def _accepted_ns(record: RequestRecord) -> int:
    return record.accepted_ns
