"""
The ledger: exactly one state at any time, so the intervals sum to the whole whatever the caller does.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.ledger import Ledger
from telemetry.records import ENGINE_STATES, GATEWAY_STATES

states = st.sampled_from(ENGINE_STATES + GATEWAY_STATES)
waits_ns = st.integers(0, 10**12)
lives = st.lists(st.tuples(states, waits_ns), max_size=60)


@given(first=states, opened_ns=st.integers(0, 2**62), life=lives, last_ns=waits_ns)
def test_any_life_sums_to_its_length(first: str, opened_ns: int, life: list[tuple[str, int]], last_ns: int) -> None:
    ledger = Ledger(first, opened_ns)
    now_ns = opened_ns
    expected: dict[str, int] = {}
    for state, wait_ns in [*life, (first, last_ns)]:
        expected[ledger.state] = expected.get(ledger.state, 0) + wait_ns
        now_ns += wait_ns
        assert sum(ledger.spent(now_ns).values()) == now_ns - opened_ns
        ledger.enter(state, now_ns)
    assert ledger.spent(now_ns) == {state: spent_ns for state, spent_ns in expected.items() if spent_ns}


@given(life=lives, transit_ns=waits_ns, inner=lives, rest_ns=waits_ns)
def test_a_spliced_book_is_taken_over_whole(
    life: list[tuple[str, int]], transit_ns: int, inner: list[tuple[str, int]], rest_ns: int
) -> None:
    """The engine's book goes in; the way to the engine stays with the state before it, and the sum stays exact."""
    outer, now_ns = Ledger("parse", 0), 0
    for state, wait_ns in life:
        now_ns += wait_ns
        outer.enter(state, now_ns)
    outer.enter("dispatch", now_ns)
    now_ns += transit_ns
    expected = outer.spent(now_ns)
    engine, engine_opened_ns = Ledger("queue_batch_full", now_ns), now_ns
    for state, wait_ns in inner:
        now_ns += wait_ns
        engine.enter(state, now_ns)
    others = engine.spent(now_ns)
    assert sum(others.values()) == now_ns - engine_opened_ns
    outer.splice(others, now_ns)
    assert outer.state == "dispatch"
    outer.enter("deliver", now_ns)
    end_ns = now_ns + rest_ns
    for state, spent_ns in [*others.items(), ("deliver", rest_ns)]:
        expected[state] = expected.get(state, 0) + spent_ns
    assert outer.spent(end_ns) == {state: spent_ns for state, spent_ns in expected.items() if spent_ns}
    assert sum(outer.spent(end_ns).values()) == end_ns


@given(settled_ns=st.integers(1, 1000), beyond_ns=st.integers(1, 1000))
def test_a_book_that_reaches_back_into_what_is_settled_is_refused(settled_ns: int, beyond_ns: int) -> None:
    ledger = Ledger("parse", 0)
    ledger.enter("dispatch", settled_ns)
    with pytest.raises(AssertionError, match="reaches back"):
        ledger.splice({"decode": 5000 + beyond_ns}, settled_ns + 5000)
    assert ledger.spent(settled_ns + 5000) == {"parse": settled_ns, "dispatch": 5000}


def test_the_same_state_again_changes_nothing() -> None:
    ledger = Ledger("decode", 100)
    ledger.enter("decode", 150)
    assert ledger.spent(200) == {"decode": 100}


def test_time_does_not_run_backwards() -> None:
    ledger = Ledger("parse", 100)
    ledger.enter("tokenize", 200)
    with pytest.raises(AssertionError, match="backwards"):
        ledger.spent(199)


def test_reading_does_not_change_the_book() -> None:
    ledger = Ledger("parse", 0)
    ledger.spent(50)["parse"] = 7
    assert ledger.spent(60) == {"parse": 60}
