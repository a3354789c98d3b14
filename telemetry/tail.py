"""
Which traces are kept, decided at the end of a request, when it is known whether anybody will ask for it.

    fault       it failed, and that was ours
    objective   it missed what is promised: the first token, or the time between tokens, came too late
    caller      its caller traces it (W3C traceparent); one who says that he does not gets no trace at all
    slowest     it took longer than 99 of 100 requests of its route lately
    share       one of the rest, chosen by its trace id, so that all parts of a system choose the same
"""

from telemetry.live import TraceContext
from telemetry.records import RequestRecord
from telemetry.rolling import Rolling
from telemetry.vocabulary import (
    FAULTS,
    GENERATING_ROUTES,
    NS_PER_S,
    OTHER,
    ROUTES,
    TIME_PER_OUTPUT_TOKEN_S,
    TIME_TO_FIRST_TOKEN_S,
)

FAULT, OBJECTIVE, CALLER, SLOWEST, SHARE = REASONS = ("fault", "objective", "caller", "slowest", "share")
BAD = (FAULT, OBJECTIVE, SLOWEST)
"""Reasons for which somebody will ask what it waited for."""
RECENT_MAX = 1024
"""Requests of a route, of which the slowest are kept."""
SLOW_QUANTILE = 0.99
_ID_BITS = 64
"""Of a trace id, the low ones: those are random in every known generator of them."""


class TailSampler:
    """Same requests in the same order, same decisions."""

    def __init__(self, *, ratio: float) -> None:
        """`ratio`: how many of the requests are kept that there is no other reason to keep."""
        assert 0 <= ratio <= 1
        self._bound = round(ratio * 2**_ID_BITS)
        self._durations: dict[str, Rolling] = {}

    def because(self, record: RequestRecord, trace: TraceContext) -> str:
        """Why this request is kept, of REASONS; empty: it is not."""
        slow = self._is_slow(record)
        if not trace.sampled:
            return ""
        if is_fault(record):
            return FAULT
        if misses_objective(record):
            return OBJECTIVE
        if trace.parent_id:
            return CALLER
        if slow:
            return SLOWEST
        return SHARE if int(trace.trace_id, 16) % 2**_ID_BITS < self._bound else ""

    def _is_slow(self, record: RequestRecord) -> bool:
        """Refusals are quick and may be many: they are no measure of what is slow."""
        route = record.route if record.route in ROUTES else OTHER
        durations = self._durations.setdefault(route, Rolling(amounts_max=RECENT_MAX))
        whole_ns = record.finished_ns - record.accepted_ns
        slow = durations.is_above(whole_ns, SLOW_QUANTILE)
        if 200 <= record.status < 300:
            durations.add(whole_ns)
        return slow


def is_fault(record: RequestRecord) -> bool:
    """Whether it failed and that was ours, also where the status had been sent as 200 before."""
    return record.status >= 500 or (record.status < 400 and record.outcome in FAULTS)


def misses_objective(record: RequestRecord) -> bool:
    """Whether its first token, or its tokens on average, came later than is promised; or it ended without, and late."""
    if record.route not in GENERATING_ROUTES:
        return False
    waited_ns = record.first_token_ns or record.finished_ns - record.accepted_ns
    gap_ns = record.token_gap_mean_ns() or 0
    return waited_ns > TIME_TO_FIRST_TOKEN_S * NS_PER_S or gap_ns > TIME_PER_OUTPUT_TOKEN_S * NS_PER_S
