"""
Where the time of a request's calls went: what their engines' books say, beside when their news came here.
"""

from collections.abc import Sequence

from gateway.book import Book, Told
from gateway.calls import Call
from telemetry.records import RequestRecord, request_of


def told_last(calls: Sequence[Call]) -> Told | None:
    """What is known of the one that finished last; None: none was sent."""
    sent = [call for call in calls if call.sent_ns]
    return _told(max(sent, key=_finished_ns)) if sent else None


def first_token(calls: Sequence[Call], book: Book) -> tuple[int, dict[str, int]]:
    """How long it took until the first token of any of them came, and where that went; 0: there was none."""
    first = min((call for call in calls if call.first_token_ns), key=_first_token_ns, default=None)
    if first is None:
        return 0, {}
    return first.first_token_ns - book.opened_ns, book.until_first_token(first.first_token_ns, _told(first))


def longest_gap(calls: Sequence[Call]) -> tuple[int, dict[str, int], int]:
    """
    The longest time between two tokens as they came here, where it went, and the step that ended it; -1: no step.

    At least so much of it is not the engine's as it is longer than the engine's longest.
    """
    call = max(calls, key=_gap_max_ns, default=None)
    if call is None:
        return 0, {}, -1
    if call.gap_resumed:
        return call.gap_max_ns, {"resume": call.gap_max_ns}, -1
    known = [one.record for one in calls if one.record is not None]
    record = max(known, key=lambda record: record.gap_max_ns, default=None)
    if record is None:
        return call.gap_max_ns, {"deliver": call.gap_max_ns} if call.gap_max_ns else {}, -1
    late_ns = max(0, call.gap_max_ns - record.gap_max_ns)
    states = record.gap_states | ({"deliver": late_ns} if late_ns else {})
    return record.gap_max_ns + late_ns, states, record.gap_step


def stalled_for(states: dict[str, int], told: RequestRecord | None) -> dict[str, int]:
    """
    Who was served while it stalled, by the names that people know, and not by those of an engine for its sequences.

    Of an engine's book that could not be joined with ours nothing is taken.
    """
    found: dict[str, int] = {}
    spent = told.stalled_for if told is not None and "stalled" in states else {}
    for name, spent_ns in spent.items():
        found[request_of(name)] = found.get(request_of(name), 0) + spent_ns
    return found


def _told(call: Call) -> Told:
    return Told(call.record, call.accepted_ns, call.one_clock, call.lives)


def _first_token_ns(call: Call) -> int:
    return call.first_token_ns


def _gap_max_ns(call: Call) -> int:
    return call.gap_max_ns


def _finished_ns(call: Call) -> int:
    return call.finished_ns
