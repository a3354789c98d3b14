"""
Which traces are kept: for a reason, or a share that everybody chooses alike.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from telemetry.live import TraceContext, accept_trace
from telemetry.records import RequestRecord
from telemetry.rolling import FEW, Rolling
from telemetry.tail import RECENT_MAX, TailSampler, misses_objective
from telemetry.vocabulary import FAULTS, NS_PER_S, OUTCOMES, TIME_PER_OUTPUT_TOKEN_S, TIME_TO_FIRST_TOKEN_S
from tests.contract.telemetry.test_spans import CALLER, a_record

OURS = TraceContext(trace_id="f" * 32, span_id="b" * 16)
"""Of the largest id: of no share but the whole."""


def lasting(seconds: float, **changes: object) -> RequestRecord:
    return a_record(accepted_ns=0, finished_ns=int(seconds * NS_PER_S), **changes)


@given(trace_id=st.integers(1, 2**128 - 1), ratio=st.floats(0, 1))
def test_the_share_is_the_one_that_opentelemetry_takes(trace_id: int, ratio: float) -> None:
    trace = TraceContext(trace_id=f"{trace_id:032x}", span_id="b" * 16)
    theirs = TraceIdRatioBased(ratio).should_sample(None, trace_id, "a").decision
    assert (TailSampler(ratio=ratio).because(a_record(), trace) == "share") == (theirs is Decision.RECORD_AND_SAMPLE)


def test_about_as_many_as_were_asked_for() -> None:
    ids, sampler = random.Random(5), TailSampler(ratio=0.2)
    contexts = [TraceContext(trace_id=f"{ids.getrandbits(128):032x}", span_id="b" * 16) for _ in range(5000)]
    kept = sum(sampler.because(a_record(), trace) == "share" for trace in contexts)
    assert 900 < kept < 1100


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("status", [200, 400, 408, 429, 499, 500, 503, 0])
def test_whatever_was_our_fault_is_kept(outcome: str, status: int) -> None:
    because = TailSampler(ratio=0).because(a_record(outcome=outcome, status=status), OURS)
    assert because == ("fault" if status >= 500 or (status < 400 and outcome in FAULTS) else "")


@pytest.mark.parametrize(
    ("first_s", "whole_s", "tokens", "missed"),
    [
        (TIME_TO_FIRST_TOKEN_S, 2.1, 9, False),
        (TIME_TO_FIRST_TOKEN_S + 0.001, 2.1, 9, True),
        (0.1, 0.1 + 8 * TIME_PER_OUTPUT_TOKEN_S, 9, False),
        (0.1, 0.2 + 8 * TIME_PER_OUTPUT_TOKEN_S, 9, True),
        (0.0, TIME_TO_FIRST_TOKEN_S + 0.1, 0, True),  # it left before there was any
        (0.0, 0.1, 0, False),
    ],
)
def test_what_misses_a_promise_is_kept(first_s: float, whole_s: float, tokens: int, missed: bool) -> None:
    record = lasting(whole_s, first_token_ns=int(first_s * NS_PER_S), output_tokens=tokens)
    assert misses_objective(record) == missed
    assert TailSampler(ratio=0).because(record, OURS) == ("objective" if missed else "")
    assert not misses_objective(lasting(100, route="/tokenize", first_token_ns=0)), "nobody promised that"


def test_the_caller_decides_for_its_own() -> None:
    sampler = TailSampler(ratio=0)
    assert sampler.because(a_record(), accept_trace(CALLER)) == "caller"
    unsampled = accept_trace(CALLER[:-2] + "00")
    assert [sampler.because(a_record(status=status), unsampled) for status in (200, 500)] == ["", ""]
    assert sampler.because(a_record(status=500), accept_trace(CALLER)) == "fault", "what says more comes first"


def test_the_slowest_of_lately_are_kept() -> None:
    sampler, durations = TailSampler(ratio=0), random.Random(1)
    for number in range(RECENT_MAX):
        because = sampler.because(lasting(durations.uniform(0.1, 0.2)), OURS)
        assert not because or number >= FEW, "of a few nobody knows what is slow"
    ordinary = [sampler.because(lasting(durations.uniform(0.1, 0.2)), OURS) for _ in range(2000)]
    assert set(ordinary) == {"", "slowest"}
    assert 5 <= ordinary.count("slowest") <= 40, "one of a hundred"
    assert sampler.because(lasting(1.0), OURS) == "slowest"
    assert sampler.because(lasting(1.0, route="/tokenize"), OURS) == "", "of another route nothing is known yet"


def test_a_flood_of_refusals_makes_nobody_slow() -> None:
    sampler = TailSampler(ratio=0)
    for _ in range(RECENT_MAX):
        sampler.because(lasting(0.15), OURS)
    for _ in range(5 * RECENT_MAX):
        sampler.because(lasting(0.001, status=429, outcome="rate_limited"), OURS)
    assert sampler.because(lasting(0.15), OURS) == ""


@given(amounts=st.lists(st.integers(0, 1000), min_size=1, max_size=300), quantile=st.floats(0, 1))
def test_quantiles_are_of_the_last_so_many(amounts: list[int], quantile: float) -> None:
    rolling = Rolling(amounts_max=FEW)
    for amount in amounts:
        rolling.add(amount)
    kept = sorted(amounts[-FEW:])
    expected = len(kept) >= FEW and kept[int(quantile * (FEW - 1))] < 500
    assert rolling.is_above(500, quantile) == expected
