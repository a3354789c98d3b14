"""
When a draft model pays: whom it guesses for, and how many tokens.

    offers(...)   the sequences that it could guess for -> how many tokens for which
    learned(...)  whether its guesses were what the model said
    passed(...)   what its passes took
    stepped(...)  what the step took in which its guesses were computed, and how many were right

Unlike a look into texts, a guess of a model costs time, so the controller of speculation could not find out for nothing
whether its guesses are any good.  It keeps an account, in ns: what accepted drafts have saved, less what was spent on
all.  A small share of the time of every step is paid in; trials, whose gain nobody knows, are paid from it, and so are
losses, where what was expected is not what came.  Too deep in the red, nothing is guessed.

A sequence's text has to be read before anything can be guessed.  That is worth it if the guesses would have saved as
much so far, had it been read at once: what has gone on for long will go on for long.
"""

from collections.abc import Sequence as Many
from typing import Protocol

import msgspec

from engine.speculate import CHANCE_MAX, ROW_MIN, ROWS_MORE_MAX
from engine.step_costs import KNOWN, SLOW_MAX, StepCosts

GAIN_MIN = 0.05  # of tokens per second, over drafts from texts alone
READ_ROWS_MAX = 256  # of one step: the others wait meanwhile
READY_ROWS = 16  # so many unread tokens need no justification
FIRST_PASS = 0.3  # of a step's cost: what a pass is expected to take before there was one
FIRST_CHANCE = 0.6
FIRST_WEIGHT = 8.0
RATE_FADE = 0.995  # of what was learned of all sequences, per guess
OWN_WEIGHT = 6.0  # how many guesses for one sequence outweigh what is known of all
OWN_FADE = 0.96
INCOME_SHARE = 0.01  # of each step's time: what trials may cost in the long run
BALANCE_STEPS_MAX = 64  # steps that the account may hold: enough to read a long prompt and see
DEBT_STEPS_MAX = 16  # that it may owe before nothing is guessed; twice that is the most that is remembered
START_STEPS = 10  # that it holds at first: a short prompt
CONTROL_STEPS = 24  # with guesses, after which there is one without: what would it take today?
LOOK_STEPS = 4  # between two looks, where nothing would have paid
TRIAL_STEPS = 48  # between two trials
TRIAL_COUNT = 4  # guesses of one


class Candidate(msgspec.Struct, frozen=True):
    """A sequence that could be guessed for."""

    number: int
    length: int  # tokens known
    unread: int
    said: int  # output tokens so far
    count_max: int
    chance: float  # that a guess is right
    hope: float = 0.0  # of tokens from texts, which would have to give way
    hope_rows: int = 0


class Step(msgspec.Struct, frozen=True):
    """The step to come, as it is without the draft model."""

    streams: int
    keys: float  # thousand
    rows: int  # those that texts have drafted included
    tokens: float  # expected, with those from texts
    budget: int  # of rows more


class Policy(Protocol):
    """Who decides whom a draft model guesses for, and is told what came of it."""

    def offers(self, candidates: Many[Candidate], step: Step) -> dict[int, int]:
        """How many tokens to guess, by sequence number; 0: only read on, READ_ROWS_MAX in all."""
        ...

    def chance(self, right: float, tried: float) -> float:
        """That a guess is right for a sequence for which `right` of `tried` were, of late."""
        ...

    def learned(self, *, right: bool) -> None:
        """A guess was right or not."""
        ...

    def passed(self, rows: int, keys: float, spent_ns: int) -> None:
        """The draft model has computed so many rows."""
        ...

    def stepped(self, rows: int, keys: float, spent_ns: int, *, guessed: int, accepted: int) -> None:
        """A step has taken so long; of its rows so many were guesses of the draft model, and so many were right."""
        ...


