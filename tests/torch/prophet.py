"""
Speculation by one who has seen what will be said.
"""

import random
from collections.abc import Sequence as Many

from engine.sequence import Sequence

VOCAB = 259  # wrong drafts are below it, so they are tokens of every model here


class Prophet:
    """Implements `Speculation`: knows what will be said, and is right about it as often as it likes."""

    def __init__(self, future: dict[str, list[int]], seed: int) -> None:
        self._future = future
        self._random = random.Random(seed)
        self.drafted = self.accepted = 0

    def wish(self, asking: Many[Sequence], budget: int) -> dict[int, tuple[int, ...]]:
        """Of each some of what comes next, in half of the cases with one token changed."""
        wishes: dict[int, tuple[int, ...]] = {}
        for sequence in asking:
            left = sequence.request.tokens_max - sequence.output_length - 1
            count = min(budget, left, self._random.choice((0, 1, 3, 9)))
            start = sequence.output_length
            drafts = self._future[sequence.request.request_id][start : start + count]
            drafts += [self._random.randrange(VOCAB) for _ in range(count - len(drafts))]  # beyond the end
            if drafts and self._random.random() < 0.5:
                drafts[self._random.randrange(count)] = self._random.randrange(VOCAB)
            if drafts:
                wishes[sequence.number] = tuple(drafts)
                budget -= count
                self.drafted += count
        return wishes

    def answered(self, sequence: Sequence, emitted: Many[int]) -> None:
        """Counted."""
        del sequence
        self.accepted += len(emitted) - 1

    def spent(self, rows: int, keys: float, spent_ns: int) -> None:
        """It does not matter."""

    def wasted_share(self, rows: int, keys: float, rejected: int) -> float:
        """By rows."""
        del keys
        return rejected / rows

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """It does not matter."""
