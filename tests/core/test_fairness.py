"""
Shares of the queue, held against the paper: its algorithm in a few plain lines, and its bound.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.api import Abort, GenerateRequest, Sampling
from engine.config import SchedulerConfig
from engine.device.fake import FakeRunner
from engine.fairness import OUTPUT_COST, UNITS, FairQueue
from engine.plan import StepPlan
from engine.scheduler import Scheduler
from engine.sequence import Sequence, Status

SHARES = "abcd"
WEIGHTS = (1, 2, 4, 5)
"""Divisors of UNITS: our integers are then the fractions of the paper."""
VOCAB = 100


def ask(number: int, share: str, prompt: int, output: int = 1, weight: int = 1, priority: int = 0) -> GenerateRequest:
    """A request whose prompt nobody else has."""
    return GenerateRequest(
        request_id=f"r{number}",
        prompt=tuple((number * 31 + i * (number + 1)) % VOCAB for i in range(prompt)),
        sampling=Sampling(temperature=0),
        tokens_max=output,
        share=share,
        weight=weight,
        priority=priority,
    )


@dataclass
class Paper:
    """Algorithm 2 for one class, word by word: counters, the queue Q, and the client that left Q last."""

    counters: dict[str, Fraction] = field(default_factory=dict)
    queue: list[GenerateRequest] = field(default_factory=list)
    last: str = ""
    here: int = 0

    def arrive(self, request: GenerateRequest, *, again: bool = False) -> None:
        share, active = request.share, {one.share for one in self.queue}
        self.counters.setdefault(share, Fraction(0))
        if share not in active and self.queue:
            self.counters[share] = max(self.counters[share], min(self.counters[one] for one in active))
        elif share not in active and self.last:
            self.counters[share] = max(self.counters[share], self.counters[self.last])
        self.queue.append(request)
        self.queue.sort(key=lambda one: int(one.request_id[1:]))
        self.here += not again

    def next(self, tried: list[GenerateRequest]) -> GenerateRequest | None:
        left = [one for one in self.queue if one not in tried]
        return min(left, key=lambda one: (self.counters[one.share], int(one.request_id[1:])), default=None)

    def leave(self, request: GenerateRequest, charged: int = 0) -> None:
        self.queue.remove(request)
        self.last = request.share
        self.serve(request, charged)

    def serve(self, request: GenerateRequest, charged: int) -> None:
        self.counters[request.share] += Fraction(charged, request.weight)

    def end(self) -> None:
        self.here -= 1
        if not self.here:  # Ours: with nobody here, all begin anew.
            self.counters, self.last = {}, ""


class Pair:
    """The queue and the paper's, driven alike."""

    def __init__(self) -> None:
        self.queue, self.papers = FairQueue(), dict[int, Paper]()
        self.sequences: list[Sequence] = []  # all that are here

    @property
    def running(self) -> list[Sequence]:
        return [one for one in self.sequences if one.status is Status.RUNNING]

    def arrive(self, request: GenerateRequest, number: int) -> None:
        self.sequences.append(Sequence(request, number=number, now_ns=0))
        self.queue.add(self.sequences[-1])
        self.papers.setdefault(request.priority, Paper()).arrive(request)

    def round(self, fits: list[bool]) -> None:
        """One plan: some fit, some do not."""
        papers = [paper for _, paper in sorted(self.papers.items())]
        tried: list[GenerateRequest] = []
        for sequence in self.queue.turns():
            expected = next(one for one in (paper.next(tried) for paper in papers) if one is not None)
            assert sequence.request is expected
            tried.append(expected)
            if fits[len(tried) % len(fits)]:
                cost = 0 if sequence.preemptions else len(expected.prompt)
                self.queue.admit(sequence, len(expected.prompt))
                sequence.status = Status.RUNNING
                self.papers[expected.priority].leave(expected, cost)
        assert all(paper.next(tried) is None for paper in papers)

    def act(self, action: str, index: int, amount: int) -> None:
        """Something happens to one of those that wait or run."""
        candidates = [one for one in self.sequences if (one.status is Status.RUNNING) == (action != "abort")]
        if not candidates:
            return
        sequence = candidates[index % len(candidates)]
        request, paper = sequence.request, self.papers[sequence.request.priority]
        if action == "emit":
            self.queue.emitted(sequence, amount)
            paper.serve(request, OUTPUT_COST * amount)
        elif action == "preempt":
            sequence.preemptions += 1
            sequence.status = Status.WAITING
            self.queue.add(sequence)
            paper.arrive(request, again=True)
        else:
            if action == "abort":
                self.queue.remove(sequence)
                paper.leave(request)
            self.sequences.remove(sequence)
            self.queue.end(sequence)
            paper.end()


