"""
The scheduler's promises, one at a time.  The device is one of hashes: only it decides what the tokens are.
"""

from engine.api import Abort, Delta, GenerateRequest, Sampling, indexed_names, indexed_tokens
from engine.config import SchedulerConfig
from engine.device.fake import FakeRunner
from engine.outcome import Outcome
from engine.plan import StepPlan
from engine.scheduler import Scheduler


def request(request_id: str, prompt: int | tuple[int, ...] = 5, **fields: object) -> GenerateRequest:
    """A request with a prompt of its own, or with these tokens."""
    tokens = prompt if isinstance(prompt, tuple) else tuple((hash_of(request_id) + i) % 90 for i in range(prompt))
    defaults: dict[str, object] = {"sampling": Sampling(temperature=0), "tokens_max": 4}
    return GenerateRequest(request_id=request_id, prompt=tokens, **(defaults | fields))  # type: ignore[arg-type]


def hash_of(text: str) -> int:
    """Small, and the same on every run."""
    return sum(text.encode())


class World:
    """A scheduler and a device, stepped by hand; one step takes one millisecond."""

    def __init__(self, **bounds: int) -> None:
        defaults = {"blocks_max": 64, "block_slots": 4, "context_max": 128, "vocab_size": 100}
        self.config = SchedulerConfig(**(defaults | bounds))  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config)
        self.device = FakeRunner(
            vocab_size=100, context_max=128, blocks_max=self.config.blocks_max, block_slots=self.config.block_slots
        )
        self.now_ns = 0
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Delta] = {}

    def send(self, *messages: GenerateRequest | Abort) -> None:
        for message in messages:
            self.scheduler.apply(message, self.now_ns)

    def step(self) -> tuple[StepPlan, Outcome]:
        plan = self.scheduler.plan(self.now_ns)
        self.now_ns += 1_000_000
        outcome = self.scheduler.commit(plan, self.device.run(plan), self.now_ns)
        self.scheduler.check()
        for delta in outcome.deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.tokens)
            if delta.finish:
                self.ends[delta.request_id] = delta
        return plan, outcome

    def finish(self) -> None:
        while self.scheduler.has_work or self.scheduler.has_news:
            self.step()

    def reason(self, request_id: str) -> str:
        finish = self.ends[request_id].finish
        assert finish is not None
        return finish.reason


def test_a_long_prompt_does_not_hold_up_those_who_decode() -> None:
    world = World(tokens_step_max=8)
    world.send(request("short", 3, tokens_max=30))
    world.step()
    world.send(request("long", 80))
    for _ in range(8):
        plan, outcome = world.step()
        assert plan.tokens <= 8
        assert any(delta.request_id == "short" and delta.tokens for delta in outcome.deltas)


def test_a_prompt_is_computed_in_chunks_and_samples_once() -> None:
    world = World(tokens_step_max=8)
    world.send(request("long", 20))
    plans = [world.step()[0] for _ in range(3)]
    assert [plan.tokens for plan in plans] == [8, 8, 4]
    assert [piece.sample is not None for plan in plans for piece in plan.slices] == [False, False, True]


def test_tokens_are_the_same_whatever_the_chunks_the_batch_and_the_cache() -> None:
    alone = World()
    alone.send(request("a", 30, tokens_max=20))
    alone.finish()
    crowd = World(tokens_step_max=7, blocks_max=14)
    crowd.send(*(request(name, 30, tokens_max=20) for name in ("b", "a", "c")))
    crowd.finish()
    assert crowd.tokens["a"] == alone.tokens["a"]
    alone.send(request("again", alone_prompt := request("a", 30).prompt, tokens_max=20))
    alone.finish()
    assert alone.tokens["again"] == alone.tokens["a"]
    assert len(alone_prompt) == 30


def test_an_output_is_resumed_to_the_same_end() -> None:
    whole = World()
    whole.send(request("a", 10, tokens_max=12, sampling=Sampling(temperature=1.0, seed=7)))
    whole.finish()
    resumed = World()
    prompt = request("a", 10).prompt
    for emitted in range(12):
        tokens = (*prompt, *whole.tokens["a"][:emitted])
        sampling = Sampling(temperature=1.0, seed=7)
        resumed.send(request(f"try{emitted}", tokens, tokens_max=12, resume=emitted, sampling=sampling))
        resumed.finish()
        assert resumed.tokens[f"try{emitted}"] == whole.tokens["a"][emitted:]
        finish = resumed.ends[f"try{emitted}"].finish
        assert finish is not None and finish.usage.prompt_tokens == 10 and finish.usage.output_tokens == 12


