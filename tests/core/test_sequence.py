"""
Uniform numbers and prefix names: the two places where a hash stands for a promise.
"""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine import prefix
from engine.api import GenerateRequest, Sampling
from engine.sequence import Sequence, uniform


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


@given(st.text(max_size=3), st.sampled_from((1, 3, 16, 48, 64, 100)), st.integers(0, 700), st.integers(0, 5))
def test_an_index_asks_for_the_names_that_the_engine_gives(tenant: str, slots: int, length: int, salt: int) -> None:
    tokens = tuple((index * 7 + salt) % 101 for index in range(length))
    asked = prefix.indexed_names(tenant, tokens, slots)
    request = GenerateRequest(request_id="r", prompt=tokens, sampling=Sampling(), tokens_max=1, tenant=tenant)
    sequence = Sequence(request, number=0, now_ns=0)
    full_blocks = max(0, length - 1) // slots  # the engine computes at least the last token
    given = [sequence.name(index, slots) for index in range(full_blocks) if prefix.is_indexed(index, slots)]
    assert asked == given
    assert len(asked) == max(0, length - 1) // prefix.indexed_tokens(slots)
    assert prefix.INDEXED_TOKENS_MIN <= prefix.indexed_tokens(slots) < prefix.INDEXED_TOKENS_MIN + slots
    assert all(len(name) == prefix.NAME_BYTES for name in asked)
    assert len({name[: prefix.FAMILY_BYTES] for name in asked}) <= 1


def test_of_a_long_chain_only_the_beginning_is_indexed() -> None:
    tokens = range(prefix.INDEXED_NAMES_MAX * 64 + 1000)
    names = prefix.indexed_names("t", tokens, 16)
    assert len(names) == len(set(names)) == prefix.INDEXED_NAMES_MAX
    last = prefix.INDEXED_NAMES_MAX * 4 - 1
    assert prefix.is_indexed(last, 16) and not prefix.is_indexed(last + 4, 16)


def test_families_are_spread_and_those_of_tenants_have_nothing_in_common() -> None:
    families = {prefix.indexed_names(f"t{number}", range(65), 16)[0][: prefix.FAMILY_BYTES] for number in range(500)}
    assert len(families) > 480  # of 65,536: two of 500 coincide twice, on average


PINNED = [0.6524484863740322, 0.7012121095215252, 0.490536849486921, 0.5671457583996546]