ARRIVALS = st.tuples(
    st.just("arrive"),
    st.sampled_from(SHARES),
    st.integers(1, 30),
    st.sampled_from(WEIGHTS),
    st.sampled_from((0, 0, 0, 1)),
)
ROUNDS = st.tuples(st.just("round"), st.lists(st.booleans(), min_size=1, max_size=4))
ACTIONS = st.tuples(st.sampled_from(("emit", "end", "preempt", "abort")), st.integers(0, 50), st.integers(1, 20))


@settings(max_examples=200, deadline=None)
@given(st.lists(ARRIVALS | ROUNDS | ACTIONS, max_size=60))
def test_turns_are_those_of_the_paper(events: list[tuple[object, ...]]) -> None:
    """Also where we forget shares, and the paper none."""
    pair = Pair()
    for number, event in enumerate(events):
        match event:
            case ("arrive", str(share), int(prompt), int(weight), int(priority)):
                pair.arrive(ask(number, share, prompt, weight=weight, priority=priority), number)
            case ("round", list(fits)):
                pair.round(fits)
            case (str(action), int(index), int(amount)):
                pair.act(action, index, amount)
        pair.queue.check(pair.running)
        for priority, book in pair.queue.books.items():
            counters = pair.papers[priority].counters
            assert all(one.units == counters[share] * UNITS for share, one in book.accounts.items())
    pair.round([True])
    while pair.running:
        pair.act("end", 0, 0)
    assert pair.queue.books == {}


class World:
    """A scheduler with room for everybody's keys and values, stepped by hand; what it serves is counted."""

    def __init__(self, places: int, *, blocks_max: int = 400, tokens_step_max: int = 100_000) -> None:
        self.config = SchedulerConfig(
            blocks_max=blocks_max,
            block_slots=4,
            context_max=400,
            sequences_max=places,
            waiting_max=4000,
            tokens_step_max=tokens_step_max,
            vocab_size=VOCAB,
        )
        self.scheduler = Scheduler(self.config)
        self.device = FakeRunner(vocab_size=VOCAB, context_max=400, blocks_max=blocks_max, block_slots=4)
        self.requests: list[GenerateRequest] = []
        self.by_id: dict[str, GenerateRequest] = {}
        self.began: dict[int, GenerateRequest] = {}  # by number, in order of admission
        self.ended: dict[str, int] = {}  # request id -> step
        self.served: Counter[str] = Counter()  # by share: computed prompt tokens and output ones, weighed
        self.steps = 0

    def send(self, *requests: GenerateRequest) -> None:
        for request in requests:
            self.requests.append(request)
            self.by_id[request.request_id] = request
            self.scheduler.apply(request, self.steps)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.steps)
        for piece in plan.slices:
            request = self.requests[piece.sequence]
            if piece.sequence not in self.began:
                self.began[piece.sequence] = request
                self.served[request.share] += len(request.prompt) - piece.start
        self.steps += 1
        outcome = self.scheduler.commit(plan, self.device.run(plan), self.steps)
        self.scheduler.check()
        for delta in outcome.deltas:
            self.served[self.by_id[delta.request_id].share] += OUTPUT_COST * len(delta.tokens)
            if delta.finish is not None:
                self.ended[delta.request_id] = self.steps
        return plan

    def run(self) -> Iterator[set[str]]:
        """Step after step, until nothing is left; the shares that wait behind each."""
        while self.scheduler.has_work or self.scheduler.has_news:
            self.step()
            yield {one.request.share for one in self.scheduler.waiting}


