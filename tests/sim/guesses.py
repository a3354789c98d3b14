"""
Speculation by someone who knows the future, and tells it when he likes: drafts that come true, in part, or not at all.
"""

import random
from collections.abc import Sequence as Many

from engine.device.fake import next_token
from engine.draft_policy import READ_ROWS_MAX, Candidate, Step
from engine.plan import SampleSpec
from engine.sequence import Sequence, uniform


class Guesser:
    """Implements `engine.speculate.Speculation`.  Same seed, same guesses."""

    def __init__(self, seed: int, *, drafts_max: int, vocab_size: int) -> None:
        self._random = random.Random(seed)
        self._drafts_max = drafts_max
        self._vocab_size = vocab_size
        self.told = 0  # emitted tokens that were reported
        self.ended: list[int] = []

    def wish(self, asking: Many[Sequence], budget: int) -> dict[int, tuple[int, ...]]:
        """Within the budget, some drafts for some."""
        wishes: dict[int, tuple[int, ...]] = {}
        for sequence in asking:
            left = sequence.request.tokens_max - sequence.output_length - 1
            count = min(budget, left, self._random.choice((0, 1, 2, self._drafts_max)))
            if count > 0:
                wishes[sequence.number] = self._guess(sequence, count)
                budget -= count
        return wishes

    def answered(self, sequence: Sequence, emitted: Many[int]) -> None:
        """Counted."""
        del sequence
        self.told += len(emitted)

    def spent(self, rows: int, keys: float, spent_ns: int) -> None:
        """Plausible, at least."""
        assert rows > 0 and keys > 0 and spent_ns > 0

    def wasted_share(self, rows: int, keys: float, rejected: int) -> float:
        """By rows."""
        assert 0 <= rejected < rows and keys > 0
        return rejected / rows

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Each one ends once."""
        del keep
        assert sequence.number not in self.ended
        self.ended.append(sequence.number)

    def _guess(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """The true continuation up to a place drawn by lot, then anything."""
        request, known = sequence.request, list(sequence.tokens)
        right = self._random.choice((0, count, self._random.randrange(count + 1)))
        for row in range(count):
            token = self._random.randrange(self._vocab_size)
            if row < right:
                banned = request.stop_ids if sequence.output_length + row < request.tokens_min else ()
                number = uniform(request.sampling.seed, len(known))
                spec = SampleSpec(sampling=request.sampling, uniforms=(number,), banned=banned)
                token = next_token(known, spec, vocab_size=self._vocab_size)
            known.append(token)
        return tuple(known[len(sequence.tokens) :])


class Generous:
    """Implements `engine.draft_policy.Policy`: asks for anything, whatever it costs.  Same seed, same questions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.right = self.tried = 0

    def offers(self, candidates: Many[Candidate], step: Step) -> dict[int, int]:
        """Some tokens for some, also more than the step has room for."""
        del step
        offers: dict[int, int] = {}
        for one in candidates:
            assert 0 < one.unread <= one.length and one.count_max > 0
            if self._random.random() < 0.8:
                read = one.unread <= READ_ROWS_MAX and self._random.random() < 0.9
                offers[one.number] = self._random.randrange(1, one.count_max + 1) if read else 0
        return offers

    def chance(self, right: float, tried: float) -> float:
        """It does not matter."""
        assert 0 <= right <= tried
        return 0.5

    def learned(self, *, right: bool) -> None:
        """Counted."""
        self.right += right
        self.tried += 1

    def passed(self, rows: int, keys: float, spent_ns: int) -> None:
        """Plausible, at least."""
        assert rows > 0 and keys > 0 and spent_ns >= 0

    def stepped(self, rows: int, keys: float, spent_ns: int, *, guessed: int, accepted: int) -> None:
        """Likewise."""
        assert accepted >= 0 and 0 <= guessed < rows and keys > 0 and spent_ns > 0
