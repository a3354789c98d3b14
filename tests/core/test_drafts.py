"""
What the scheduler does with drafts, one promise at a time.  Who guesses here knows what the device of hashes will say.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many

import msgspec
import pytest

from engine.api import Abort, GenerateRequest, Sampling
from engine.config import SchedulerConfig
from engine.device.fake import FakeRunner, next_token
from engine.plan import SampleSpec, Slice, SliceResult, StepPlan, StepResult
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from tests.core.test_scheduler import World, request

Guess = Callable[[Sequence, int], tuple[int, ...]]


class Guesses:
    """Implements `engine.speculate.Speculation`: asks a function, and notes what it is told."""

    def __init__(self, guess: Guess) -> None:
        self.guess = guess
        self.budgets: list[int] = []
        self.spent_ns: list[int] = []

    def wish(self, asking: Many[Sequence], budget: int) -> dict[int, tuple[int, ...]]:
        """What the function says, within the budget."""
        self.budgets.append(budget)
        wishes: dict[int, tuple[int, ...]] = {}
        for one in asking:
            drafts = self.guess(one, budget)[:budget]
            budget -= len(drafts)
            if drafts:
                wishes[one.number] = drafts
        return wishes

    def answered(self, sequence: Sequence, emitted: Many[int]) -> None:
        """Nothing to learn."""

    def spent(self, rows: int, keys: float, spent_ns: int) -> None:
        """Noted."""
        self.spent_ns.append(spent_ns)

    def wasted_share(self, rows: int, keys: float, rejected: int) -> float:
        """By rows."""
        return rejected / rows

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Nothing to forget."""


def truth(sequence: Sequence, count: int) -> tuple[int, ...]:
    """What a greedy request without bans will be told next."""
    known = list(sequence.tokens)
    left = min(count, sequence.request.tokens_max - sequence.output_length - 1)
    for _ in range(left):
        spec = SampleSpec(sampling=sequence.request.sampling, uniforms=(0.0,))
        known.append(next_token(known, spec, vocab_size=100))
    return tuple(known[len(sequence.tokens) :])


def world_with(guess: Guess, **bounds: int) -> tuple[World, Guesses]:
    world, guesses = World(**bounds), Guesses(guess)
    world.scheduler = Scheduler(world.config, speculation=guesses)
    return world, guesses


def plain_tokens(*requests: GenerateRequest) -> dict[str, list[int]]:
    world = World()
    world.send(*requests)
    world.finish()
    return world.tokens


def test_without_speculation_nothing_is_different() -> None:
    assert SchedulerConfig(blocks_max=1).drafts_max == 0
    world = World()
    world.send(request("a", 5))
    plan, _ = world.step()
    assert plan.slices[0].drafts == 0
    assert plan.slices[0].sample is not None and len(plan.slices[0].sample.uniforms) == 1


def test_right_drafts_make_steps_fewer_and_books_close() -> None:
    world, _ = world_with(lambda one, _: truth(one, 5))
    world.send(request("a", 5, tokens_max=20))
    steps = 0
    drafted = accepted = 0
    while world.scheduler.has_work:
        _, outcome = world.step()
        steps += 1
        drafted, accepted = drafted + outcome.drafted_tokens, accepted + outcome.draft_accepted_tokens
        assert outcome.draft_rejected_share == 0
    assert world.tokens["a"] == plain_tokens(request("a", 5, tokens_max=20))["a"]
    assert steps == 1 + 4  # One for the prompt and the first token; then six, six, six and the last one.
    assert drafted == accepted == 15


def test_wrong_drafts_cost_rows_and_nothing_else() -> None:
    world, _ = world_with(lambda one, _: tuple((token + 1) % 100 for token in truth(one, 3)))
    world.send(request("a", 5, tokens_max=8))
    shares = []
    while world.scheduler.has_work:
        _, outcome = world.step()
        assert outcome.draft_accepted_tokens == 0
        shares.append(outcome.draft_rejected_share)
    assert world.tokens["a"] == plain_tokens(request("a", 5, tokens_max=8))["a"]
    assert shares[:2] == [0.0, 0.75]


