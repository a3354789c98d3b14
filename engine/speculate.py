"""
The controller of speculation: from which sequences to draft, and how many tokens, so that the whole step gives the
most tokens per second.  Zero is the plain path, and the answer wherever drafts would not pay.

    wish(asking, budget)          before a step in which everybody decodes -> drafts by sequence
    answered(sequence, emitted)   what the model said instead
    spent(rows, keys, ns)         what the step took
    end(sequence)                 a sequence is over; what it said may help the tenant's next ones

A draft is worth its chance of being right; a row costs what `StepCosts` says.  Drafts of all sequences are taken in the
order of their chances as long as (expected tokens) / (cost of the step) rises, and only if it rises by GAIN_MIN.

Chances are learned from every draft that was looked up, also from those that were not computed: what the model said
tells whether they would have been right.  So nothing is spent to find out that a text has begun to repeat itself.
Costs can only be learned by paying: where what is known speaks against drafts and what is not known might speak for
them, one step in EXPLORE_STEPS finds out.  Where even the best guesses could not pay, nobody looks anything up.

Pure: time comes in as what steps took.
"""

from collections.abc import Sequence as Many
from typing import Protocol

from engine.drafters import NO_DRAFT, Draft, Library, OthersText, Outputs, OwnText
from engine.sequence import Sequence
from engine.step_costs import KNOWN, StepCosts

GAIN_MIN = 0.02  # of tokens per second, below which it is not worth the risk
ROW_MIN = 0.01  # of a step's cost that each draft has at least, whatever was measured: nothing is quite free
ROWS_MORE_MAX = 64  # drafts of one step
CHANCE_MAX = 0.98
CHANCE_MIN = 0.02  # a draft that is right less often is not looked at
BEST_CHANCE = 0.95  # of the first drafts, if all goes well: is it worth while to look for any?
EXPLORE_STEPS = 48
LOOKUP_NS = 15_000  # about what it costs to look for one sequence's draft
READ_NS = 4_000  # and to read a token into automata before
LOOKUP_SHARE = 0.005  # of a step's time that may go into looking where nothing is found
DULL = 0.01  # gain, beyond what looking costs, below which it seems to be in vain
MATCH_CLEAR = 8  # tokens found in the sequence itself, after which nobody asks what others were answered
READ_TOKENS_MAX = 512  # into automata, of one step
READ_TOKENS_EXPLORING = 2048  # there is one such step in EXPLORE_STEPS
OWN_TOKENS_MAX = 1 << 17  # in the automata of all sequences: some 350 bytes each
LADDER_MISSES_MAX = 16  # drafts beyond the best number that are looked at: costs may rise in stairs
# By the bits of the length of the match: 1, 2-3, 4-7, 8-15, 16-31, 32 and more.  Chosen; a few drafts outweigh it.
FIRST_RATES = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
FIRST_WEIGHT = 8.0
RATE_FADE = 0.998  # of what was learned of all sequences, per draft
OWN_WEIGHT = 3.0  # how many expected tokens of one sequence outweigh what is known of all
OWN_FADE = 0.97
OWN_FACTOR_MAX = 1.5


class Chances:
    """How often drafts are right, by the length of the match that they follow; a share of what the counts promise."""

    def __init__(self) -> None:
        self._right = [rate * FIRST_WEIGHT for rate in FIRST_RATES]
        self._promised = [FIRST_WEIGHT] * len(FIRST_RATES)
        self.rates = list(FIRST_RATES)

    def learn(self, kind: int, share: float, *, right: bool) -> None:
        """A draft of this kind, that came in `share` of the cases so far, was right or not."""
        self._right[kind] = self._right[kind] * RATE_FADE + right
        self._promised[kind] = self._promised[kind] * RATE_FADE + share
        self.rates[kind] = self._right[kind] / self._promised[kind]


def kind_of(matched: int) -> int:
    """The place in FIRST_RATES of a match of that length."""
    return min(matched.bit_length(), len(FIRST_RATES) - 1)


