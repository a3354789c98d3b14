"""
Who was served instead: exact sums, whatever the rows, and nobody who took much goes unnamed.
"""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.interference import FURTHER, NAMED_MAX, Interference, shares

rows = st.integers(1, 5000)


@given(total_ns=st.integers(0, 10**12), weights=st.lists(rows, min_size=1, max_size=70))
def test_shares_sum_and_are_by_weight(total_ns: int, weights: list[int]) -> None:
    parts = shares(total_ns, weights)
    assert sum(parts) == total_ns
    whole = sum(weights)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total_ns * weight / whole) <= 1


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.dictionaries(st.sampled_from("abcdefghijklmnop"), rows)), max_size=40)
)
def test_what_is_named_is_true_and_what_is_not_is_small(stalls: list[tuple[int, dict[str, int]]]) -> None:
    interference, truth = Interference(), Counter[str]()
    for stalled_ns, served in stalls:
        interference.add(stalled_ns, served)
        if served:
            for name, part in zip(served, shares(stalled_ns, list(served.values())), strict=True):
                truth[name] += part
    shown = interference.shown()
    named = {name: spent_ns for name, spent_ns in shown.items() if name != FURTHER}
    assert sum(shown.values()) == sum(stalled_ns for stalled_ns, _ in stalls)
    assert len(named) <= NAMED_MAX
    assert all(spent_ns <= truth[name] for name, spent_ns in named.items())
    assert list(named.values()) == sorted(named.values(), reverse=True)


def test_nobody_is_served_and_the_time_has_no_name() -> None:
    interference = Interference()
    interference.add(7, {})
    assert interference.shown() == {FURTHER: 7}
