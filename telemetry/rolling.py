"""
What is unusual lately: quantiles of the last so many amounts.
"""

from bisect import bisect_left, insort
from collections import deque

FEW = 100
"""Of fewer amounts nobody can say what is unusual."""


class Rolling:
    """The last `amounts_max` amounts, in order of size as well."""

    __slots__ = ("_amounts_max", "_latest", "_sorted")

    def __init__(self, *, amounts_max: int) -> None:
        assert amounts_max >= FEW
        self._amounts_max = amounts_max
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, amount: int) -> None:
        """One more; the oldest is forgotten."""
        if len(self._latest) == self._amounts_max:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._latest.append(amount)
        insort(self._sorted, amount)

    def is_above(self, amount: int, quantile: float) -> bool:
        """Whether it is larger than that share of the others; of a FEW nothing is."""
        return len(self._sorted) >= FEW and amount > self._sorted[int(quantile * (len(self._sorted) - 1))]
