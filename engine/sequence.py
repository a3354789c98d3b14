"""
One sequence: tokens known, tokens computed, and the blocks that hold the computed ones.

    waiting -> running -> finished
       ^          |
       +----------+  preempted: blocks given back, tokens kept

The scheduler owns it and is the only one to change it.  The debt, `known - computed`, is all that decides what a step
does: prefill, the rest of a chunked prefill, decode and recompute after a preemption are one subtraction.
"""

from collections.abc import Iterable, Mapping
from enum import Enum

from engine import prefix
from engine.api import FinishReason, GenerateRequest, Usage
from engine.interference import Interference
from engine.plan import SampleSpec, Slice
from telemetry.ledger import Ledger
from telemetry.records import InterconnectBook, KvBook, RequestRecord

_MASK = (1 << 64) - 1


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """A request being served.  All times are ns of the scheduler's `now`."""

    def __init__(self, request: GenerateRequest, *, number: int, now_ns: int) -> None:
        self.request = request
        self.number = number  # of arrival; never reused
        self.tokens = list(request.prompt)
        self.prompt_length = len(request.prompt) - request.resume
        self.computed = 0
        self.computed_peak = 0  # positions that were ever in KV: below it work is paid again
        self.blocks: list[int] = []
        self.names: list[bytes] = []  # of the full blocks, as far as they were asked for
        self.status = Status.WAITING
        self.bypassed = 0  # others admitted over its head
        self.preemptions = 0
        self.ledger = Ledger("queue_token_budget", now_ns)
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.recomputed_tokens = 0
        self.steps = 0
        self.drafted = 0
        self.drafts_accepted = 0
        self.interconnect_wait_ns = 0
        self.interconnect_transfer_ns = 0
        self.interconnect_wait_max_ns = 0
        self.engine_ns = 0
        self.interference = Interference()
        self._stalled: tuple[int, Mapping[str, int]] | None = None  # since when, and who is served instead
        self.kv_met: list[KvBook] = []  # at admission, the worst since, the last one
        self.repeats = _repeats(self.outputs)
        self.degenerate = ""  # of telemetry.records.DEGENERATE_KINDS, once that is what ends it
        self._first_token_ns = 0
        self._first_token_states: dict[str, int] = {}
        self._last_token_ns = 0
        self._last_token_states: dict[str, int] = {}
        self._gap_max_ns = 0
        self._gap_states: dict[str, int] = {}
        self._gap_step = -1
        self._block_ns = 0
        self._charged_ns = now_ns

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower priority numbers, then earlier arrivals.  Preemption keeps it."""
        return (self.request.priority, self.number)

    @property
    def debt(self) -> int:
        """Known tokens without keys and values."""
        return len(self.tokens) - self.computed

    @property
    def paying(self) -> str:
        """The state of a step that pays some of the debt."""
        if self.computed < self.computed_peak:
            return "recompute"
        return "decode" if self.output_length and self.debt == 1 else "prefill"

    @property
    def outputs(self) -> list[int]:
        """Tokens generated so far, those of an earlier try included."""
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def tokens_ever(self) -> int:
        """KV slots in the worst case: the last token is never computed."""
        return self.prompt_length + self.request.tokens_max - 1

    @property
    def deadline_ns(self) -> int | None:
        """When the request gives up; None: never."""
        if self.request.deadline_s <= 0:
            return None
        return self.ledger.opened_ns + int(self.request.deadline_s * 1e9)

    def name(self, index: int, block_slots: int) -> bytes:
        """The name of full block `index`; names before it are made on the way."""
        while len(self.names) <= index:
            before = self.names[-1] if self.names else prefix.root(self.request.tenant)
            start = len(self.names) * block_slots
            self.names.append(prefix.chain(before, self.tokens[start : start + block_slots]))
        return self.names[index]

    def spec(self, drafts: int = 0) -> SampleSpec:
        """How the next token is to be chosen, and those behind so many drafts."""
        sampling = self.request.sampling
        penalized = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        repeated = sampling.repetition_penalty != 1
        known, rows = len(self.tokens), drafts + 1
        banned_rows = min(rows, self.request.tokens_min - self.output_length)
        return SampleSpec(
            sampling=sampling,
            uniforms=tuple(uniform(sampling.seed, known + row) for row in range(rows)),
            banned=self.request.stop_ids if banned_rows > 0 else (),
            unbanned_rows=rows - banned_rows if banned_rows > 0 else 0,
            prompt=tuple(self.tokens[: self.prompt_length]) if repeated else (),
            outputs=tuple(self.outputs) if penalized or repeated else (),
        )

    def slice(self, count: int, drafts: tuple[int, ...] = ()) -> Slice:
        """The next `count` tokens that are owed, and drafts behind them."""
        end = self.computed + count
        return Slice(
            sequence=self.number,
            start=self.computed,
            tokens=(*self.tokens[self.computed : end], *drafts),
            blocks=tuple(self.blocks),
            sample=self.spec(len(drafts)) if end == len(self.tokens) else None,
            drafts=len(drafts),
        )

    def admit(self, cached: int) -> int:
        """Begin to run with `cached` tokens found in the prefix cache.  Returns how many of them are news."""
        assert self.status is Status.WAITING
        assert self.computed == 0
        self.status = Status.RUNNING
        self.computed = cached
        # After a preemption only what was never computed before counts as a hit.
        hit = max(0, min(cached, self.prompt_length) - self.computed_peak)
        self.cached_tokens += hit
        self.computed_peak = max(self.computed_peak, cached)
        return hit

    def advance(self, count: int) -> tuple[int, int]:
        """`count` more tokens are computed.  Returns how many of them for the first time in the prompt, and again."""
        end = self.computed + count
        again = max(0, min(end, self.computed_peak) - self.computed)
        first = max(0, min(end, self.prompt_length) - max(self.computed, self.computed_peak))
        self.computed = end
        self.computed_peak = max(self.computed_peak, end)
        self.computed_tokens += first
        self.recomputed_tokens += again
        self.steps += 1
        return first, again

    def emit(self, token: int, now_ns: int, step_id: int = -1) -> None:
        """One more output token, of that step."""
        alike = self.repeats == self.output_length and (not self.repeats or token == self.tokens[-1])
        self.tokens.append(token)
        self.repeats += alike
        if now_ns == self._last_token_ns:
            return  # Of the same step as the one before.
        states = self.ledger.spent(now_ns)
        if not self._last_token_ns:
            self._first_token_ns, self._first_token_states = now_ns - self.ledger.opened_ns, states
        elif now_ns - self._last_token_ns > self._gap_max_ns:
            self._gap_max_ns, self._gap_step = now_ns - self._last_token_ns, step_id
            before = self._last_token_states
            self._gap_states = {
                state: spent_ns - before.get(state, 0)
                for state, spent_ns in states.items()
                if spent_ns > before.get(state, 0)
            }
        self._last_token_ns, self._last_token_states = now_ns, states

    def charge(self, now_ns: int) -> None:
        """Book the blocks held since the last call; to be called before the block table changes."""
        self._block_ns += len(self.blocks) * (now_ns - self._charged_ns)
        self._charged_ns = now_ns

    def meet(self, interconnect: InterconnectBook, share_ns: int) -> None:
        """A step that it was in: how long that waited for other ranks, and for the wire, and the sequence's share."""
        self.interconnect_wait_ns += interconnect.wait_ns
        self.interconnect_transfer_ns += interconnect.transfer_ns
        self.interconnect_wait_max_ns = max(self.interconnect_wait_max_ns, interconnect.wait_ns)
        self.engine_ns += share_ns

    def stalls(self, now_ns: int, served: Mapping[str, int]) -> None:
        """The step that is planned now serves these instead, with so many rows each."""
        self.ledger.enter("stalled", now_ns)
        self._stalled = (now_ns, served)

    def stalled(self, now_ns: int) -> None:
        """Whatever it waited for, if it did, it waits no longer; to be called before it leaves that state."""
        if self._stalled is not None:
            since_ns, served = self._stalled
            self.interference.add(now_ns - since_ns, served)
            self._stalled = None

    def met(self, kv: KvBook) -> None:
        """The pool as it is while the sequence runs."""
        if not self.kv_met:
            self.kv_met = [kv, kv, kv]
        elif kv.available < self.kv_met[1].available:
            self.kv_met[1:] = [kv, kv]
        else:
            self.kv_met[2] = kv

    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(self.prompt_length, self.cached_tokens, self.output_length)

    def record(self, outcome: FinishReason, now_ns: int) -> RequestRecord:
        """The request's book, closed at `now_ns`."""
        readings = [book.reading() for book in self.kv_met]
        at_admission, worst, at_end = readings or (None, None, None)
        return RequestRecord(
            request_id=self.request.request_id,
            tenant=self.request.tenant,
            outcome=outcome,
            accepted_ns=self.ledger.opened_ns,
            finished_ns=now_ns,
            states=self.ledger.spent(now_ns),
            prompt_tokens=self.prompt_length,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            recomputed_tokens=self.recomputed_tokens,
            output_tokens=self.output_length,
            drafted_tokens=self.drafted,
            draft_accepted_tokens=self.drafts_accepted,
            draft_rejected_tokens=self.drafted - self.drafts_accepted,
            preemptions=self.preemptions,
            steps=self.steps,
            kv_block_ns=self._block_ns,
            interconnect_wait_ns=self.interconnect_wait_ns,
            interconnect_transfer_ns=self.interconnect_transfer_ns,
            interconnect_wait_max_ns=self.interconnect_wait_max_ns,
            engine_ns=self.engine_ns,
            stalled_for=self.interference.shown(),
            kv_at_admission=at_admission,
            kv_worst=worst,
            kv_at_end=at_end,
            first_token_ns=self._first_token_ns,
            first_token_states=self._first_token_states,
            gap_max_ns=self._gap_max_ns,
            gap_states=self._gap_states,
            gap_step=self._gap_step,
            degenerate=self.degenerate,
        )


def stamp(running: Iterable[Sequence], counts: Mapping[int, int], now_ns: int) -> None:
    """From now on each is in the state that a plan puts it in, with so many tokens for the sequence of each number."""
    running = list(running)
    served: dict[str, int] = {}
    if len(counts) < len(running):
        served = {one.request.request_id: counts[one.number] for one in running if one.number in counts}
    for sequence in running:
        sequence.stalled(now_ns)
        if sequence.number in counts:
            sequence.ledger.enter(sequence.paying, now_ns)
        else:
            sequence.stalls(now_ns, served)


def _repeats(outputs: list[int]) -> int:
    """How often the first output comes before there is another."""
    return next((index for index, token in enumerate(outputs) if token != outputs[0]), len(outputs))


def uniform(seed: int, position: int) -> float:
    """
    The random number in [0, 1) that chooses the token at `position` of a sequence.

    Counter-based, so it needs no state and no order: SplitMix64's finalizer (Steele, Lea, Flood 2014, figure 16) over
    the seed, then over seed and position; the upper 53 bits make the float.
    """
    state = _mix((seed & _MASK) ^ 0x9E3779B97F4A7C15)
    return (_mix(state + 0x9E3779B97F4A7C15 * (position + 1)) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
