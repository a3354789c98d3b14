"""
The draft model and the core: when it is asked, what it is told, whose KV it holds, and that asking never costs much.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many

import msgspec
import pytest

from engine.api import Abort, GenerateRequest, Sampling
from engine.config import SchedulerConfig
from engine.device.drafting import DraftModel
from engine.device.fake import FakeRunner
from engine.draft_model import NOTHING, ModelSpeculator
from engine.draft_policy import Candidate, PayingPolicy, Step
from engine.outcome import Outcome
from engine.plan import DraftPlan, DraftResult, StepPlan
from engine.scheduler import Scheduler
from engine.step_costs import StepCosts
from tests.core.drafting import play, speculator_of
from tests.core.speculation import Noise, chatting, copying, deceiving, still, usual, wild
from tests.core.test_scheduler import request

VOCAB = 100


class Always:
    """Implements `engine.draft_policy.Policy`: as many tokens as it was made for, for everybody."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.right = self.wrong = self.passes = 0

    def offers(self, candidates: Many[Candidate], step: Step) -> dict[int, int]:
        """Whatever it costs."""
        del step
        return {one.number: min(self.count, one.count_max) for one in candidates}

    def chance(self, right: float, tried: float) -> float:
        """No opinion."""
        del right, tried
        return 0.5

    def learned(self, *, right: bool) -> None:
        """Counted."""
        self.right += right
        self.wrong += not right

    def passed(self, rows: int, keys: float, spent_ns: int) -> None:
        """Counted."""
        assert rows > 0 and keys > 0 and spent_ns >= 0
        self.passes += 1

    def stepped(self, rows: int, keys: float, spent_ns: int, *, guessed: int, accepted: int) -> None:
        """It does not matter."""
        assert 0 <= accepted <= guessed < rows


class Pair:
    """A scheduler, a device of hashes, and another one that drafts for it."""

    def __init__(self, count: int, *, draft_blocks_max: int = 64, draft_context_max: int = 64, **bounds: int) -> None:
        sizes = {"blocks_max": 64, "block_slots": 4, "context_max": 64, "drafts_max": 15, "vocab_size": VOCAB}
        sizes |= {"draft_blocks_max": draft_blocks_max, "draft_context_max": draft_context_max}
        self.config = msgspec.convert(sizes | bounds, SchedulerConfig)
        self.policy = Always(count)
        self.speculator = ModelSpeculator(self.config, self.policy)
        self.scheduler = Scheduler(self.config, speculation=self.speculator)
        self.device = FakeRunner(vocab_size=VOCAB, context_max=64, blocks_max=64, block_slots=4)
        self.small = FakeRunner(
            vocab_size=VOCAB, context_max=draft_context_max, blocks_max=draft_blocks_max, block_slots=4
        )
        self.plans: list[DraftPlan] = []
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.now_ns = 1

    def send(self, *messages: GenerateRequest | Abort) -> None:
        """Apply."""
        for message in messages:
            self.scheduler.apply(message, self.now_ns)

    def ask(self) -> DraftPlan:
        """As the loop does."""
        plan = self.scheduler.wishes()
        self.scheduler.check()
        if plan.slices:
            self.plans.append(plan)
            self.scheduler.drafted(plan, DraftModel(self.small).draft(plan))
            self.scheduler.check()
        return plan

    def step(self) -> tuple[StepPlan, Outcome]:
        """Ask, plan, run, commit."""
        self.ask()
        plan = self.scheduler.plan(self.now_ns)
        self.now_ns += 1000
        outcome = self.scheduler.commit(plan, self.device.run(plan), self.now_ns)
        for delta in outcome.deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.tokens)
            if delta.finish:
                self.reasons[delta.request_id] = delta.finish.reason
        self.scheduler.check()
        return plan, outcome

    def finish(self) -> list[Outcome]:
        """Until nobody is left."""
        outcomes = []
        while self.scheduler.has_work:
            outcomes.append(self.step()[1])
        return outcomes


def plain(*requests: GenerateRequest, **bounds: int) -> dict[str, list[int]]:
    """What they are told without any drafts."""
    pair = Pair(1, **bounds)
    pair.scheduler = Scheduler(pair.config, speculation=_Silent(pair.config, Always(1)))
    pair.send(*requests)
    pair.finish()
    return pair.tokens


