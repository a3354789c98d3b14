"""
A flight recording of a gateway: what it has heard of steps and requests.  Those of several workers are one.
"""

from pathlib import Path

from launch.errors import UserError
from telemetry.evidence import Evidence
from telemetry.flight import read_facts, read_records, together
from telemetry.records import RequestRecord, StepRecord
from telemetry.ring import RingError


def recorded(directory: Path, seconds: float | None) -> Evidence:
    """All of a recording and of those that it is a part with, or the last seconds.  Raises UserError."""
    requests, steps = _read(directory)
    if not requests and not steps:
        raise UserError(f"there is no step and no request in {directory}: `pellucid flight list` shows recordings")
    last_ns = max([one.finished_ns for one in requests] + [one.ended_ns for one in steps])
    first_ns = min([one.finished_ns for one in requests] + [one.ended_ns for one in steps])
    since_ns = first_ns if seconds is None else max(first_ns, last_ns - int(seconds * 1e9))
    found = Evidence(window_ns=last_ns - since_ns, facts=read_facts(directory))
    found.requests = [one for one in requests if one.finished_ns >= since_ns]
    newest: dict[int, int] = {}
    for step in steps:
        if step.step_id <= newest.get(step.replica, -1):  # a new life: its steps and sequences are counted anew
            found.steps = {spot: one for spot, one in found.steps.items() if spot[0] != step.replica}
            found.names = {spot: name for spot, name in found.names.items() if spot[0] != step.replica}
            found.memory.pop(f"engine {step.replica}", None)  # another process: what it takes is no growth
            found.starts += step.ended_ns >= since_ns
        newest[step.replica] = step.step_id
        found.names |= {(step.replica, number): name for number, name in step.requests.items()}
        if step.ended_ns >= since_ns:
            found.steps[step.replica, step.step_id] = step
            found.totals.add(step)
            if step.memory is not None:
                samples = found.memory.setdefault(f"engine {step.replica}", [])
                samples.append((step.ended_ns, step.memory.resident_bytes))
    return found


def _read(directory: Path) -> tuple[list[RequestRecord], list[StepRecord]]:
    """Requests, the newest first, and steps in the order in which they were written."""
    requests: list[RequestRecord] = []
    steps: list[StepRecord] = []
    several = together(directory)
    until_ns = several.until_ns if several is not None else None
    try:
        for path in [one.path for one in several.parts] if several is not None else [directory]:
            for record in read_records(path):
                if isinstance(record, RequestRecord):
                    if until_ns is None or record.finished_ns < until_ns:
                        requests.append(record)
                elif until_ns is None or record.ended_ns < until_ns:
                    steps.append(record)
    except RingError as error:
        raise UserError(f"{error}; `pellucid flight list` shows recordings") from None
    requests.reverse()  # of those that ended at once the last one that was written is the newest
    requests.sort(key=lambda record: record.finished_ns, reverse=True)
    return requests, steps
