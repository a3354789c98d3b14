"""
Speculation by someone who knows the future, and tells it when he likes: drafts that come true, in part, or not at all.
"""

import random
from collections.abc import Sequence as Many

from engine.device.fake import next_token
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
