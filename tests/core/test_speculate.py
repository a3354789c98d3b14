"""
The controller against machines and texts on paper: it gains where there is something to gain, and loses nothing to
speak of anywhere, whatever is tried on it.
"""

import random
from collections.abc import Callable

import pytest

from engine.api import GenerateRequest, Sampling
from engine.sequence import Sequence
from engine.speculate import ROWS_MORE_MAX, Speculator
from engine.step_costs import KNOTS, StepCosts
from tests.core.speculation import (
    Noise,
    Text,
    alternating,
    chatting,
    copying,
    deceiving,
    run,
    step_ns,
    still,
    usual,
    wild,
)

LOSS_MAX = 0.03
LOSS_WILD_MAX = 0.1
ADVERSARIES: dict[str, Callable[[], list[Text]]] = {
    "chat": lambda: chatting(1, count=40),
    "never": lambda: deceiving(1, count=40, run=2),
    "after 6": lambda: deceiving(2, count=40, run=6),
    "after 12": lambda: deceiving(3, count=40, run=12),
    "turns short": lambda: alternating(1, span=12),
    "turns long": lambda: alternating(2, span=40),
}


@pytest.mark.parametrize("noise", [still, usual, wild])
@pytest.mark.parametrize("streams", [1, 8, 32])
@pytest.mark.parametrize("texts", ADVERSARIES.values(), ids=ADVERSARIES)
def test_it_never_loses(texts: Callable[[], list[Text]], streams: int, noise: Callable[[int], Noise]) -> None:
    """To speak of, that is: where nothing can be measured, a little."""
    found = run(texts(), streams=streams, noise=noise(streams))
    assert found.speedup >= 1 - (LOSS_WILD_MAX if noise is wild else LOSS_MAX)


@pytest.mark.parametrize("noise", [still, usual, wild])
def test_it_gains_where_texts_are_copied(noise: Callable[[int], Noise]) -> None:
    found = run(copying(1, count=20), streams=1, noise=noise(1))
    assert found.speedup > 2.2
    assert found.accepted > 0.7 * found.drafted
    assert run(copying(2, count=40), streams=8, noise=noise(2)).speedup > 1.05


def test_under_load_it_turns_itself_off_and_does_not_even_look() -> None:
    """32 rows are computed in proportion: a draft would have to be right always, and then gains nothing."""
    texts = copying(3, count=32, output=400)
    found = run(texts, streams=32)
    assert found.drafted < 0.03 * found.tokens
    assert found.looks < 0.05 * 400
    assert found.speedup >= 1 - LOSS_MAX


def test_it_stays_on_where_rows_are_free_however_many_there_are() -> None:
    speculator = Speculator(15)

    def cost(rows: int, _keys: float) -> int:
        return 30_000_000 + 10_000 * rows

    run(copying(3, count=32, output=400), streams=32, speculator=speculator, cost=cost)  # It has to find out.
    assert run(copying(4, count=32, output=400), streams=32, speculator=speculator, cost=cost).speedup > 1.3


def test_it_turns_itself_off_where_rows_are_dear_from_the_first() -> None:
    found = run(copying(3, count=20), streams=1, cost=lambda rows, _keys: 3_000_000 * rows)
    assert found.drafted < 0.05 * found.tokens
    assert found.speedup >= 1 - LOSS_MAX


def test_it_finds_out_when_the_load_has_gone() -> None:
    speculator = Speculator(15)
    run(copying(1, count=64), streams=32, speculator=speculator)
    assert run(copying(2, count=10), streams=1, speculator=speculator).speedup > 2.5


def test_it_finds_out_when_texts_begin_to_repeat_themselves() -> None:
    speculator = Speculator(15)
    before = run(chatting(5, count=60), streams=1, speculator=speculator)
    assert before.speedup >= 1 - LOSS_MAX
    assert run(copying(2, count=10), streams=1, speculator=speculator).speedup > 2.5


def test_it_finds_out_when_the_machine_has_changed() -> None:
    """Rows that were dear are cheap now: a step in so many is spent on trying."""
    speculator = Speculator(15)
    run(copying(1, count=20), streams=1, speculator=speculator, cost=lambda rows, _keys: 3_000_000 * rows)
    run(copying(2, count=30), streams=1, speculator=speculator)
    assert run(copying(3, count=10), streams=1, speculator=speculator).speedup > 1.5


def test_the_same_again_is_answered_from_what_was_answered() -> None:
    dice = random.Random(1)
    answer = [dice.randrange(2000) for _ in range(150)]
    texts = [([dice.randrange(2000) for _ in range(40)], answer) for _ in range(10)]
    assert run(texts, streams=1).speedup > 2.0