def test_nobody_guesses_while_somebody_else_s_prompt_is_computed() -> None:
    world, guesses = world_with(lambda one, _: truth(one, 5), tokens_step_max=8)
    world.send(request("a", 3, tokens_max=30))
    world.step()
    world.send(request("long", 30))
    asked = len(guesses.budgets)
    for _ in range(5):
        plan, _ = world.step()
        assert all(piece.drafts == 0 for piece in plan.slices)
    assert len(guesses.budgets) == asked == len(guesses.spent_ns)
    plan, _ = world.step()
    assert sum(piece.drafts for piece in plan.slices) == 6 == guesses.budgets[-1]


def test_drafts_take_no_block_from_anybody() -> None:
    """Two sequences fill the pool but for a block; nobody is preempted, drafts are cut to the slots that are left."""
    world, _ = world_with(lambda one, _: truth(one, 10), blocks_max=5, prefix_cache=0)
    world.send(request("a", 6, tokens_max=6), request("b", 5, tokens_max=6))
    world.step()
    plan, outcome = world.step()
    assert [piece.drafts for piece in plan.slices] == [4, 2]
    assert outcome.preemptions == 0
    world.finish()
    assert world.reason("a") == world.reason("b") == "length"


@pytest.mark.parametrize("waiting", [False, True])
def test_at_most_one_cached_block_goes_for_drafts_and_none_while_somebody_waits(waiting: bool) -> None:
    world, _ = world_with(lambda one, _: truth(one, 12), blocks_max=8)
    world.send(request("cached", tuple(range(60, 80)), tokens_max=1))
    world.finish()
    assert world.scheduler.pool.book().cached_idle == 5 * 4
    world.send(request("a", 12, tokens_max=16))  # Takes the three free blocks, and is full.
    world.step()
    if waiting:
        world.send(request("big", 24, tokens_max=2, priority=1))
        plan, outcome = world.step()
        assert outcome.load.waiting == 1
    else:
        plan, outcome = world.step()
    # The block for the newest token has to go in any case.
    assert outcome.evictions == (1 if waiting else 2)
    assert plan.slices[0].drafts == (3 if waiting else 7)


def test_blocks_that_only_drafts_had_needed_are_given_back() -> None:
    world, _ = world_with(lambda one, _: tuple((token + 1) % 100 for token in truth(one, 9)))
    world.send(request("a", 3, tokens_max=20))
    world.step()
    plan = world.scheduler.plan(world.now_ns)
    assert plan.slices[0].drafts == 9
    assert world.scheduler.pool.book().lookahead == 3 * 4  # positions 4 .. 12, in blocks of four
    world.scheduler.commit(plan, world.device.run(plan), world.now_ns)
    book = world.scheduler.pool.book()
    assert (book.filled, book.lookahead) == (4, 4)  # the newest token has its slot already
    world.finish()


def test_an_end_inside_a_run_of_right_drafts_cuts_it() -> None:
    alone = plain_tokens(request("a", 5, tokens_max=20))["a"]
    stop = next(token for index, token in enumerate(alone) if index >= 3 and token not in alone[:index])
    index = alone.index(stop)
    world, _ = world_with(lambda one, _: truth(one, 15))
    world.send(request("a", 5, tokens_max=20, stop_ids=(stop,)))
    world.step()
    _, outcome = world.step()
    assert world.tokens["a"] == alone[: index + 1] and world.reason("a") == "stop"
    (record,) = outcome.finished
    assert record.draft_accepted_tokens == index - 1 and record.draft_rejected_tokens == 15 - (index - 1)
    assert record.output_tokens == index + 1 and outcome.emitted_tokens == index


