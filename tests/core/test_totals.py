"""
Sums over steps: in whatever stretches they are made they come to the same, and the line through them is the best one.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.records import InterconnectBook, KvBook, StepRecord
from telemetry.totals import StepTotals
from tests.contract.telemetry.records_strategy import step_records


def total(steps: list[StepRecord]) -> StepTotals:
    totals = StepTotals()
    for step in steps:
        totals.add(step)
    return totals


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(step_records(), max_size=12), cut=st.integers(0, 12))
def test_two_stretches_are_one(steps: list[StepRecord], cut: int) -> None:
    both = total(steps[:cut])
    both.join(total(steps[cut:]))
    whole = total(steps)
    for name in StepTotals.__struct_fields__:
        assert getattr(both, name) == pytest.approx(getattr(whole, name)), name
    assert whole.busy_ns == sum(step.step_ns - step.parts["idle"] for step in steps)


def step(tokens: int, served_ns: int, **more: object) -> StepRecord:
    parts = {"compute": served_ns}
    return StepRecord(
        step_id=1,
        ended_ns=10,
        step_ns=served_ns,
        parts=parts,
        tokens=tokens,
        served_ns=served_ns,
        **more,  # type: ignore[arg-type]
    )


def test_the_fixed_cost_of_a_step_is_that_of_the_least_squares_line() -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(1, 64, 200)
    served = [int(8e6 + 5e5 * int(count) + random.normal(0, 2e5)) for count in tokens]
    totals = total([step(int(count), ns) for count, ns in zip(tokens, served, strict=True)])
    slope, fixed = np.polyfit(tokens, np.array(served) / 1e9, 1)
    assert totals.fixed_share() == pytest.approx(fixed / (fixed + slope * max(tokens)))
    assert 0.15 < totals.fixed_share() < 0.25
    assert totals.row_share(20, 40) == pytest.approx(slope * 20 / (fixed + slope * 40))


def test_alike_steps_tell_nothing_of_what_is_fixed() -> None:
    assert total([step(16, 1000) for _ in range(50)]).fixed_share() == 0
    few = total([step(number, 1000 * number) for number in range(1, 5)])
    assert few.fixed_share() == 0 and few.row_share(2, 8) == 0.25, "too few"


def test_who_was_late_and_what_was_waited_for_is_kept() -> None:
    late = InterconnectBook(kind="threads", wait_ns=5, straggler=1, rank_wait_ns=(5, 0, 7))
    kv = KvBook(total=32, free=0, filled=16, tail=16)
    totals = total([step(1, 10, interconnect=late, kv=kv, waits={"queue_kv_full": 2}), step(1, 10, kv=kv)])
    assert totals.late_ranks == {"0:1": 7}
    assert (totals.kv_waits, totals.kv_wait_fragmentation, totals.kv_wait_utilization) == (1, 0.5, 1.0)