def test_a_finished_prompt_stays_cached_for_its_tenant_and_for_nobody_else() -> None:
    world = World()
    prompt = tuple(range(20))
    for name, tenant, expected in (("first", "a", 0), ("same", "a", 16), ("other", "b", 0), ("again", "b", 16)):
        world.send(request(name, prompt, tenant=tenant))
        world.finish()
        finish = world.ends[name].finish
        assert finish is not None
        assert finish.usage.cached_tokens == expected, name


def test_the_end_of_a_cached_chain_is_given_up_before_its_beginning() -> None:
    world = World(blocks_max=8)
    prompt = tuple(range(21))
    world.send(request("first", prompt, tokens_max=1))
    world.finish()
    world.send(request("other", 14, tokens_max=2))  # Needs four blocks; three are empty.
    world.finish()
    world.send(request("again", prompt, tokens_max=1))
    world.finish()
    finish = world.ends["again"].finish
    assert finish is not None and finish.usage.cached_tokens == 16


def test_aborts_are_idempotent_in_every_state() -> None:
    world = World(sequences_max=1, tokens_step_max=8)
    world.send(Abort("unknown"))
    world.send(request("running", 20), request("queued", 20))
    world.step()  # in prefill
    world.send(Abort("running"), Abort("running"), Abort("queued"))
    _, outcome = world.step()
    assert {record.request_id: record.outcome for record in outcome.finished} == {"running": "abort", "queued": "abort"}
    world.send(Abort("running"))
    assert not world.scheduler.has_news
    world.send(request("decoding", 3, tokens_max=50))
    world.step()
    world.step()
    world.send(Abort("decoding"))
    world.step()
    assert world.reason("decoding") == "abort"
    book = world.scheduler.pool.book()
    assert book.free + book.cached_idle == book.total


def test_what_an_aborted_request_has_computed_stays_cached() -> None:
    world = World(tokens_step_max=8)
    prompt = tuple(range(40))
    world.send(request("gone", prompt))
    world.step()
    world.step()
    world.send(Abort("gone"))  # In prefill, after 16 tokens.
    world.send(request("again", prompt))
    world.finish()
    finish = world.ends["again"].finish
    assert finish is not None and finish.usage.cached_tokens == 16


def test_an_abort_in_flight_fences_the_blocks_until_the_commit() -> None:
    world = World()
    world.send(request("a", 6))
    plan = world.scheduler.plan(0)
    world.send(Abort("a"))
    assert world.scheduler.pool.book().fenced == 2 * 4
    world.scheduler.commit(plan, world.device.run(plan), 1)
    assert world.scheduler.pool.book().free == world.scheduler.pool.book().total


def test_impossible_requests_are_refused_at_once_and_others_go_on() -> None:
    world = World(blocks_max=8, context_max=64)
    world.send(
        request("good", 5),
        request("long", 65),
        request("greedy", 5, tokens_max=60),
        request("pool", 20, tokens_max=13),
        request("empty", ()),
        request("token", (100,)),
        request("negative", (-1,)),
        request("bias", 5, sampling=Sampling(logit_bias={100: 1.0})),
        request("nan", 5, sampling=Sampling(temperature=float("nan"))),
        request("infinite", 5, sampling=Sampling(logit_bias={1: float("inf")})),
        request("none", 5, tokens_max=0),
    )
    world.finish()
    assert world.reason("good") == "length"
    faults = {name: end.finish.fault for name, end in world.ends.items() if end.finish and end.finish.fault}
    assert set(faults) == set(world.ends) - {"good"}
    assert faults["pool"].code == "context_length_exceeded"
    assert "32 tokens" in faults["pool"].message and "33" in faults["pool"].message
    assert faults["bias"].param == "logit_bias"
    assert faults["nan"].param == "temperature"


def test_a_full_queue_refuses_the_newcomer_only() -> None:
    world = World(waiting_max=2, sequences_max=1)
    world.send(request("a"))
    world.step()
    world.send(request("b"), request("c"), request("d"))
    world.finish()
    assert [world.reason(name) for name in "abcd"] == ["length", "length", "length", "overloaded"]