def test_drafts_stay_within_their_bounds() -> None:
    speculator = Speculator(4)
    flat = 10_000_000
    sequences = [_quoting(number) for number in range(40)]
    for _ in range(20):
        speculator.spent(40, 1.0, flat)
        speculator.spent(100, 1.0, flat)
    sizes = []
    for budget in (0, 6, 9, 1000):
        most = 0
        for _ in range(120):  # reading takes its time, and nobody looks at every step
            wishes = speculator.wish(sequences, budget)
            speculator.spent(40, 1.0, flat)
            most = max(most, sum(map(len, wishes.values())))
            assert all(0 < len(tokens) <= 4 for tokens in wishes.values())
            assert all(len(wishes.get(one.number, ())) < one.request.tokens_max for one in sequences)
        sizes.append(most)
    assert sizes[:3] == [0, 6, 9] and 9 < sizes[3] <= ROWS_MORE_MAX


def _quoting(number: int) -> Sequence:
    prompt = (*range(number * 50, number * 50 + 20), *range(number * 50, number * 50 + 8))
    request = GenerateRequest(request_id=f"q{number}", prompt=prompt, sampling=Sampling(), tokens_max=2 + number % 4)
    return Sequence(request, number=number, now_ns=0)


def test_the_last_token_is_never_drafted() -> None:
    """A draft is followed by one token more, and there is no room for it."""
    speculator = Speculator(15)
    sequence = _quoting(0)
    for _ in range(10):
        speculator.spent(1, 0.1, 1_000_000)
    assert len(speculator.wish([sequence], 100)[0]) == 1
    sequence.emit(8, 1)
    speculator.answered(sequence, (8,))
    assert speculator.wish([sequence], 100) == {}


def test_what_is_wasted_is_a_share_of_the_step() -> None:
    speculator = Speculator(15)
    for _ in range(200):
        for rows in (1, 2, 4, 8, 16):
            speculator.spent(rows, 0.0, step_ns(rows, 0.0))
    assert speculator.wasted_share(8, 0.0, 0) == 0
    assert speculator.wasted_share(16, 0.0, 8) == pytest.approx(1 - 5.1 / 7.7, abs=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_costs_are_learned_in_noise_and_outliers(seed: int) -> None:
    dice, costs = random.Random(seed), StepCosts()
    costs.observe(1, 0.2, step_ns(1, 0.2) * 20)  # The first step of all generates code.
    for _ in range(4000):
        rows = dice.choice((1, 1, 1, 2, 4, 6, 8, 16, 32))
        keys = rows * dice.uniform(0.05, 1.5)
        spent_ns = step_ns(rows, keys) * dice.choice((0.95, 1.0, 1.05)) * (8 if dice.random() < 0.02 else 1)
        costs.observe(rows, keys, int(spent_ns))
    for rows in (2, 4, 8, 16, 32):
        true = step_ns(rows, rows * 0.5) / step_ns(1, 0.5)
        assert costs.cost(rows, rows * 0.5) / costs.cost(1, 0.5) == pytest.approx(true, rel=0.12), rows


@pytest.mark.parametrize("seed", range(5))
def test_contexts_that_grow_are_not_blamed_for_a_machine_that_slows_down(seed: int) -> None:
    """One size of step only, its keys grow as its time does: keys must not come to look like all that a step costs."""
    noise, costs = wild(seed), StepCosts()
    for step in range(600):
        keys = 8 * (0.1 + step % 200 / 1000)
        costs.observe(8, keys, int(step_ns(8, keys) * noise() * (1 + step / 300)))
    assert costs.cost(8, keys * 9 / 8) / costs.cost(8, keys) < 1.05
    assert 0.3 < costs.cost(8, 0.0) < 3


def test_costs_follow_the_machine_and_keep_their_shape() -> None:
    costs = StepCosts()
    for _ in range(100):
        for rows in (1, 4, 8):
            costs.observe(rows, 0.0, step_ns(rows, 0.0))
    before = costs.cost(8, 0.0) / costs.cost(1, 0.0)
    for _ in range(300):
        costs.observe(1, 0.0, int(step_ns(1, 0.0) * 1.4))
    assert costs.expected_ns(1, 0.0) == pytest.approx(step_ns(1, 0.0) * 1.4, rel=0.05)
    assert costs.cost(8, 0.0) / costs.cost(1, 0.0) == pytest.approx(before, rel=0.15)


def test_costs_of_sizes_never_seen_are_guessed_from_those_seen() -> None:
    costs = StepCosts()
    costs.observe(1, 0.0, 1_000_000)
    ladder = [costs.cost(rows, 0.0) for rows in KNOTS]
    assert ladder == sorted(ladder)
    assert costs.cost(64, 0.0) / costs.cost(32, 0.0) == pytest.approx(2.0)
    assert costs.cost(2 * KNOTS[-1], 0.0) == pytest.approx(2 * costs.cost(KNOTS[-1], 0.0))
    assert costs.doubt(8) > costs.doubt(1)
    for spent_ns in (0, -5):
        costs.observe(1, 0.0, spent_ns)
    assert costs.expected_ns(1, 0.0) == pytest.approx(1_000_000)