class _Silent(ModelSpeculator):
    def asks(self, running: Many[object], budget: int) -> DraftPlan:
        del running, budget
        return NOTHING


def test_without_a_draft_model_nobody_is_asked() -> None:
    scheduler = Scheduler(SchedulerConfig(blocks_max=8, drafts_max=3))
    scheduler.apply(request("a", 5), 0)
    assert scheduler.wishes() == NOTHING


def test_who_guesses_what_the_model_says_is_always_right() -> None:
    pair = Pair(5)
    pair.send(request("a", 5, tokens_max=20))
    outcomes = pair.finish()
    assert pair.tokens == plain(request("a", 5, tokens_max=20))
    assert sum(one.drafted_tokens for one in outcomes) == sum(one.draft_accepted_tokens for one in outcomes) == 15
    assert len(outcomes) == 1 + 4
    # It reads the prompt and a token, then only what it has not read itself: its last guess, and the token after.
    assert [len(plan.slices[0].tokens) for plan in pair.plans] == [6, 2, 2]
    assert pair.policy.wrong == 0
    assert pair.speculator.pool.available == 64


def test_wrong_guesses_change_nothing_and_are_read_over() -> None:
    asked = [request("a", 5, tokens_max=12, sampling=Sampling(temperature=1, seed=3)), request("b", 9, tokens_max=12)]
    pair = Pair(3)
    pair.send(*asked)
    pair.finish()
    assert pair.tokens == plain(*asked)
    assert pair.policy.wrong > 3 and pair.policy.right > 3


def test_nothing_is_asked_while_prompts_are_computed_or_somebody_waits() -> None:
    pair = Pair(3, sequences_max=1)
    pair.send(request("a", 5, tokens_max=20))
    assert not pair.ask().slices
    pair.step()
    assert pair.ask().slices
    pair.send(request("b", 5, tokens_max=2))
    assert not pair.ask().slices
    pair.finish()
    assert pair.tokens == plain(request("a", 5, tokens_max=20), request("b", 5, tokens_max=2), sequences_max=1)


@pytest.mark.parametrize("blocks_max", [1, 2, 3, 5])
def test_a_full_pool_means_no_drafts(blocks_max: int) -> None:
    asked = [request(name, 6, tokens_max=24) for name in ("a", "b", "c")]
    pair = Pair(4, draft_blocks_max=blocks_max)
    pair.send(*asked)
    pair.finish()
    assert pair.tokens == plain(*asked)
    assert set(pair.reasons.values()) == {"length"}
    assert pair.speculator.pool.available == blocks_max


def test_the_context_of_the_draft_model_is_a_bound() -> None:
    pair = Pair(15, draft_context_max=16)
    pair.send(request("a", 5, tokens_max=40))
    pair.finish()
    assert pair.tokens == plain(request("a", 5, tokens_max=40))
    assert pair.plans and len(pair.plans) < 10  # FakeRunner asserts that no position is beyond it.


def test_preemption_and_abort_give_the_blocks_back() -> None:
    asked = [request(name, 10, tokens_max=24) for name in ("a", "b", "c")]
    pair = Pair(4, blocks_max=12)
    pair.send(*asked)
    preemptions = 0
    while pair.scheduler.has_work:
        preemptions += pair.step()[1].preemptions
        pair.scheduler.wishes()
        held = {one.number for one in pair.scheduler.running}
        assert set(pair.speculator._readings) <= held
    assert preemptions > 0
    assert pair.tokens == plain(*asked)
    pair.send(request("d", 10, tokens_max=24))
    pair.step()
    pair.step()
    assert pair.speculator.pool.available < 64
    pair.send(Abort("d"))
    assert pair.speculator.pool.available == 64


def test_numbers_that_are_none_end_the_questions_about_one_sequence() -> None:
    asked = [request("a", 5, tokens_max=16), request("bad", 5, tokens_max=16)]
    pair = Pair(3)
    pair.small.fault_of = lambda plan, piece: "NaN" if piece.sequence == 1 and plan.step_id == 1 else ""
    pair.send(*asked)
    pair.finish()
    assert pair.tokens == plain(*asked)
    assert sum(any(piece.sequence == 1 for piece in plan.slices) for plan in pair.plans) == 1
    assert sum(any(piece.sequence == 0 for piece in plan.slices) for plan in pair.plans) > 1


