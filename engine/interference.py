"""
Who was served instead: the time in which a sequence stalled, shared out among those that the step served.

By their rows, in whole nanoseconds, so that the shares sum to the time exactly.  Only so many are named: what is left
is of further ones.  Naming is by Misra and Gries (1982): whoever had the least is given up for a newcomer, so nobody
with more than a ninth of the time goes unnamed.
"""

from collections.abc import Mapping, Sequence

NAMED_MAX = 8
FURTHER = ""
"""The name of all who are not named."""


def shares(total_ns: int, weights: Sequence[int]) -> list[int]:
    """`total_ns` by weight, in integers that sum to it: each gets the difference of rounded running sums."""
    whole, running, given = sum(weights), 0, 0
    parts: list[int] = []
    for weight in weights:
        running += weight
        parts.append(total_ns * running // whole - given)
        given += parts[-1]
    return parts


class Interference:
    """Nanoseconds by request."""

    __slots__ = ("_further_ns", "_named")

    def __init__(self) -> None:
        self._named: dict[str, int] = {}
        self._further_ns = 0

    def add(self, stalled_ns: int, served: Mapping[str, int]) -> None:
        """For so long these were served instead, with so many rows each; where nobody was, it has no name."""
        if not served:
            self._further_ns += stalled_ns
            return
        for name, share_ns in zip(served, shares(stalled_ns, list(served.values())), strict=True):
            self._named[name] = self._named.get(name, 0) + share_ns
            if len(self._named) > NAMED_MAX:
                least = min(self._named, key=self._named.__getitem__)
                self._further_ns += self._named.pop(least)

    def shown(self) -> dict[str, int]:
        """The named ones, most first, and the further ones."""
        named = sorted(self._named.items(), key=lambda one: -one[1])
        return dict(named) | ({FURTHER: self._further_ns} if self._further_ns else {})