class Watch:
    """One sequence: its drafters, its last draft, and whether it does better or worse than others."""

    def __init__(self, outputs: Outputs) -> None:
        self.own = OwnText()
        self.others = OthersText(outputs)
        self.position = 0  # tokens that `own` has read
        self.draft = NO_DRAFT
        self._right = 0.0
        self._expected = 0.0

    @property
    def factor(self) -> float:
        """How often its drafts are right, compared with those of all."""
        return min(OWN_FACTOR_MAX, (self._right + OWN_WEIGHT) / (self._expected + OWN_WEIGHT))

    def look(self, tokens: list[int], count: int, chances: Chances) -> list[float]:
        """Choose a draft of at most `count` tokens; the ladder of its chances."""
        self.draft, ladder = NO_DRAFT, list[float]()
        if count > 0 and self.position == len(tokens):
            self.draft = self.own.draft(count)
            ladder = self.ladder(self.draft, chances)
        if count > 0 and self.draft.matched < MATCH_CLEAR:
            other = self.others.draft(count)
            rungs = self.ladder(other, chances)
            if sum(rungs) > sum(ladder):
                self.draft, ladder = other, rungs
        return ladder

    def ladder(self, draft: Draft, chances: Chances) -> list[float]:
        """The chance that the first 1, 2, ... tokens of `draft` are all right."""
        rates, factor, matched = chances.rates, self.factor, draft.matched
        rungs, chance = [], 1.0
        for share in draft.shares:
            chance *= min(CHANCE_MAX, rates[kind_of(matched)] * share * factor)
            if chance < CHANCE_MIN:
                break
            rungs.append(chance)
            matched += 1
        return rungs

    def learn(self, emitted: Many[int], chances: Chances) -> None:
        """What the model said where `draft` was a guess."""
        draft, self.draft = self.draft, NO_DRAFT
        for depth, (guess, token) in enumerate(zip(draft.tokens, emitted, strict=False)):
            kind, share, right = kind_of(draft.matched + depth), draft.shares[depth], guess == token
            self._right = self._right * OWN_FADE + right
            self._expected = self._expected * OWN_FADE + min(CHANCE_MAX, chances.rates[kind] * share)
            chances.learn(kind, share, right=right)
            if not right:
                return


class Speculation(Protocol):
    """Who says what to draft, and is told what came of it."""

    def wish(self, asking: Many[Sequence], budget: int) -> dict[int, tuple[int, ...]]:
        """
        Drafts by sequence number, `budget` tokens at most.

        Args:
            asking: those who decode in this step, which are all; one row each.
        """
        ...

    def answered(self, sequence: Sequence, emitted: Many[int]) -> None:
        """The tokens that came out of the step for which `wish` was asked last."""
        ...

    def spent(self, rows: int, keys: float, spent_ns: int) -> None:
        """A step in which everybody decoded has taken that long; `keys` thousand were attended to."""
        ...

    def wasted_share(self, rows: int, keys: float, rejected: int) -> float:
        """The share of such a step's time that would have been saved without its `rejected` rows, 0..1."""
        ...

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """A sequence is over.  With `keep`, its output may help others of its tenant."""
        ...