def spread(gaps: list[Fraction]) -> Fraction:
    """The greatest difference of service over any interval: how far their running difference goes up or down."""
    return max(gaps) - min(gaps)


ASKED = st.tuples(st.sampled_from("ab"), st.integers(1, 40), st.integers(1, 12))


def gaps_of(world: World, weights: dict[str, int]) -> list[Fraction]:
    """What a was served more than b, by weight, as long as both wait."""
    gaps = [Fraction(0)]
    for waiting in world.run():
        if waiting != {"a", "b"}:
            break
        gaps.append(Fraction(world.served["a"], weights["a"]) - Fraction(world.served["b"], weights["b"]))
    return gaps


@settings(max_examples=50, deadline=None)
@example([("a", 40, 12)] * 20 + [("b", 1, 1)] * 20, 1, 1)  # By arrival b would wait for all of a.
@given(st.lists(ASKED, min_size=20, max_size=50), st.integers(1, 6), st.sampled_from(WEIGHTS))
def test_the_difference_of_service_has_the_bound_of_the_paper(
    asked: list[tuple[str, int, int]], places: int, weight: int
) -> None:
    """
    Between two that wait all the time: 2 max(w_p L, w_q M), M being the tokens of a full batch.

    Ours is below it: from when a share had least, one prompt and what its requests in the batch have yet to say.
    """
    weights = {"a": 1, "b": weight}
    prompts, outputs = max(prompt for _, prompt, _ in asked), max(output for _, _, output in asked)
    bound = 2 * (prompts + OUTPUT_COST * places * outputs)
    assert bound <= 2 * max(prompts, OUTPUT_COST * places * (prompts + outputs))
    world = World(places)
    for number, (share, prompt, output) in enumerate(asked):
        world.send(ask(number, share, prompt, output, weights[share]))
    assert spread(gaps_of(world, weights)) <= bound


@pytest.mark.parametrize("weight", [1, 3])
def test_who_both_wait_get_tokens_by_weight(weight: int) -> None:
    """The one asks for much more at a time; only the weight counts."""
    world, weights = World(4), {"a": 1, "b": weight}
    world.send(*(ask(number, "a", 90, 30) for number in range(100)))
    world.send(*(ask(number, "b", 5, 3, weight) for number in range(100, 700)))
    for waiting in world.run():
        if waiting != set(weights) or world.steps > 500:
            break
    assert sum(world.served.values()) > 5000, "not long enough to say so"
    assert world.served["b"] / world.served["a"] == pytest.approx(weight, rel=0.05)


def test_one_share_goes_by_arrival() -> None:
    world = World(2)
    world.send(*(ask(number, "a", 1 + number * 7 % 40, 1 + number % 5) for number in range(40)))
    for _ in world.run():
        pass
    assert list(world.began.values()) == world.requests


@pytest.mark.parametrize("served_before", [False, True])
def test_having_been_idle_is_no_credit(served_before: bool) -> None:
    world = World(1)
    if served_before:
        world.send(ask(0, "b", 5, 1))
    world.send(*(ask(number, "a", 20, 5) for number in range(1, 41)))
    for _ in range(100):
        world.step()
    assert world.served["a"] > 500, "b has had next to nothing, and is far behind"
    before = world.served.copy()
    world.send(*(ask(number, "b", 20, 5) for number in range(100, 140)))
    while world.served["b"] - before["b"] < 300:
        world.step()
    assert world.served["a"] - before["a"] == pytest.approx(300, abs=2 * 30)


