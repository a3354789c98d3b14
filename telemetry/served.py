"""
How those were served who have asked lately: what objectives are about, over the last minute.
"""

import math
from collections.abc import Iterable, Sequence

import msgspec

from telemetry.records import RequestRecord
from telemetry.views import JsonObject
from telemetry.vocabulary import (
    FAULTS,
    GENERATING_ROUTES,
    NS_PER_S,
    TIME_PER_OUTPUT_TOKEN_S,
    TIME_TO_FIRST_TOKEN_S,
)

WINDOW_S = 60


class Served(msgspec.Struct, frozen=True, array_like=True):
    """What objectives ask of one request that has ended."""

    first_token_ns: int
    """0: there was none."""
    gap_ns: int
    """Mean time between two tokens; -1: there were no two."""
    failed: bool
    """And that was our fault."""
    output_tokens: int


def served(records: Iterable[RequestRecord], now_ns: int) -> list[Served]:
    """Those of the window that asked for something to be generated."""
    since_ns = now_ns - WINDOW_S * NS_PER_S
    return [_served(one) for one in records if one.finished_ns >= since_ns and one.route in GENERATING_ROUTES]


def _served(record: RequestRecord) -> Served:
    gap_ns = record.token_gap_mean_ns()
    failed = record.outcome in FAULTS and record.status // 100 != 4  # a timeout may be the client's: 408
    return Served(record.first_token_ns, -1 if gap_ns is None else gap_ns, failed, record.output_tokens)


def summary(several: Sequence[Served]) -> JsonObject:
    """As `/debug/live` has it."""
    return {
        "window_s": WINDOW_S,
        "requests": len(several),
        "failed": sum(one.failed for one in several),
        "output_tokens": sum(one.output_tokens for one in several),
        "time_to_first_token": _quantiles(
            [one.first_token_ns for one in several if one.first_token_ns > 0], TIME_TO_FIRST_TOKEN_S
        ),
        "time_per_output_token": _quantiles(
            [one.gap_ns for one in several if one.gap_ns >= 0], TIME_PER_OUTPUT_TOKEN_S
        ),
    }


def _quantiles(values_ns: list[int], objective_s: float) -> JsonObject:
    """Nearest rank: a value that was measured.  None: there is no value."""
    ordered = sorted(values_ns)
    count = len(ordered)

    def rank(share: float) -> int | None:
        return ordered[max(0, math.ceil(share * count) - 1)] if count else None

    within = sum(value <= objective_s * NS_PER_S for value in ordered)
    return {
        "count": count,
        "p50_ns": rank(0.5),
        "p99_ns": rank(0.99),
        "objective_s": objective_s,
        "within": within / count if count else None,
    }
