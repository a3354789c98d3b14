"""
Uniform numbers and prefix names: the two places where a hash stands for a promise.
"""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine import prefix
from engine.sequence import uniform


def test_uniforms_are_pinned() -> None:
    """They are part of what a seed means: a change breaks every client's reproducibility."""
    assert [uniform(0, 0), uniform(0, 1), uniform(7, 0), uniform(-1, 5)] == PINNED


def test_uniforms_look_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform(3, i) for i in range(20_000)], [uniform(i, 3) for i in range(20_000)]):
        buckets = [0] * 20
        for number in numbers:
            assert 0.0 <= number < 1.0
            buckets[int(number * 20)] += 1
        chi_squared = sum((count - 1000) ** 2 / 1000 for count in buckets)
        assert chi_squared < 43.8  # 19 degrees of freedom, p = 0.001; the numbers are fixed, so this cannot flake
        lag = sum((a - 0.5) * (b - 0.5) for a, b in itertools.pairwise(numbers)) / len(numbers)
        assert abs(lag) < 0.003


@given(st.integers(), st.integers(0, 2**31))
def test_uniforms_stay_below_one_for_any_seed(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=8), st.lists(st.integers(0, 2**40), min_size=1, max_size=8))
def test_names_differ_when_anything_before_differs(left: list[int], right: list[int]) -> None:
    root = prefix.root("a")
    assert (prefix.chain(root, left) == prefix.chain(root, right)) == (left == right)
    assert prefix.chain(prefix.root("b"), left) != prefix.chain(root, left)
    assert prefix.chain(prefix.chain(root, left), right) != prefix.chain(root, right)


PINNED = [0.6524484863740322, 0.7012121095215252, 0.490536849486921, 0.5671457583996546]