def test_a_debt_is_not_forgotten_by_leaving() -> None:
    """Who was served beyond the others does not begin anew with the next request."""
    world = World(2)
    world.send(ask(0, "a", 5, 200), ask(1, "b", 5, 1), *(ask(number, "b", 10, 10, 4) for number in range(2, 100)))
    while "r0" not in world.ended:
        world.step()
    world.send(ask(100, "a", 5, 1))
    began = len(world.began)
    while len(world.requests) - 1 not in world.began:
        world.step()
    assert len(world.began) - began > 20, "a has had 405, b not half of it by weight"


@pytest.mark.parametrize("shares", [True, False])
def test_a_flood_of_one_does_not_delay_the_single_request_of_another(shares: bool) -> None:
    """It waits for one place, at most; without shares it waits for all of the flood."""
    world = World(4, tokens_step_max=64)
    world.send(*(ask(number, "flood", 100, 20) for number in range(60)))
    for _ in range(50):
        world.step()
    single, sent = ask(900, "single" if shares else "flood", 10, 1), world.steps
    world.send(single)
    while single.request_id not in world.ended:
        world.step()
    a_place_and_a_prompt = 20 + 2 * (-(-100 // 60))
    assert (world.steps - sent <= a_place_and_a_prompt) == shares


def test_priority_goes_before_any_share() -> None:
    world = World(1)
    world.send(*(ask(number, "a", 20, 2, priority=-1) for number in range(10)), ask(10, "b", 1, 1, weight=1000))
    for _ in world.run():
        pass
    assert list(world.began)[-1] == 10


def test_what_is_cached_does_not_count() -> None:
    world = World(1)
    prompt = tuple(range(41))
    alike = [
        GenerateRequest(request_id=f"a{i}", prompt=prompt, sampling=Sampling(), tokens_max=1, share="a")
        for i in range(20)
    ]
    world.send(*alike, *(ask(number, "b", 41, 1) for number in range(20, 40)))
    for waiting in world.run():
        if waiting != {"a", "b"}:
            break
    counts = Counter(request.share for request in world.began.values())
    assert counts["a"] > 5 * counts["b"]
    assert world.served["a"] == pytest.approx(world.served["b"], abs=2 * 43)


@pytest.mark.parametrize("weight", [0, -1, 1001])
def test_an_impossible_weight_is_refused_at_the_door(weight: int) -> None:
    world = World(1)
    world.send(ask(0, "a", 5, weight=weight))
    finish = world.scheduler.commit(plan := world.scheduler.plan(0), world.device.run(plan), 1).deltas[0].finish
    assert finish is not None and finish.fault is not None
    assert (finish.reason, finish.fault.param) == ("refused", "weight")


def test_shares_that_are_here_no_longer_are_forgotten() -> None:
    world = World(2)
    world.send(*(ask(number, "flood", 20, 5) for number in range(100)))
    most = 0
    for number in range(1000, 1200):
        world.send(ask(number, f"once{number}", 3, 2))
        world.step()
        if number % 7 == 0:
            world.scheduler.apply(Abort(f"r{number}"), world.steps)
        most = max(most, len(world.scheduler.waiting.books[0].accounts))
        everybody = len(world.scheduler.waiting) + len(world.scheduler.running)
        assert len(world.scheduler.waiting.books[0].accounts) <= everybody
    assert most > 10, "some wait"
    for _ in world.run():
        pass
    assert world.scheduler.waiting.books == {}


def test_of_too_many_debtors_those_who_owe_most_are_remembered() -> None:
    queue = FairQueue(debtors_max=3)
    queue.add(Sequence(ask(0, "waits", 1), number=0, now_ns=0))
    for number in range(1, 11):
        sequence = Sequence(ask(number, f"s{number}", 1), number=number, now_ns=0)
        queue.add(sequence)
        queue.admit(sequence, 100 - number)
        queue.end(sequence)
        queue.check([])
    assert list(queue.books[0].accounts) == ["waits", "s1", "s2", "s3"]
