"""
The scheduler: which sequences pay how much of their token debt in the next step.

    apply(message, now)   take a request in, or abort one
    wishes(), drafted()   what a draft model, where there is one, is to guess before a plan, and what it has guessed
    plan(now)             choose slices within the step's token budget and the KV pool -> StepPlan
    commit(plan, result, now)   book what was computed, end what is done -> Outcome

Pure: same calls, same answers.  Between `plan` and `commit` the step is in flight; `apply` may still abort its
sequences, their blocks are then fenced until the commit.

Order is by priority, then by turns in the queue (engine.fairness), by arrival in the batch.  The victim of a preemption
is the batch's last, so the first one always gets on; after `preemptions_max` a sequence comes back only when its whole
need and everybody else's fit, and is then left alone.  So none is preempted for ever, and none waits for ever.
"""

from bisect import insort

from engine import admission, prefix
from engine.admission import door_fault
from engine.api import DEGENERATE, Abort, Delta, Fault, Finish, FinishReason, GenerateRequest, Message
from engine.blocks import BlockPool
from engine.config import SchedulerConfig
from engine.draft_model import NOTHING, ModelSpeculator, speculation_for
from engine.ending import ending_of
from engine.fairness import FairQueue
from engine.outcome import Outcome, Tally, load_of, merged, waits_of
from engine.plan import DraftPlan, DraftResult, Slice, SliceResult, StepPlan, StepResult
from engine.sequence import Sequence, Status, stamp
from engine.speculate import Speculation
from telemetry.records import KvBook, RequestRecord


