"""
A seeded world around the pure core: clients that come, change their minds and are in a hurry, and a device of hashes.

The simulator knows the truth that the core only records: when each request came, what each answer must be, how many
tokens were computed.  `Simulation(seed).run()` plays one world and checks after every step.
"""

import random
from collections.abc import Callable

import msgspec

from engine.api import Abort, Delta, Finish, GenerateRequest, Sampling
from engine.blocks import BlockPool
from engine.config import SchedulerConfig
from engine.device.drafting import DraftModel
from engine.device.fake import FakeRunner, next_token
from engine.draft_model import ModelSpeculator
from engine.journal import Applied, Committed, Entry, Notes, Planned
from engine.outcome import Outcome
from engine.plan import DraftResult, SampleSpec, Slice, StepPlan
from engine.scheduler import Scheduler
from engine.sequence import uniform
from engine.snapshot import Snapshot, capture
from engine.speculate import Speculation
from telemetry.records import RequestRecord
from tests.sim.guesses import Generous, Guesser
from tests.sim.sights import check_sight

STEPS_MAX = 20_000
STEP_NS_MAX = 5_000_000
TOTALS = ("prefill", "recompute", "cached", "emitted", "block_ns", "served_ns", "drafted", "accepted", "decode")


class FailingPool(BlockPool):
    """A pool whose N-th allocation fails as if it were empty (SQLite's way of testing)."""

    def __init__(self, *, blocks_max: int, block_slots: int, fails_at: int) -> None:
        super().__init__(blocks_max=blocks_max, block_slots=block_slots)
        self.fails_at = fails_at
        self.takes = 0

    def take(self, count: int) -> tuple[int, ...] | None:
        """Like the real one, but for one call."""
        self.takes += 1
        return None if self.takes == self.fails_at else super().take(count)


class Client:
    """One request as the simulator sees it."""

    def __init__(self, request: GenerateRequest, *, born_ns: int, abort_after_ns: int | None) -> None:
        self.request = request
        self.born_ns = born_ns
        self.abort_ns = None if abort_after_ns is None else born_ns + abort_after_ns
        self.tokens: list[int] = []
        self.accepted = False
        self.finish: Finish | None = None
        self.record: RequestRecord | None = None