class Speculator:
    """Implements `Speculation`: owns what is known of texts, of chances and of costs.  Same calls, same answers."""

    def __init__(self, drafts_max: int) -> None:
        assert drafts_max > 0
        self.costs = StepCosts()
        self.hopes: dict[int, float] = {}  # tokens expected from the last wishes, by sequence
        self._drafts_max = drafts_max
        self._chances = Chances()
        self._library = Library()
        self._watches: dict[int, Watch] = {}
        self._own_tokens = 0
        self._step = 0
        self._looked = 0  # the step of the last look
        self._interest = 0.2  # expected gain of late, where somebody looked and it was taken

    def wish(self, asking: Many[Sequence], budget: int) -> dict[int, tuple[int, ...]]:
        """What pays."""
        self._step += 1
        self.hopes = {}
        rows, keys = len(asking), sum(len(sequence.tokens) for sequence in asking) / 1000
        budget = min(budget, ROWS_MORE_MAX, rows * self._drafts_max)
        if budget < 1 or self.costs.seen(rows) < KNOWN:
            return {}  # What a plain step costs is the measure of everything.
        explores = not self._may_pay(rows, keys, budget, trusting=False)
        if explores and not self._may_pay(rows, keys, budget, trusting=True):
            return {}
        if self._step - self._looked < (EXPLORE_STEPS if explores else self._patience_steps(rows, keys)):
            return {}
        self._looked = self._step
        ladders = self._look(asking, READ_TOKENS_EXPLORING if explores else READ_TOKENS_MAX)
        return self._choose(asking, ladders, keys, budget, explores=explores)

    def answered(self, sequence: Sequence, emitted: Many[int]) -> None:
        """What was drafted, computed or not, was right or not."""
        watch = self._watches.get(sequence.number)
        if watch is not None and watch.draft.tokens:
            watch.learn(emitted, self._chances)

    def spent(self, rows: int, keys: float, spent_ns: int) -> None:
        """The costs learn."""
        self.costs.observe(rows, keys, spent_ns)

    def wasted_share(self, rows: int, keys: float, rejected: int) -> float:
        """By the model of the costs."""
        if not rejected:
            return 0.0
        kept = rows - rejected
        return min(1.0, max(0.0, 1 - self.costs.cost(kept, keys * kept / rows) / self.costs.cost(rows, keys)))

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Forget it, but for its output."""
        watch = self._watches.pop(sequence.number, None)
        if watch is not None:
            self._own_tokens -= watch.position
        if keep:
            self._library.of(sequence.request.tenant).add(tuple(sequence.outputs))

    def matched(self, sequence: Sequence) -> int:
        """How many of its last tokens stand before that which was found for it last."""
        watch = self._watches.get(sequence.number)
        return watch.draft.matched if watch is not None else 0

    def _may_pay(self, rows: int, keys: float, budget: int, *, trusting: bool) -> bool:
        """Whether drafts could pay if nearly all were right.  `trusting`: and if costs were as low as they may be."""
        least = (1 + GAIN_MIN) * rows / self.costs.cost(rows, keys)
        more = 1
        while more <= budget:
            cost = self.costs.cost(rows + more, keys * (rows + more) / rows)
            if trusting:
                cost *= 1 - self.costs.doubt(rows + more)
            if rows + BEST_CHANCE * more > least * cost:
                return True
            more *= 2
        return False

    def _patience_steps(self, rows: int, keys: float) -> int:
        """How many steps to wait between looks: one, but for the time that it takes where little is found."""
        step_ns = max(1.0, self.costs.expected_ns(rows, keys))
        look_ns, read_ns, allowed_ns = LOOKUP_NS * rows, READ_NS * rows, LOOKUP_SHARE * step_ns
        if self._interest >= DULL + (look_ns + read_ns) / step_ns:
            return 1
        steps = (look_ns + READ_NS * READ_TOKENS_MAX) / allowed_ns  # what is not read by then is not read
        if read_ns < allowed_ns:
            steps = min(steps, look_ns / (allowed_ns - read_ns))
        return min(EXPLORE_STEPS, 1 + int(steps))

    def _look(self, asking: Many[Sequence], left: int) -> list[list[float]]:
        """Look for a draft for each, reading `left` tokens at most; the chances of its first 1, 2, ... tokens."""
        ladders: list[list[float]] = []
        for sequence in asking:
            outputs = self._library.of(sequence.request.tenant)
            watch = self._watches.get(sequence.number)
            if watch is None:
                watch = self._watches[sequence.number] = Watch(outputs)
            left -= outputs.read(left)
            read = watch.own.read(sequence.tokens, max(0, min(left, OWN_TOKENS_MAX - self._own_tokens)))
            watch.position += read
            self._own_tokens += read
            left -= read + watch.others.read(sequence.tokens, READ_TOKENS_MAX) // 4  # which costs so much less
            count = min(self._drafts_max, sequence.request.tokens_max - sequence.output_length - 1)
            ladders.append(watch.look(sequence.tokens, count, self._chances))
        return ladders

    def _choose(
        self, asking: Many[Sequence], ladders: list[list[float]], keys: float, budget: int, *, explores: bool
    ) -> dict[int, tuple[int, ...]]:
        """The number of drafts of each that makes the step the best one."""
        steps = [(-chance, place) for place, ladder in enumerate(ladders) for chance in ladder]
        steps.sort()  # A ladder descends, so a deeper rung never comes before a higher one.
        rows = len(asking)
        least = self.costs.cost(rows, keys)
        plain = best = rows / least
        tokens, best_count = float(rows), 0
        for count, (chance, place) in enumerate(steps[:budget], 1):
            tokens -= chance
            keys += len(asking[place].tokens) / 1000
            cost = self.costs.cost(rows + count, keys)
            if explores:
                cost *= 1 - self.costs.doubt(rows + count)
            cost = max(cost, least * (1 + ROW_MIN * count))
            if tokens > best * cost:
                best, best_count = tokens / cost, count
            elif count - best_count > LADDER_MISSES_MAX:
                break
        gain = best / plain - 1
        self._interest += 0.2 * ((gain if gain >= GAIN_MIN else 0.0) - self._interest)
        if gain < GAIN_MIN:
            return {}
        chosen: dict[int, int] = {}
        for _, place in steps[:best_count]:
            chosen[place] = chosen.get(place, 0) + 1
        self.hopes = {asking[place].number: sum(ladders[place][:count]) for place, count in chosen.items()}
        return {
            asking[place].number: tuple(self._watches[asking[place].number].draft.tokens[:count])
            for place, count in chosen.items()
        }