class PayingPolicy:
    """Implements `Policy`.  Same calls, same answers."""

    def __init__(self, steps: StepCosts) -> None:
        self.passes = StepCosts()  # of the draft model
        self.balance_ns = 0.0
        self._steps = steps  # of the model that is served
        self._right, self._tried = FIRST_CHANCE * FIRST_WEIGHT, FIRST_WEIGHT
        self._step = self._look_at = 0
        self._tried_at = -TRIAL_STEPS
        self._unit_ns = 0.0  # a step without guesses, of late
        self._slower = 1.0  # such steps than what was expected of them
        self._streams = 1
        self._guessed_steps = 0  # since there was one without guesses

    def chance(self, right: float, tried: float) -> float:
        """What is known of all counts for OWN_WEIGHT of its own."""
        known = self._right / self._tried
        return min(CHANCE_MAX, (right + OWN_WEIGHT * known) / (tried + OWN_WEIGHT))

    def learned(self, *, right: bool) -> None:
        """It counts less and less."""
        self._right = self._right * RATE_FADE + right
        self._tried = self._tried * RATE_FADE + 1

    def passed(self, rows: int, keys: float, spent_ns: int) -> None:
        """Its costs are learned as those of the other model are, and paid."""
        self.passes.observe(rows, keys, spent_ns)
        self._pay(-spent_ns)

    def stepped(self, rows: int, keys: float, spent_ns: int, *, guessed: int, accepted: int) -> None:
        """
        A share of it is paid in; a token more is worth its share of what the step would have taken without the guesses.

        Compared is with what steps without guesses took: expectations may be too low for all of them.
        """
        plain = rows - guessed
        expected_ns = self._steps.expected_ns(rows, keys)
        if expected_ns <= 0:
            return
        if not self._unit_ns:
            self._unit_ns = expected_ns
            self.balance_ns = START_STEPS * expected_ns
        ratio = min(SLOW_MAX, spent_ns / expected_ns)
        self._guessed_steps = self._guessed_steps + 1 if guessed else 0
        if guessed:
            plain_ns = min(expected_ns, self._steps.expected_ns(plain, keys * plain / rows))
            self._pay(accepted * plain_ns / self._streams - (expected_ns * ratio / self._slower - plain_ns))
        else:
            self._slower += 0.05 * (ratio - self._slower)
            self._unit_ns += 0.05 * (expected_ns - self._unit_ns)
        self._pay(INCOME_SHARE * expected_ns)

    def offers(self, candidates: Many[Candidate], step: Step) -> dict[int, int]:
        """What raises tokens per second most; else nothing, or a trial."""
        self._step += 1
        self._streams = step.streams
        if not candidates or step.budget < 1 or self._steps.seen(step.streams) < KNOWN:
            return {}
        unit_ns = self._step_ns(step, step.streams)
        if self._guessed_steps >= CONTROL_STEPS:
            self._guessed_steps = 0
            return {}
        offers: dict[int, int] = {}
        if self.balance_ns > -DEBT_STEPS_MAX * unit_ns and self._step >= self._look_at:
            gain, best = self._best([one for one in candidates if one.unread <= READY_ROWS], step)
            if gain >= GAIN_MIN:
                offers = best
            reading = self._to_read(candidates, step, unit_ns)
            if reading is not None:
                offers = offers | {reading.number: 0}
            if not offers:
                self._look_at = self._step + LOOK_STEPS
        return offers or self._trial(candidates, step)

    def _pay(self, amount_ns: float) -> None:
        least, most = -2 * DEBT_STEPS_MAX * self._unit_ns, BALANCE_STEPS_MAX * self._unit_ns
        self.balance_ns = max(least, min(most, self.balance_ns + amount_ns))

    def _step_ns(self, step: Step, rows: int) -> float:
        return self._steps.expected_ns(rows, step.keys * rows / step.streams)

    def _pass_ns(self, rows: int, keys: float) -> float:
        if self.passes.level_ns > 0:
            return self.passes.expected_ns(rows, keys)
        return FIRST_PASS * self._steps.expected_ns(rows, keys)

    def _best(self, candidates: Many[Candidate], step: Step) -> tuple[float, dict[int, int]]:
        """How much faster, as a share, and for whom: the most promising 1, 2, 4, ... or all of them, equally many."""
        ordered = sorted(candidates, key=lambda one: (-one.chance, one.number))
        plain = step.tokens / self._step_ns(step, step.rows)
        best, offers = 0.0, dict[int, int]()
        size = 1
        while ordered and size <= len(ordered):
            chosen = ordered[:size]
            most = min(step.budget, ROWS_MORE_MAX) // size
            for count in range(1, min(most, max(one.count_max for one in chosen)) + 1):
                gain = self._rate(chosen, count, step) / plain - 1
                if gain < best - GAIN_MIN or (count > 2 and best == 0):
                    break  # what falls goes on to fall, but for a stair or two
                if gain > best:
                    best, offers = gain, {one.number: min(count, one.count_max) for one in chosen}
            size = size * 2 if size == len(ordered) else min(size * 2, len(ordered))
        return best, offers

    def _rate(self, chosen: Many[Candidate], count: int, step: Step) -> float:
        """Expected tokens per ns if the draft model guesses `count` tokens for these."""
        tokens, rows, keys = step.tokens, step.rows, sum(one.length for one in chosen) / 1000
        for one in chosen:
            own = min(count, one.count_max)
            tokens += one.chance * (1 - one.chance**own) / (1 - one.chance) - one.hope
            rows += own - one.hope_rows
        unread = sum(min(one.unread, READY_ROWS) for one in chosen)
        draft_ns = self._pass_ns(unread, keys * unread / len(chosen)) + (count - 1) * self._pass_ns(len(chosen), keys)
        more = max(1, rows - step.rows)
        step_ns = max(self._step_ns(step, rows), self._step_ns(step, step.rows) * (1 + ROW_MIN * more))
        return tokens / (step_ns + draft_ns)

    def _to_read(self, candidates: Many[Candidate], step: Step, unit_ns: float) -> Candidate | None:
        """Somebody whose reading would have paid by now."""
        unread = [one for one in candidates if one.unread > READY_ROWS]
        if not unread:
            return None
        one = max(unread, key=lambda one: (one.said, -one.number))
        gain, offers = self._best([one], step)
        if gain < GAIN_MIN:
            return None
        saved_ns = gain * unit_ns * one.said / (1 + one.chance * offers[one.number])
        return one if saved_ns >= self._pass_ns(one.unread, one.unread * one.length / 2000) else None

    def _trial(self, candidates: Many[Candidate], step: Step) -> dict[int, int]:
        """Find out, if the account has enough for it to be all in vain."""
        if self._step - self._tried_at < TRIAL_STEPS:
            return {}
        one = min(candidates, key=lambda one: (one.unread, one.number))
        count = min(TRIAL_COUNT, one.count_max, step.budget)
        keys = one.length / 1000
        cost_ns = self._pass_ns(one.unread, one.unread * keys / 2) + (count - 1) * self._pass_ns(1, keys)
        cost_ns += self._step_ns(step, step.streams + count) - self._step_ns(step, step.streams)
        if cost_ns > self.balance_ns:
            return {}
        if one.unread > READ_ROWS_MAX:
            return {one.number: 0}  # and on from there in the next step
        self._tried_at = self._step
        return {one.number: count}
