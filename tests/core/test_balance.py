"""Who gets a request: what must hold whatever the replicas say of themselves, and the rules one at a time."""

from collections import Counter
from math import ceil
from random import Random
from typing import get_args

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway import balance
from gateway.balance import Ask, Candidate, Reason, choose
from gateway.config import POLICIES, Policy
from telemetry.vocabulary import LABELS, OTHER

PROMPT = 1000
tokens = st.integers(0, 5000)
candidates = st.lists(
    st.builds(
        lambda name, sequences, ahead, more, saturated, matched: Candidate(
            name=f"replica-{name}",
            sequences=sequences,
            tokens=ahead + more,
            ahead_tokens=ahead,
            capacity_tokens=8192,
            saturated=saturated,
            matched_tokens=matched * 64,
        ),
        st.integers(0, 10**6),
        st.integers(0, 20),
        tokens,
        tokens,
        st.booleans(),
        st.integers(0, PROMPT // 64),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda one: one.name,
)
asks = st.builds(lambda key, block: Ask(prompt_tokens=PROMPT, key=key, first_block=block), st.binary(), st.binary())


def idle(*matched: int) -> list[Candidate]:
    return [
        Candidate(name=f"r{index}", matched_tokens=tokens, capacity_tokens=8192) for index, tokens in enumerate(matched)
    ]


def put(one: Candidate, **fields: int | bool) -> Candidate:
    facts = {name: getattr(one, name) for name in Candidate.__dataclass_fields__} | fields
    return Candidate(**facts)


@given(st.sampled_from(POLICIES), candidates, asks, st.integers(0, 99), st.integers())
def test_whatever_is_known_somebody_gets_it_and_the_same_facts_give_the_same_choice(
    policy: Policy, found: list[Candidate], ask: Ask, turn: int, seed: int
) -> None:
    choice = choose(policy, found, ask, turn=turn, rng=Random(seed))
    assert 0 <= choice.chosen < len(found)
    assert choice == choose(policy, found, ask, turn=turn, rng=Random(seed))


@given(candidates, asks, st.integers())
def test_by_prefix_nobody_is_overwhelmed_while_another_is_not(found: list[Candidate], ask: Ask, seed: int) -> None:
    chosen = found[choose("prefix", found, ask, turn=0, rng=Random(seed)).chosen]
    ready = [one for one in found if not one.saturated]
    assert not chosen.saturated or not ready
    mean = (1 + sum(one.sequences for one in found)) / len(found)
    most = ceil(balance.LOAD_BOUND * mean) + balance.LOAD_MARGIN_SEQUENCES
    assert chosen.sequences < most or all(one.sequences >= most for one in ready) or len(found) == 1


@given(candidates, asks, st.integers())
def test_by_prefix_nobody_waits_clearly_longer_than_need_be(found: list[Candidate], ask: Ask, seed: int) -> None:
    found = [put(one, sequences=0, saturated=False) for one in found]
    choice = choose("prefix", found, ask, turn=0, rng=Random(seed))
    if choice.reason != "cached":
        return
    ahead = [one.ahead_tokens + PROMPT - one.matched_tokens for one in found]
    assert ahead[choice.chosen] <= balance.CLEARLY * min(ahead) + balance.MARGIN_TOKENS


@given(candidates, asks, st.integers(), st.data())
def test_by_prefix_to_have_more_of_it_never_hurts(
    found: list[Candidate], ask: Ask, seed: int, data: st.DataObject
) -> None:
    choice = choose("prefix", found, ask, turn=0, rng=Random(seed))
    if choice.reason != "cached":
        return
    chosen = found[choice.chosen]
    more = put(chosen, matched_tokens=data.draw(st.integers(chosen.matched_tokens, PROMPT)))
    again = [*found[: choice.chosen], more, *found[choice.chosen + 1 :]]
    assert choose("prefix", again, ask, turn=0, rng=Random(seed)).chosen == choice.chosen


def test_the_most_of_the_prompt_wins_among_the_idle() -> None:
    rng = Random(1)
    assert choose("prefix", idle(64, 896, 128), Ask(prompt_tokens=PROMPT), turn=0, rng=rng) == (1, "cached")
    full = idle(896, 832, 0)
    full[0] = put(full[0], tokens=4096)  # half of its KV: more than the difference is worth
    assert choose("prefix", full, Ask(prompt_tokens=PROMPT), turn=0, rng=rng) == (1, "cached")


def test_a_busy_favourite_is_relieved() -> None:
    rng, ask = Random(1), Ask(prompt_tokens=PROMPT)
    longer = idle(896, 0, 0)
    longer[0] = put(longer[0], ahead_tokens=1160)
    assert choose("prefix", longer, ask, turn=0, rng=rng) == (0, "cached"), "1,264 tokens against 1,000"
    longer[0] = put(longer[0], ahead_tokens=1161)
    assert choose("prefix", longer, ask, turn=0, rng=rng).reason == "relief"
    crowded = idle(896, 0, 0)
    crowded[0] = put(crowded[0], sequences=5)
    assert choose("prefix", crowded, ask, turn=0, rng=rng).reason == "relief"
    assert choose("prefix", [put(one, sequences=5) for one in crowded], ask, turn=0, rng=rng) == (0, "cached")
    crowded[0] = put(crowded[0], sequences=0, saturated=True)
    assert choose("prefix", crowded, ask, turn=0, rng=rng).reason == "relief"


def test_a_key_meets_its_like_and_only_what_has_to_moves() -> None:
    found = idle(0, 0, 0, 0)
    keys = [str(number).encode() for number in range(400)]
    owner = {key: choose("prefix", found, Ask(prompt_tokens=PROMPT, key=key), turn=0, rng=Random()) for key in keys}
    counts = Counter(choice.chosen for choice in owner.values())
    assert {choice.reason for choice in owner.values()} == {"key"}
    assert all(60 < counts[index] < 140 for index in range(4)), counts
    without = [found[0], found[2], found[3]]
    for key in keys:
        choice = choose("prefix", without, Ask(prompt_tokens=PROMPT, key=key), turn=0, rng=Random())
        if owner[key].chosen != 1:
            assert without[choice.chosen].name == found[owner[key].chosen].name
    away = choose("prefix", found, Ask(prompt_tokens=PROMPT, first_block=keys[0]), turn=0, rng=Random())
    assert away == (owner[keys[0]].chosen, "first_block")
    crowded = list(found)
    crowded[away.chosen] = put(found[away.chosen], sequences=9)
    moved = choose("prefix", crowded, Ask(prompt_tokens=PROMPT, key=keys[0]), turn=0, rng=Random())
    assert moved.chosen != away.chosen and moved.reason == "two_choices"


def test_two_random_choices_keep_loads_nearly_even() -> None:
    """The fullest of 10 has far less over the mean than with one random choice, which has about 3 sqrt(mean)."""
    rng, loads = Random(3), [0] * 10
    for _ in range(5000):
        found = [Candidate(name=str(number), tokens=load, capacity_tokens=10**9) for number, load in enumerate(loads)]
        choice = choose("prefix", found, Ask(prompt_tokens=1), turn=0, rng=rng)
        assert choice.reason == "two_choices"
        loads[choice.chosen] += 1
    assert max(loads) - 500 < 10


def test_the_other_policies() -> None:
    found = [put(one, tokens=tokens) for one, tokens in zip(idle(0, 896, 0), (5, 9, 3), strict=True)]
    ask = Ask(prompt_tokens=PROMPT)
    turns = [choose("round-robin", found, ask, turn=turn, rng=Random(1)) for turn in range(6)]
    assert [choice.chosen for choice in turns] == [0, 1, 2, 0, 1, 2]
    assert choose("least-tokens", found, ask, turn=0, rng=Random(1)) == (2, "least")
    stale = [*found[:2], put(found[2], saturated=True)]
    assert choose("least-tokens", stale, ask, turn=0, rng=Random(1)) == (0, "least")


def test_telemetry_knows_every_reason() -> None:
    assert (*get_args(Reason), OTHER) == LABELS["routing"]
    assert msgspec.convert("prefix", Policy) in POLICIES