class Simulation:
    """One world.  Same seed, same world."""

    def __init__(
        self,
        seed: int,
        *,
        fails_at: int | None = None,
        requests: int | None = None,
        pressure: bool = False,
        drafts: bool = False,
        model: bool = False,
        shares: bool = False,
        snapshots: float = 0.0,
    ) -> None:
        """`snapshots`: how often one stands in the journal, per step; one always begins it."""
        self.random, self.seed = random.Random(seed), seed
        pick = self.random
        self.config = _bounds(pick, pressure=pressure)
        self.patient, self.shares = pressure, random.Random(seed) if shares else None
        pool: BlockPool | None = None
        if fails_at is not None:
            pool = FailingPool(
                blocks_max=self.config.blocks_max, block_slots=self.config.block_slots, fails_at=fails_at
            )
        self.drafts_max = random.Random(seed).choice((1, 3, 15)) if drafts else 0
        self.drafter = self._draft_model(random.Random(seed)) if model else None
        self.scheduler = Scheduler(self.config, pool, self.guesser())
        self.device = FakeRunner(
            vocab_size=50,
            context_max=self.config.context_max,
            blocks_max=self.config.blocks_max,
            block_slots=self.config.block_slots,
            fault_of=self._fault_of,
        )
        self.now_ns = 1_000
        self.rush_ns = pick.choice((1, 10_000_000, 100_000_000))  # everybody comes within it
        self.journal: list[Entry] = []
        self.outcomes: list[Outcome] = []
        self.snapshots, self.photographer = snapshots, random.Random(seed)
        self._snapshot()
        self.faulty, self.index = set[int](), set[bytes]()  # sequence numbers; names that an index has been told
        self.totals = dict.fromkeys(TOTALS, 0)
        self.clients = [self._client(index) for index in range(requests or pick.choice((1, 5, 20, 60)))]
        self.arrivals = sorted(self.clients, key=lambda client: (client.born_ns, client.request.request_id))
        self.by_id = {client.request.request_id: client for client in self.clients}
        self.accept_order: list[Client] = []

    def run(self) -> "Simulation":
        """Play until everybody has an answer."""
        for _ in range(STEPS_MAX):
            self._deliver()
            if not self.scheduler.has_work and not self.scheduler.has_news:
                if not self.arrivals:
                    break
                self.now_ns = max(self.now_ns, self.arrivals[0].born_ns)
                continue
            self._step()
        else:
            raise AssertionError("the world did not come to an end: somebody waits for ever")
        self._reckon()
        return self

    def guesser(self) -> Speculation | None:
        """A fresh one, that guesses as the one of this world did."""
        if self.drafter is not None:
            return ModelSpeculator(self.config, Generous(self.seed))
        return Guesser(self.seed, drafts_max=self.drafts_max, vocab_size=50) if self.drafts_max else None

    def _step(self) -> None:
        before_ns = self.now_ns
        if self.drafter is not None:
            self._draft(self.drafter)
        plan = self.scheduler.plan(self.now_ns)
        held = sum(len(sequence.blocks) for sequence in self.scheduler.running)
        self.journal.append(Planned(self.notes.note(plan), self.now_ns))
        assert plan.tokens <= self.config.tokens_step_max
        self.scheduler.check()
        check_sight(self.scheduler, self.now_ns)
        self.now_ns += self.random.randrange(1, STEP_NS_MAX)
        aborts = not self.patient and self.random.random() < 0.2
        if aborts:
            held = self._abort_in_flight(held, before_ns)
        self.totals["block_ns"] += held * (self.now_ns - before_ns)
        result = self.device.run(plan)
        outcome = self.scheduler.commit(plan, result, self.now_ns)
        self.journal.append(Committed(result, self.now_ns, outcome.draft_rejected_share))
        self.outcomes.append(outcome)
        if self.photographer.random() < self.snapshots:
            self._snapshot()
        self.scheduler.check()
        check_sight(self.scheduler, self.now_ns)
        self._take(outcome)
        self._count_rows(plan, outcome, aborts=aborts)

    def _snapshot(self) -> None:
        """As a journal on disk would have it: what comes later does not change it."""
        encoded = msgspec.msgpack.encode(capture(self.scheduler))
        self.journal.append(msgspec.msgpack.decode(encoded, type=Snapshot))
        self.notes = Notes()

    def _draft_model(self, pick: random.Random) -> DraftModel:
        """The same hashes in a small pool of its own; sometimes there are no numbers."""
        self.config = msgspec.structs.replace(
            self.config,
            drafts_max=pick.choice((1, 3, 15)),
            draft_blocks_max=pick.choice((1, 3, 12, 64)),
            draft_context_max=pick.choice((20, self.config.context_max)),
        )
        device = FakeRunner(
            vocab_size=50,
            context_max=self.config.draft_context_max,
            blocks_max=self.config.draft_blocks_max,
            block_slots=self.config.block_slots,
            fault_of=lambda _plan, piece: "no numbers" if piece.sample and pick.random() < 0.01 else "",
        )
        return DraftModel(device, clock=lambda: 0)

    def _draft(self, drafter: DraftModel) -> None:
        """As the engine's loop does."""
        plan = self.scheduler.wishes()
        self.scheduler.check()
        if plan.slices:
            result = DraftResult(failed=True) if self.random.random() < 0.002 else drafter.draft(plan)
            self.scheduler.drafted(plan, result)
            self.scheduler.check()

    def _abort_in_flight(self, held: int, before_ns: int) -> int:
        """Somebody gives up while the step runs: what is given back may not be handed out before the commit."""
        running = self.scheduler.running
        if not running:
            return held
        victim = self.random.choice(running)
        at_ns = self.random.randrange(before_ns, self.now_ns + 1)
        self.totals["block_ns"] += len(victim.blocks) * (at_ns - before_ns)
        held -= len(victim.blocks)
        self._apply(Abort(victim.request.request_id), at_ns)
        assert self.scheduler.pool.book().imbalance() == 0
        return held

    def _count_rows(self, plan: StepPlan, outcome: Outcome, *, aborts: bool) -> None:
        """Every row has one reason, but for those of somebody who has left meanwhile."""
        known = outcome.prefill_tokens + outcome.recompute_tokens + outcome.decode_tokens
        if aborts:
            assert known + outcome.drafted_tokens <= plan.tokens
        else:
            assert known + outcome.drafted_tokens == plan.tokens
            assert outcome.drafted_tokens == sum(piece.drafts for piece in plan.slices)
        assert 0 <= outcome.draft_rejected_share < 1
        for sequence in self.scheduler.running:
            known = -(-len(sequence.tokens) // self.config.block_slots)
            assert len(sequence.blocks) <= known, "a draft has left a block behind"

    def _take(self, outcome: Outcome) -> None:
        totals = self.totals
        totals["decode"] += outcome.decode_tokens
        totals["drafted"] += outcome.drafted_tokens
        totals["accepted"] += outcome.draft_accepted_tokens
        totals["prefill"] += outcome.prefill_tokens
        totals["recompute"] += outcome.recompute_tokens
        totals["cached"] += outcome.cached_tokens
        totals["emitted"] += outcome.emitted_tokens
        totals["served_ns"] += outcome.served_ns
        assert sum(outcome.waits.values()) == len(self.scheduler.waiting)
        assert outcome.kv.imbalance() == 0
        everybody = [*self.scheduler.running, *self.scheduler.waiting]
        assert outcome.load.owed_tokens == sum(len(one.tokens) - one.computed for one in everybody)
        assert outcome.load.running + outcome.load.waiting == len(everybody)
        assert outcome.load.used_slots == outcome.kv.total - outcome.kv.free - outcome.kv.cached_idle
        if outcome.prefixes is not None:
            assert outcome.prefixes.lost == 0
            self.index = (self.index | set(outcome.prefixes.here)) - set(outcome.prefixes.gone)
        assert self.index == self.scheduler.pool.prefixes._indexed
        assert outcome.kv.fenced == 0, "nothing is in flight after a commit"
        assert len({delta.request_id for delta in outcome.deltas}) == len(outcome.deltas)
        for record in outcome.finished:
            client = self.by_id[record.request_id]
            assert client.record is None, "two records of one request"
            client.record = record
        for delta in outcome.deltas:
            self._hear(delta)

    def _hear(self, delta: Delta) -> None:
        client = self.by_id[delta.request_id]
        assert client.finish is None, "news after the end"
        client.accepted = True
        client.tokens += delta.tokens
        client.finish = delta.finish

    def _deliver(self) -> None:
        while self.arrivals and self.arrivals[0].born_ns <= self.now_ns:
            client = self.arrivals.pop(0)
            self.accept_order.append(client)
            if self.random.random() < 0.05:
                self.faulty.add(len(self.accept_order) - 1)
            client.born_ns = self.now_ns  # A step was running: the core sees it only now.
            self._apply(client.request, self.now_ns)
        for client in self.accept_order:
            if client.abort_ns is not None and client.abort_ns <= self.now_ns:
                client.abort_ns = None
                self._apply(Abort(client.request.request_id), self.now_ns)
                if self.random.random() < 0.3:  # Aborts are idempotent.
                    self._apply(Abort(client.request.request_id), self.now_ns)

    def _apply(self, message: GenerateRequest | Abort, now_ns: int) -> None:
        self.journal.append(Applied(message, now_ns))
        self.scheduler.apply(message, now_ns)

    def _fault_of(self, _plan: StepPlan, piece: Slice) -> str:
        return "no numbers" if piece.sequence in self.faulty and piece.sample is not None else ""

    def _client(self, index: int) -> Client:
        pick = self.random
        room = self.config.sequence_tokens_max
        output = pick.randrange(1, max(2, room // pick.choice((1, 2, 4))))
        total = room - output if pick.random() < 0.95 else room  # One in twenty asks for more than there is.
        length = pick.choice((0, 1, total // 3, total // 2, total, pick.randrange(total + 1)))
        shared = [7] * (pick.randrange(length + 1) if pick.random() < 0.5 else 0)
        request = GenerateRequest(
            request_id=f"r{index}",
            prompt=tuple(shared + [pick.randrange(50) for _ in range(length - len(shared))]),
            sampling=Sampling(temperature=pick.choice((0.0, 1.0)), seed=pick.randrange(1 << 40)),
            tokens_max=output,
            tokens_min=pick.choice((0, 0, 4)),
            stop_ids=pick.choice(((), (2,), (2, 3))),
            priority=pick.randrange(-5, 6) if self.patient else pick.choice((0, 0, 0, 1, -1)),
            tenant=pick.choice(("a", "b")),
            deadline_s=0.0 if self.patient else pick.choice((0.0, 0.0, 0.0, 0.0, 0.02, 0.2)),
            share=self.shares.choice("abc") if self.shares else "",
            weight=self.shares.choice((1, 1, 3, 1000)) if self.shares else 1,
        )
        if self.patient:
            return Client(request, born_ns=pick.randrange(0, self.rush_ns), abort_after_ns=None)
        patience_ns = pick.choice((*[None] * 9, 0, 1_000_000, 60_000_000))
        return Client(request, born_ns=pick.randrange(0, self.rush_ns), abort_after_ns=patience_ns)

    # ---- the truth, compared at the end

    def _reckon(self) -> None:
        for number, client in enumerate(self.accept_order):
            self._reckon_one(number, client)
        records = [client.record for client in self.clients if client.record]
        assert len(records) == len(self.clients)
        assert sum(record.computed_tokens for record in records) == self.totals["prefill"]
        assert sum(record.recomputed_tokens for record in records) == self.totals["recompute"]
        assert sum(record.cached_tokens for record in records) == self.totals["cached"]
        assert sum(record.output_tokens for record in records) == self.totals["emitted"]
        assert sum(record.drafted_tokens for record in records) == self.totals["drafted"]
        assert sum(record.draft_accepted_tokens for record in records) == self.totals["accepted"]
        assert all(one.drafted_tokens == one.draft_accepted_tokens + one.draft_rejected_tokens for one in records)
        assert sum(record.kv_block_ns for record in records) == self.totals["block_ns"]
        assert sum(record.engine_ns for record in records) == self.totals["served_ns"]
        assert all(record.preemptions <= self.config.preemptions_max for record in records)
        book = self.scheduler.pool.book()
        assert book.free + book.cached_idle == book.total, "blocks are held for nobody"
        assert self.scheduler.waiting.books == {}, "accounts are kept for nobody"

    def _reckon_one(self, number: int, client: Client) -> None:
        request, record, finish = client.request, client.record, client.finish
        assert record is not None and finish is not None, f"{request.request_id} was left without an answer"
        assert record.imbalance() == 0 and record.part_imbalance() == 0
        assert sum(record.stalled_for.values()) == record.states.get("stalled", 0)
        assert record.request_id not in record.stalled_for, "it stalled for itself"
        assert record.accepted_ns == client.born_ns
        assert record.outcome == finish.reason
        assert record.output_tokens == len(client.tokens) == finish.usage.output_tokens
        assert client.tokens == self.expected(client, len(client.tokens)), "these are not the tokens of the model"
        if client.tokens:
            assert record.cached_tokens + record.computed_tokens == record.prompt_tokens == len(request.prompt)
        match finish.reason:
            case "stop":
                assert client.tokens[-1] in request.stop_ids
                assert len(client.tokens) > request.tokens_min
            case "length":
                assert len(client.tokens) == request.tokens_max
            case "failed":
                assert number in self.faulty
            case "refused":
                total = len(request.prompt) + request.tokens_max
                assert not request.prompt or total > self.config.sequence_tokens_max
            case "deadline":
                assert request.deadline_s > 0
                assert record.finished_ns - record.accepted_ns >= request.deadline_s * 1e9
            case other:
                assert other in ("abort", "overloaded")
        assert not any(token in request.stop_ids for token in client.tokens[:-1])

    def expected(self, client: Client, count: int) -> list[int]:
        """What the model says to this prompt, alone in the world."""
        request = client.request
        known = list(request.prompt)
        for index in range(count):
            banned = request.stop_ids if index < request.tokens_min else ()
            number = uniform(request.sampling.seed, len(known))
            spec = SampleSpec(sampling=request.sampling, uniforms=(number,), banned=banned)
            known.append(next_token(known, spec, vocab_size=50))
        return known[len(request.prompt) :]


def _bounds(pick: random.Random, *, pressure: bool) -> SchedulerConfig:
    """Of a world."""
    config = SchedulerConfig(
        blocks_max=pick.choice((2, 5, 8, 12, 20, 64)),
        block_slots=pick.choice((1, 2, 4, 16)),
        context_max=pick.choice((24, 64, 200)),
        sequences_max=pick.choice((1, 2, 4, 16)),
        tokens_step_max=pick.choice((1, 3, 8, 32, 128)),
        waiting_max=pick.choice((4, 16, 64)),
        bypass_max=pick.choice((0, 1, 4)),
        preemptions_max=pick.choice((0, 1, 3)),
        vocab_size=50,
        prefix_cache=pick.random() < 0.8,
    )
    if pressure:  # Everybody fits alone and nobody beside the others: preemptions without end, if they had none.
        return msgspec.structs.replace(
            config,
            blocks_max=pick.randrange(6, 40),
            block_slots=1,
            sequences_max=16,
            tokens_step_max=64,
            waiting_max=64,
            preemptions_max=pick.choice((1, 2)),
        )
    return config


def explain(seed: int, play: Callable[[], object], **options: int | bool | None) -> None:
    """Run `play`; a failure ends with the one command line that reproduces it."""
    try:
        play()
    except BaseException as error:
        given = {name.replace("_", "-"): value for name, value in options.items() if value not in (None, False)}
        flags = "".join(f" --{name}" if value is True else f" --{name} {value}" for name, value in given.items())
        error.add_note(f"reproduce: python -m tests.sim --seed {seed}{flags}")
        raise