def test_a_draft_model_that_has_failed_is_not_asked_again() -> None:
    pair = Pair(3)
    pair.send(request("a", 5, tokens_max=16))
    pair.step()
    plan = pair.scheduler.wishes()
    assert plan.slices
    pair.scheduler.drafted(plan, DraftResult(failed=True))
    assert pair.speculator.pool.available == 64
    pair.finish()
    assert not pair.plans
    assert pair.tokens == plain(request("a", 5, tokens_max=16))


def test_texts_that_match_for_long_come_first() -> None:
    """The prompt repeats; the model goes on with it as long as the paper says."""
    found = play(copying(1, count=10, slips=0.0), streams=1, chance=0.9, share=0.3)
    assert found.speedup > 2.0
    assert found.draft_ns < 0.1 * found.spent_ns


LOSS_MAX = 0.03
LOSS_WILD_MAX = 0.1
USELESS = [(0.3, 0.2), (0.05, 0.1), (0.8, 1.0)]  # chance of a guess, cost of a pass


@pytest.mark.parametrize("noise", [still, usual, wild])
@pytest.mark.parametrize("streams", [1, 4])
def test_it_never_loses(streams: int, noise: Callable[[int], Noise]) -> None:
    """Too bad a model or too dear a one, at any load.  What it costs to find out is a share of the time."""
    for chance, share in USELESS:
        texts = deceiving(streams, count=16, run=2)
        found = play(texts, streams=streams, chance=chance, share=share, noise=noise(streams))
        assert found.speedup >= 1 - (LOSS_WILD_MAX if noise is wild else LOSS_MAX), (chance, share)


@pytest.mark.parametrize("noise", [still, usual])
def test_it_gains_where_the_draft_model_is_good_and_cheap(noise: Callable[[int], Noise]) -> None:
    texts = chatting(3, count=16)
    assert play(texts, streams=1, chance=0.85, share=0.1, noise=noise(1)).speedup > 1.5
    assert play(texts, streams=1, chance=0.6, share=0.2, noise=noise(1)).speedup > 1.1


def test_at_load_it_turns_itself_off() -> None:
    """32 rows are computed in proportion: the best draft model gains nothing."""
    found = play(deceiving(1, count=64, run=2), streams=32, chance=0.8, share=0.2)
    assert found.guessed < 0.02 * found.tokens
    assert found.speedup >= 1 - LOSS_MAX


def test_it_comes_back_when_the_load_has_gone() -> None:
    speculator = speculator_of()
    play(deceiving(1, count=64, run=2), streams=32, chance=0.85, share=0.1, speculator=speculator)
    later = deceiving(2, count=16, run=2)
    assert play(later, streams=1, chance=0.85, share=0.1, speculator=speculator).speedup > 1.4


def test_a_long_text_is_not_read_for_a_short_answer() -> None:
    prompt = list(range(3000))
    texts = [(prompt, [5000 + 40 * number + i for i in range(12)]) for number in range(20)]
    found = play(texts, streams=1, chance=0.9, share=0.1)
    assert found.speedup >= 1 - LOSS_MAX


def test_a_trial_waits_until_it_can_be_paid() -> None:
    costs = StepCosts()
    for _ in range(20):
        for rows in (1, 2, 4):
            costs.observe(rows, 0.1 * rows, 1_000_000)
    policy = PayingPolicy(costs)
    step = Step(streams=1, keys=0.1, rows=1, tokens=1.0, budget=100)
    one = Candidate(number=7, length=250, unread=250, said=1, count_max=9, chance=0.1)
    offers = []
    for _ in range(1000):
        offers.append(policy.offers([one], step))
        policy.stepped(1, 0.1, 1_000_000, guessed=0, accepted=0)
        if offers[-1]:
            policy.passed(250, 5.0, 25_000_000)  # as much as 25 steps
    asked = [index for index, offer in enumerate(offers) if offer]
    assert len(asked) == 1 and asked[0] > 100
    assert policy.balance_ns < 25_000_000


def test_a_short_prompt_is_tried_at_once() -> None:
    """Who names a draft model does not wait a thousand tokens for its first guess."""
    found = play([([1, 2, 3], list(range(100, 160)))], streams=1, chance=1.0, share=0.2)
    assert found.accepted > 10
