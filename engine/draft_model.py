"""
Speculation with a draft model: texts first, where they match for long; the draft model where they do not.

    asks(running)          before each plan -> what the draft model is to read and to guess
    told(plan, result)     what it has guessed
    wish(asking, budget)   as ever: drafts for the step, of both kinds

The draft model has KV of its own, and its blocks are owned here: a sequence holds some from its first question until it
ends or is preempted.  A full pool means no drafts.  Its keys and values are those of the
sequence's first `read` tokens; what it has guessed itself counts as read as far as it was right.
"""

from collections.abc import Sequence as Many

from engine.api import Sampling
from engine.blocks import BlockPool
from engine.config import SchedulerConfig
from engine.draft_policy import OWN_FADE, READ_ROWS_MAX, Candidate, PayingPolicy, Policy, Step
from engine.plan import DraftPlan, DraftResult, SampleSpec, Slice
from engine.sequence import Sequence
from engine.speculate import MATCH_CLEAR, Speculation, Speculator

GREEDY = SampleSpec(sampling=Sampling(temperature=0), uniforms=(0.0,))
NOTHING = DraftPlan()
_AT_ONCE = -1  # no step of the draft model is ever in flight here: what is given back is free


class Reading:
    """What the draft model has of one sequence."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.read = 0  # of the sequence's tokens
        self.drafts: tuple[int, ...] = ()  # for the step to come
        self.broken = False  # there were no numbers: no more questions
        self.right = 0.0
        self.tried = 0.0

    def learn(self, emitted: Many[int], known: int, policy: Policy) -> int:
        """The model has said this behind `known` tokens.  Returns how many drafts were right, from the first on."""
        right = 0
        for draft, token in zip(self.drafts, emitted, strict=False):
            policy.learned(right=draft == token)
            self.right = self.right * OWN_FADE + (draft == token)
            self.tried = self.tried * OWN_FADE + 1
            if draft != token:
                break
            right += 1
        if self.drafts:
            self.read = known + min(right, len(self.drafts) - 1)  # Nothing was computed behind the last one.
        self.drafts = ()
        return right


class ModelSpeculator:
    """Implements `engine.speculate.Speculation`, and what a draft model is asked.  Same calls, same answers."""

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None) -> None:
        assert config.draft_blocks_max > 0 and config.drafts_max > 0
        self.pool = BlockPool(blocks_max=config.draft_blocks_max, block_slots=config.block_slots)
        self._config = config
        self._text = Speculator(config.drafts_max)
        self._policy = policy or PayingPolicy(self._text.costs)
        self._readings: dict[int, Reading] = {}
        self._wishes: dict[int, tuple[int, ...]] | None = None  # of texts, for the step to come
        self._guessed = self._accepted = 0  # of the draft model, in the step to come
        self._failed = False

    def asks(self, running: Many[Sequence], budget: int) -> DraftPlan:
        """
        What the draft model is to do now.

        Args:
            running: all who hold KV.
            budget: rows that the step may have more; none are used where somebody's prompt is still computed.
        """
        self._begin()
        present = {sequence.number for sequence in running}
        for number in [number for number in self._readings if number not in present]:
            self._forget(number)
        decoding = all(sequence.debt == 1 and sequence.output_length for sequence in running)
        if self._failed or budget < 1 or not running or not decoding:
            return NOTHING
        self._wishes = self._text.wish(running, budget)
        step = self._without(running, budget)
        candidates = [one for sequence in running if (one := self._candidate(sequence)) is not None]
        offers = self._policy.offers(candidates, step)
        if not offers:
            return NOTHING
        return self._plan([sequence for sequence in running if sequence.number in offers], offers)

    def told(self, plan: DraftPlan, result: DraftResult) -> None:
        """What came of it."""
        for number, spent_ns in enumerate(result.pass_ns):
            rows = plan.rows(number)
            keys = sum(len(one.tokens) * (one.start + len(one.tokens)) for one in plan.slices) / 1000
            keys = keys if not number else keys * rows / plan.rows(0)
            self._policy.passed(rows, keys, spent_ns)
        if result.failed:
            self._failed = True
            for number in list(self._readings):
                self._forget(number)
            return
        for piece, count, drafts in zip(plan.slices, plan.counts, result.drafts, strict=True):
            reading = self._readings[piece.sequence]
            reading.read = piece.start + len(piece.tokens)
            reading.drafts = drafts
            if len(drafts) < count:
                reading.broken, reading.drafts = True, ()
                self._give_back(reading)

    def wish(self, asking: Many[Sequence], budget: int) -> dict[int, tuple[int, ...]]:
        """What the draft model has guessed, else what was found in texts."""
        found, self._wishes = self._wishes, None
        if found is None:
            found = self._text.wish(asking, budget)
        wishes: dict[int, tuple[int, ...]] = {}
        for sequence in asking:
            reading = self._readings.get(sequence.number)
            guessed = reading.drafts if reading is not None else ()
            drafts = (guessed or found.get(sequence.number, ()))[:budget]
            if drafts:
                wishes[sequence.number] = drafts
                budget -= len(drafts)
                self._guessed += len(drafts) if guessed else 0
        return wishes

    def answered(self, sequence: Sequence, emitted: Many[int]) -> None:
        """Both learn."""
        self._text.answered(sequence, emitted)
        reading = self._readings.get(sequence.number)
        if reading is not None:
            self._accepted += reading.learn(emitted, len(sequence.tokens) - len(emitted), self._policy)

    def spent(self, rows: int, keys: float, spent_ns: int) -> None:
        """As with texts alone; and the account of the draft model is kept."""
        guessed = min(self._guessed, rows - 1)
        self._policy.stepped(rows, keys, spent_ns, guessed=guessed, accepted=self._accepted)
        self._text.spent(rows, keys, spent_ns)

    def wasted_share(self, rows: int, keys: float, rejected: int) -> float:
        """Of the step.  What the draft model itself has taken is a part of its own."""
        return self._text.wasted_share(rows, keys, rejected)

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Its blocks are given back."""
        self._text.end(sequence, keep=keep)
        self._forget(sequence.number)

    def check(self) -> None:
        """Each block is held by one sequence, and none for nobody.  For tests."""
        self.pool.check()
        held = [block for reading in self._readings.values() for block in reading.blocks]
        assert len(set(held)) == len(held) == self._config.draft_blocks_max - self.pool.available
        slots = self._config.block_slots
        assert all(one.broken or one.read <= len(one.blocks) * slots for one in self._readings.values())

    def _begin(self) -> None:
        """What was guessed for the step before, used or not, is over."""
        self._wishes = None
        self._guessed = self._accepted = 0
        for reading in self._readings.values():
            reading.drafts = ()

    def _without(self, running: Many[Sequence], budget: int) -> Step:
        assert self._wishes is not None
        return Step(
            streams=len(running),
            keys=sum(len(sequence.tokens) for sequence in running) / 1000,
            rows=len(running) + sum(map(len, self._wishes.values())),
            tokens=len(running) + sum(self._text.hopes.values()),
            budget=budget,
        )

    def _candidate(self, sequence: Sequence) -> Candidate | None:
        """None where texts match for long, or where nothing can be guessed."""
        assert self._wishes is not None
        drafts = self._wishes.get(sequence.number, ())
        reading = self._readings.get(sequence.number)
        if reading is not None:  # The last token is read again where the step before did not go on from there.
            reading.read = min(reading.read, len(sequence.tokens) - 1)
        room = self._config.draft_context_max - len(sequence.tokens) + 1
        left = sequence.request.tokens_max - sequence.output_length - 1
        count_max = min(room, left, self._config.drafts_max)
        long = drafts and self._text.matched(sequence) >= MATCH_CLEAR
        if long or count_max < 1 or (reading is not None and reading.broken):
            return None
        return Candidate(
            number=sequence.number,
            length=len(sequence.tokens),
            unread=len(sequence.tokens) - (reading.read if reading is not None else 0),
            said=sequence.output_length,
            count_max=count_max,
            chance=self._policy.chance(reading.right, reading.tried) if reading else self._policy.chance(0, 0),
            hope=self._text.hopes.get(sequence.number, 0.0),
            hope_rows=len(drafts),
        )

    def _plan(self, asking: Many[Sequence], counts: dict[int, int]) -> DraftPlan:
        """As many of the offers as find blocks; READ_ROWS_MAX rows to read, whatever was offered."""
        slices, asked, left = list[Slice](), list[int](), READ_ROWS_MAX
        for sequence in asking:
            reading = self._readings.setdefault(sequence.number, Reading())
            tokens = tuple(sequence.tokens[reading.read : reading.read + left])
            end = reading.read + len(tokens)
            count = counts[sequence.number] if end == len(sequence.tokens) else 0
            if not tokens or not self._grow(reading, end + max(0, count - 1)):
                continue
            left -= len(tokens)
            asked.append(count)
            slices.append(
                Slice(
                    sequence=sequence.number,
                    start=reading.read,
                    tokens=tokens,
                    blocks=tuple(reading.blocks),
                    sample=GREEDY if count else None,
                )
            )
        return DraftPlan(tuple(slices), tuple(asked))

    def _grow(self, reading: Reading, slots: int) -> bool:
        need = -(-slots // self._config.block_slots) - len(reading.blocks)
        taken = self.pool.take(need) if 0 < need <= self.pool.blocks_max else ()
        if taken is None or need > self.pool.blocks_max:
            return False
        reading.blocks.extend(taken)
        return True

    def _give_back(self, reading: Reading) -> None:
        self.pool.release(reading.blocks, step_id=_AT_ONCE)
        reading.blocks, reading.read = [], 0

    def _forget(self, number: int) -> None:
        reading = self._readings.pop(number, None)
        if reading is not None:
            self._give_back(reading)


def speculation_for(config: SchedulerConfig) -> Speculation | None:
    """What the bounds allow."""
    if config.drafts_max and config.draft_blocks_max:
        return ModelSpeculator(config)
    return Speculator(config.drafts_max) if config.drafts_max else None