class Scheduler:
    """Owns every sequence and every block."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool | None = None, speculation: Speculation | None = None
    ) -> None:
        self.config = config
        self.pool = pool or BlockPool(blocks_max=config.blocks_max, block_slots=config.block_slots)
        self.waiting = FairQueue()
        self.running: list[Sequence] = []  # in order
        self._by_id: dict[str, Sequence] = {}
        self._arrivals = 0
        self._step_id = 0
        self._in_flight: dict[int, Sequence] = {}  # of the step between plan and commit
        self._deltas: list[Delta] = []
        self._finished: list[RequestRecord] = []
        self._cached = self._preemptions = self._evictions_before = 0
        self._speculation = speculation or speculation_for(config)
        self._draft_model = self._speculation if isinstance(self._speculation, ModelSpeculator) else None
        self._decode_keys: float | None = None  # of the step in flight, if everybody decodes: thousands, over all rows
        self._planned_ns = 0

    @property
    def has_work(self) -> bool:
        """Whether there is anything to plan for."""
        return bool(self.waiting or self.running)

    @property
    def has_news(self) -> bool:
        """Whether somebody ought to be told something even if no step runs."""
        return bool(self._deltas or self._finished)

    def apply(self, message: Message, now_ns: int) -> None:
        """Take one message in.  Whatever it holds, nobody else is harmed."""
        match message:
            case Abort(request_id):
                sequence = self._by_id.get(request_id)
                if sequence is not None:
                    self._finish(sequence, "abort", now_ns)
            case GenerateRequest():
                self._arrive(message, now_ns)

    def wishes(self) -> DraftPlan:
        """What a draft model is to do before the next plan.  Nothing while prompts are computed or somebody waits."""
        if self._draft_model is None:
            return NOTHING
        scarce = bool(self.waiting) or self.pool.available < len(self.running)
        return self._draft_model.asks(self.running, 0 if scarce else self.config.tokens_step_max - len(self.running))

    def drafted(self, plan: DraftPlan, result: DraftResult) -> None:
        """The draft model has done what `wishes` said."""
        if self._draft_model is not None:
            self._draft_model.told(plan, result)

    def plan(self, now_ns: int) -> StepPlan:
        """Choose the next step.  It may be empty; it is in flight until `commit`."""
        assert not self._in_flight, "the step before is not committed"
        self._planned_ns = now_ns
        self._expire(now_ns)
        counts = self._pay_running(now_ns)
        self._admit(counts, now_ns)
        stamp(self.running, counts, now_ns)
        self._step_id += 1
        self._in_flight = {sequence.number: sequence for sequence in self.running if sequence.number in counts}
        drafts = self._draft(counts, now_ns) if self._speculation is not None else {}
        slices = tuple(one.slice(counts[number], drafts.get(number, ())) for number, one in self._in_flight.items())
        return StepPlan(step_id=self._step_id, slices=slices)

    def commit(self, plan: StepPlan, result: StepResult, now_ns: int) -> Outcome:
        """The step is done: book it, and end what ends."""
        assert plan.step_id == result.step_id == self._step_id
        assert len(plan.slices) == len(result.slices)
        tally = Tally()
        tally.share_out(self._in_flight, plan, result, now_ns - self._planned_ns)
        for piece, answer in zip(plan.slices, result.slices, strict=True):
            sequence = self._in_flight[piece.sequence]
            if sequence.status is not Status.FINISHED:  # Or it was aborted while the step was in flight.
                self._settle(sequence, piece, answer, tally, now_ns)
        wasted = self._learn(plan, tally, now_ns) if self._speculation is not None else 0.0
        self.pool.commit(plan.step_id)
        kv = self.pool.book()
        for sequence in self._in_flight.values():
            sequence.met(kv)
        self._in_flight = {}
        return self._outcome(tally, wasted, kv)

    def stop(self, now_ns: int) -> None:
        """End everything: the engine is going down."""
        for sequence in list(self._by_id.values()):
            self._finish(sequence, "shutdown", now_ns, Fault("engine_shutdown", "The engine is shutting down."))

    def check(self) -> None:
        """Everything is in one place and every book closes.  O(sequences + blocks): for tests."""
        self.pool.check()
        if self._draft_model is not None:
            self._draft_model.check()
        self.waiting.check(self.running)
        assert self.running == sorted(self.running, key=lambda sequence: sequence.order)
        assert all(sequence.status is Status.WAITING and not sequence.blocks for sequence in self.waiting)
        assert all(sequence.status is Status.RUNNING for sequence in self.running)
        assert len(self._by_id) == len(self.waiting) + len(self.running)
        assert len(self.running) <= self.config.sequences_max
        for sequence in self.running:
            assert sequence.debt > 0
            assert len(sequence.blocks) * self.config.block_slots >= sequence.computed
            seen = sequence.cached_tokens + sequence.computed_tokens
            assert seen == min(sequence.computed_peak, sequence.prompt_length), "the token book is open"

    # ---- taking in and letting go

    def _arrive(self, request: GenerateRequest, now_ns: int) -> None:
        assert request.request_id not in self._by_id, "the server lets no id in twice"
        sequence = Sequence(request, number=self._arrivals, now_ns=now_ns)
        self._arrivals += 1
        self._by_id[request.request_id] = sequence
        self.waiting.add(sequence)
        fault = door_fault(request, self.config)
        if fault is not None:
            self._finish(sequence, "refused", now_ns, fault)
        elif len(self.waiting) + len(self.running) > self.config.waiting_max + self.config.sequences_max:
            message = f"{self.config.waiting_max} requests are waiting already; try again later."
            self._finish(sequence, "overloaded", now_ns, Fault("overloaded", message))
        else:
            self._deltas.append(Delta(request.request_id))

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_ns: int,
        fault: Fault | None = None,
        news: Delta | None = None,
        stop_id: int | None = None,
    ) -> None:
        if sequence.status is Status.RUNNING:
            sequence.met(self.pool.book())
        self._let_go(sequence, now_ns)
        sequence.status = Status.FINISHED
        del self._by_id[sequence.request.request_id]
        self.waiting.end(sequence)
        if self._speculation is not None:
            self._speculation.end(sequence, keep=reason in ("stop", "length"))
        last = Delta(sequence.request.request_id, finish=Finish(reason, sequence.usage(), stop_id, fault))
        self._deltas.append(news.merge(last) if news else last)
        self._finished.append(sequence.record(reason, now_ns))

    def _let_go(self, sequence: Sequence, now_ns: int) -> None:
        (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        sequence.stalled(now_ns)
        sequence.charge(now_ns)
        # Back to front, so that the end of a chain is given up before its beginning.
        self.pool.release(sequence.blocks[::-1], step_id=self._step_id)
        sequence.blocks = []
        sequence.computed = 0

    def _preempt(self, sequence: Sequence, now_ns: int) -> None:
        self._let_go(sequence, now_ns)
        sequence.status = Status.WAITING
        sequence.preemptions += 1
        self._preemptions += 1
        self.waiting.add(sequence)

    def _expire(self, now_ns: int) -> None:
        for sequence in [*self.running, *self.waiting]:
            if sequence.deadline_ns is not None and now_ns >= sequence.deadline_ns:
                message = f"The request was not finished within its deadline of {sequence.request.deadline_s:g} s."
                self._finish(sequence, "deadline", now_ns, Fault("engine_timeout", message))

    # ---- planning

    def _pay_running(self, now_ns: int) -> dict[int, int]:
        """Tokens per running sequence: first those that owe one, so that a long prompt does not hold them up."""
        counts: dict[int, int] = {}
        budget = self.config.tokens_step_max
        for sequence in sorted(self.running, key=lambda one: (one.debt > 1, one.order)):
            count = min(sequence.debt, budget - sum(counts.values()))
            if count > 0 and sequence.status is Status.RUNNING and self._grow(sequence, count, counts, now_ns):
                counts[sequence.number] = count
        return counts

    def _grow(self, sequence: Sequence, count: int, counts: dict[int, int], now_ns: int) -> bool:
        """Blocks for `count` more tokens, if need be at the expense of the last in order."""
        need = admission.blocks_for(sequence.computed + count, self.config) - len(sequence.blocks)
        while need > 0:
            taken = self.pool.take(need)
            if taken is not None:
                sequence.charge(now_ns)
                sequence.blocks.extend(taken)
                return True
            victim = self._victim(sequence)
            if victim is None:
                return False
            counts.pop(victim.number, None)
            self._preempt(victim, now_ns)
            if victim is sequence:
                return False
        return True

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The last in order that may be preempted.  None: `sequence` itself has been promised its place and waits."""
        for candidate in reversed(self.running):
            if candidate is sequence or candidate.preemptions < self.config.preemptions_max:
                return candidate if candidate.preemptions < self.config.preemptions_max else None
        return None

    def _admit(self, counts: dict[int, int], now_ns: int) -> None:
        """Let waiting sequences in, by turns; one that does not fit may be overtaken `bypass_max` times."""
        passed: list[Sequence] = []
        for sequence in self.waiting.turns():
            budget = self.config.tokens_step_max - sum(counts.values())
            reason = ""
            if len(self.running) >= self.config.sequences_max:
                reason = "queue_batch_full"
            elif budget <= 0:
                reason = "queue_token_budget"
            elif any(one.bypassed >= self.config.bypass_max for one in passed):
                reason = "queue_fairness"
            elif len(passed) > self.config.bypass_max or not self._enter(sequence, budget, counts, now_ns):
                # Of a long queue only so many are tried in a step: each try looks at the whole batch.
                reason = "queue_kv_full"
                passed.append(sequence)
            if reason:
                sequence.ledger.enter("preempted" if sequence.preemptions else reason, now_ns)
            else:
                for one in passed:
                    one.bypassed += 1

    def _enter(self, sequence: Sequence, budget: int, counts: dict[int, int], now_ns: int) -> bool:
        """Admit, if everything that this sequence and the running ones have yet to compute fits."""
        hit = admission.cached_blocks(sequence, self.pool, self.config)
        if not admission.fits(sequence, hit, self.running, self.pool, self.config):
            return False
        found = self.pool.book()
        self.pool.hold(hit)
        cached = len(hit) * self.config.block_slots
        count = min(len(sequence.tokens) - cached, budget)
        taken = self.pool.take(admission.blocks_for(cached + count, self.config) - len(hit))
        if taken is None:
            self.pool.release(hit[::-1], step_id=self._step_id)
            return False
        self.waiting.admit(sequence, len(sequence.tokens) - cached)
        sequence.charge(now_ns)
        sequence.met(found)
        sequence.blocks = [*hit, *taken]
        self._cached += sequence.admit(cached)
        insort(self.running, sequence, key=lambda one: one.order)
        counts[sequence.number] = count
        return True

    def _draft(self, counts: dict[int, int], now_ns: int) -> dict[int, tuple[int, ...]]:
        """Drafts, fitted in the batch's order.  None where somebody owes more than a token: prefill goes first."""
        assert self._speculation is not None
        asking = list(self._in_flight.values())
        decoding = all(counts[one.number] == one.debt == 1 and one.output_length for one in asking)
        self._decode_keys = None
        if not asking or not decoding:
            return {}
        wishes = self._speculation.wish(asking, self.config.tokens_step_max - len(asking))
        drafts = {one.number: self._fit(one, wishes[one.number], now_ns) for one in asking if one.number in wishes}
        more = {number: len(tokens) for number, tokens in drafts.items()}
        self._decode_keys = sum(len(one.tokens) * (1 + more.get(one.number, 0)) for one in asking) / 1000
        return drafts

    def _fit(self, sequence: Sequence, drafts: tuple[int, ...], now_ns: int) -> tuple[int, ...]:
        """
        As many drafts as find a slot in free blocks.  Nobody is preempted for them.

        One cached block may have to go, where nobody waits for KV: if the drafts are right, it would go a moment later.
        """
        need = admission.blocks_for(len(sequence.tokens) + len(drafts), self.config) - len(sequence.blocks)
        if need > 0:
            spare = min(need, self.pool.free + (not self.waiting), self.pool.available)
            taken = self.pool.take(spare) if spare > 0 else None
            if taken is not None:
                sequence.charge(now_ns)
                sequence.blocks.extend(taken)
        return drafts[: len(sequence.blocks) * self.config.block_slots - len(sequence.tokens)]

    # ---- committing

    def _book(self, sequence: Sequence, count: int) -> tuple[int, int]:
        """KV of `count` more tokens is there: fill the blocks, and publish the full ones."""
        slots, start = self.config.block_slots, sequence.computed
        counted = sequence.advance(count)
        for index in range(start // slots, admission.blocks_for(sequence.computed, self.config)):
            filled = min(slots, sequence.computed - index * slots)
            self.pool.fill(sequence.blocks[index], filled)
            if filled == slots and self.config.prefix_cache:
                name = sequence.name(index, slots)
                self.pool.name(sequence.blocks[index], name, indexed=prefix.is_indexed(index, slots))
        return counted

    def _settle(self, sequence: Sequence, piece: Slice, answer: SliceResult, tally: Tally, now_ns: int) -> None:
        """Take the tokens that were sampled, up to the one that ends the sequence, and book the rows behind them."""
        emitted = () if answer.fault else answer.emitted
        assert answer.fault or (piece.sample is None) == (not emitted)
        assert len(emitted) <= piece.drafts + 1
        known = piece.start + len(piece.tokens) - piece.drafts
        tally.decode += max(0, known - max(piece.start, sequence.prompt_length, sequence.computed_peak))
        taken, ending = 0, None
        while taken < len(emitted) and ending is None:
            sequence.emit(emitted[taken], now_ns, self._step_id)
            taken += 1
            ending = ending_of(sequence)
        accepted = max(0, taken - 1)  # What is emitted is in KV, but for the last token.
        sequence.drafted += piece.drafts
        sequence.drafts_accepted += accepted
        first, again = self._book(sequence, len(piece.tokens) - piece.drafts + accepted)
        tally.add(prefill=first, recompute=again, emitted=taken, drafted=piece.drafts, accepted=accepted)
        self.waiting.emitted(sequence, taken)
        news = Delta(sequence.request.request_id, emitted[:taken], answer.logprobs[:taken]) if taken else None
        if answer.fault:
            self.pool.forget(sequence.blocks)
            sequence.degenerate = answer.degenerate
            code = DEGENERATE if answer.degenerate else "internal_error"
            self._finish(sequence, "failed", now_ns, Fault(code, answer.fault))
        elif ending is not None:
            self._finish(sequence, ending.reason, now_ns, ending.fault, news, ending.stop_id)
        elif news is not None:
            self._deltas.append(news)
            if self._speculation is not None:
                self._speculation.answered(sequence, emitted)
            if piece.drafts:
                self._give_back(sequence, now_ns)

    def _give_back(self, sequence: Sequence, now_ns: int) -> None:
        """The blocks that only drafts had needed."""
        need = admission.blocks_for(len(sequence.tokens), self.config)
        if len(sequence.blocks) > need:
            sequence.charge(now_ns)
            self.pool.release(sequence.blocks[: need - 1 : -1], step_id=self._step_id)
            del sequence.blocks[need:]

    def _learn(self, plan: StepPlan, tally: Tally, now_ns: int) -> float:
        """What the step has cost, and the share of it that went into drafts that were wrong."""
        assert self._speculation is not None
        keys, self._decode_keys = self._decode_keys, None
        if keys is None:
            return 0.0
        self._speculation.spent(plan.tokens, keys, now_ns - self._planned_ns)
        return self._speculation.wasted_share(plan.tokens, keys, tally.drafted - tally.accepted)

    def _outcome(self, tally: Tally, wasted: float, kv: KvBook) -> Outcome:
        outcome = Outcome(
            deltas=merged(self._deltas),
            finished=tuple(self._finished),
            prefill_tokens=tally.prefill,
            recompute_tokens=tally.recompute,
            decode_tokens=tally.decode,
            emitted_tokens=tally.emitted,
            drafted_tokens=tally.drafted,
            draft_accepted_tokens=tally.accepted,
            draft_rejected_share=wasted,
            cached_tokens=self._cached,
            preemptions=self._preemptions,
            evictions=self.pool.evictions - self._evictions_before,
            load=load_of(self.running, self.waiting, self.pool),
            served_ns=tally.served_ns,
            requests=tally.requests,
            waits=waits_of(self.waiting),
            kv=kv,
            prefixes=self.pool.prefixes.report(),
        )
        self._deltas, self._finished = [], []
        self._cached = self._preemptions = 0
        self._evictions_before = self.pool.evictions
        return outcome