def test_one_token_over_and_over_ends_where_it_would_have_ended() -> None:
    """Degenerate output is noticed after the same number of tokens, whatever the size of the bites."""
    lengths = []
    for guess in (lambda _one, _budget: (), lambda _one, _budget: (5,) * 7):
        scheduler = Scheduler(SchedulerConfig(blocks_max=99), speculation=Guesses(guess))
        ask = GenerateRequest(request_id="a", prompt=(1,), sampling=Sampling(), tokens_max=300, stop_ids=(2,))
        scheduler.apply(ask, 0)
        said, now_ns = 0, 0
        while scheduler.has_work:
            plan = scheduler.plan(now_ns)
            now_ns += 1
            result = StepResult(step_id=plan.step_id, slices=tuple(map(_always_five, plan.slices)))
            said += sum(len(delta.tokens) for delta in scheduler.commit(plan, result, now_ns).deltas)
        lengths.append(said)
    assert lengths[0] == lengths[1] == 64


def _always_five(piece: Slice) -> SliceResult:
    return SliceResult((5,) * (piece.drafts + 1))


def test_an_abort_in_flight_books_no_draft() -> None:
    world, _ = world_with(lambda one, _: truth(one, 5))
    world.send(request("a", 5, tokens_max=20))
    world.step()
    plan = world.scheduler.plan(world.now_ns)
    assert plan.slices[0].drafts == 5
    world.send(Abort("a"))
    outcome = world.scheduler.commit(plan, world.device.run(plan), world.now_ns + 1)
    assert outcome.drafted_tokens == outcome.emitted_tokens == 0
    (record,) = outcome.finished
    assert record.drafted_tokens == 0 and record.outcome == "abort"
    book = world.scheduler.pool.book()
    assert book.free + book.cached_idle == book.total


def test_a_fault_with_drafts_ends_one_sequence() -> None:
    world, _ = world_with(lambda one, _: truth(one, 3))
    world.device.fault_of = lambda _plan, piece: "NaN" if piece.sequence == 1 and piece.drafts else ""
    world.send(request("a", 5, tokens_max=8), request("bad", 5, tokens_max=8))
    world.finish()
    assert [world.reason(name) for name in ("a", "bad")] == ["length", "failed"]
    assert len(world.tokens["a"]) == 8


def test_bans_end_inside_a_slice() -> None:
    """tokens_min is reached in the middle of the drafts: each row knows whether stop ids are banned there."""
    every = tuple(range(0, 100, 2))
    asked = request("a", 5, tokens_max=30, stop_ids=every, tokens_min=6)
    expected = plain_tokens(asked)["a"]

    def guess(one: Sequence, budget: int) -> tuple[int, ...]:
        known = expected[one.output_length : one.output_length + min(budget, 10)]
        return tuple(known)

    world, _ = world_with(guess)
    world.send(asked)
    world.finish()
    assert world.tokens["a"] == expected
    assert world.reason("a") == "stop"


def test_preemption_between_drafts_changes_nothing() -> None:
    asked = [request(name, 10, tokens_max=24) for name in ("a", "b", "c")]
    expected = plain_tokens(*asked)
    world, _ = world_with(lambda one, _: truth(one, 6), blocks_max=12)
    world.send(*asked)
    preemptions = 0
    while world.scheduler.has_work:
        preemptions += world.step()[1].preemptions
    assert preemptions > 0
    assert world.tokens == expected


def test_a_device_with_other_answers_than_rows_is_a_bug() -> None:
    world, _ = world_with(lambda one, _: ())
    world.send(request("a", 5))
    plan = world.scheduler.plan(0)
    result = StepResult(step_id=plan.step_id, slices=(SliceResult((1, 2)),))
    with pytest.raises(AssertionError):
        world.scheduler.commit(plan, result, 1)


def test_the_fake_device_refuses_drafts_that_are_none() -> None:
    device = FakeRunner(vocab_size=100)
    spec = SampleSpec(sampling=Sampling(), uniforms=(0.1, 0.2))
    good = Slice(sequence=1, start=0, tokens=(1, 2), blocks=(0,), sample=spec, drafts=1)
    device.run(StepPlan(step_id=1, slices=(good,)))
    for bad in ({"drafts": 2}, {"drafts": -1}, {"sample": None}):
        with pytest.raises(AssertionError):
            device.run(StepPlan(step_id=1, slices=(msgspec.structs.replace(good, **bad),)))