def test_what_the_next_step_would_take_in_is_no_queue() -> None:
    world = World(waiting_max=1, sequences_max=8)
    world.send(*(request(f"r{index}") for index in range(10)))
    world.finish()
    assert [world.reason(f"r{index}") for index in range(10)] == ["length"] * 9 + ["overloaded"]


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    world = World(sequences_max=1)
    world.send(request("running", 5, tokens_max=100, deadline_s=0.005), request("queued", 5, deadline_s=0.002))
    world.finish()
    assert world.reason("running") == world.reason("queued") == "deadline"
    assert 4 <= len(world.tokens["running"]) <= 5


def test_the_head_of_the_queue_is_overtaken_only_so_often() -> None:
    world = World(blocks_max=10, bypass_max=2)
    world.send(request("holder", 3, tokens_max=30))
    world.step()
    world.send(request("big", 38, tokens_max=2), *(request(f"small{i}", 2, tokens_max=2) for i in range(6)))
    _, outcome = world.step()
    assert outcome.load.running == 1 + 2  # Two have passed.
    world.finish()
    assert all(world.reason(name) == "length" for name in ("big", "small5"))


def test_who_hears_all_news_of_the_prefix_cache_knows_what_will_be_found_there() -> None:
    world, index = World(), set[bytes]()
    long = tuple(range(90))

    def play(name: str, prompt: tuple[int, ...], tenant: str) -> int:
        """Tokens that an index would promise; the engine finds so many, and less than another indexed prefix more."""
        names = indexed_names(tenant, prompt, 4)
        promised = [*(one in index for one in names), False].index(False) * indexed_tokens(4)
        world.send(request(name, prompt, tenant=tenant))
        while world.scheduler.has_work or world.scheduler.has_news:
            news = world.step()[1].prefixes
            if news is not None:
                index.difference_update(news.gone)
                index.update(news.here)
        finish = world.ends[name].finish
        assert finish is not None
        assert promised <= finish.usage.cached_tokens < promised + indexed_tokens(4)
        return promised

    assert [play(f"a{turn}", long, "a") for turn in range(2)] == [0, 64]
    assert play("b", long, "b") == 0, "another tenant's"
    assert play("short", long[:64], "a") == 0, "one token is left to compute"
    for number in range(4):
        play(f"other{number}", tuple((number * 17 + i) % 90 for i in range(90)), "c")
    assert play("a-again", long, "a") == 0, "it has made room for others"


def test_a_fault_ends_one_sequence_and_its_neighbours_do_not_notice() -> None:
    world = World()
    world.device.fault_of = lambda _plan, piece: "NaN" if piece.sequence == 1 and piece.start > 4 else ""
    world.send(request("a", 5, tokens_max=8), request("bad", 5, tokens_max=8), request("c", 5, tokens_max=8))
    world.finish()
    assert [world.reason(name) for name in ("a", "bad", "c")] == ["length", "failed", "length"]
    assert len(world.tokens["a"]) == len(world.tokens["c"]) == 8


def test_what_a_failed_sequence_leaves_is_not_found_again() -> None:
    world = World()
    prompt = tuple(range(20))
    world.device.fault_of = lambda _plan, piece: "NaN" if piece.sequence == 0 and piece.start > 20 else ""
    world.send(request("bad", prompt, tokens_max=8))
    world.finish()
    world.send(request("again", prompt, tokens_max=8))
    world.finish()
    finish = world.ends["again"].finish
    assert world.reason("bad") == "failed"
    assert finish is not None and finish.reason == "length" and finish.usage.cached_tokens == 0


def test_stop_ids_end_and_are_not_sampled_before_tokens_min() -> None:
    world = World()
    every = tuple(range(0, 100, 3))
    world.send(request("early", 5, tokens_max=60, stop_ids=every))
    world.send(request("late", 5, tokens_max=60, stop_ids=every, tokens_min=20))
    world.finish()
    for name, least in (("early", 1), ("late", 21)):
        finish = world.ends[name].finish
        assert finish is not None and finish.reason == "stop"
        assert finish.stop_id == world.tokens[name][-1] in every
        assert len(world.tokens[name]) >= least
        assert not set(world.tokens[name][:-1]) & set(every)


def test_priority_goes_first() -> None:
    world = World(sequences_max=1)
    world.send(request("late", 5, priority=1), request("soon", 5, priority=-1))
    plan, _ = world.step()
    assert [piece.sequence for piece in plan.slices] == [1]


def test_stopping_ends_everything_with_a_reason() -> None:
    world = World(sequences_max=1)
    world.send(request("a"), request("b"))
    world.step()
    world.scheduler.stop(world.now_ns)
    world.step()
    assert world.reason("a") == world.reason("b") == "shutdown"
    assert not world.scheduler.has_work
