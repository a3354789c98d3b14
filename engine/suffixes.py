"""
Every substring of a growing text, and what followed it: the smallest automaton of all suffixes, built token by token
(Blumer et al. 1985), in time and memory that are linear in the text.

A state is a set of substrings that end at the same places.  `length` is that of the longest of them, `link` leads to
the longest suffix of these that is in another state, `counts` says at how many places they end.  So the longest suffix
of the text that has been there before is the link of the last state: no search.

Counts are kept for the `contexts_max` longest suffixes of the text at each token, which bounds the work of a token; a
count is therefore exact for long contexts, and too low for short ones that are always part of longer ones.  Beside
them, each state knows its most frequent continuation, the latest one among equals.
"""

from array import array

ROOT = 0
CONTEXTS_MAX = 4


class SuffixAutomaton:
    """The text so far.  Same tokens, same answers."""

    __slots__ = ("_best", "_contexts_max", "_next", "counts", "last", "length", "link", "size")

    def __init__(self, contexts_max: int = CONTEXTS_MAX) -> None:
        self._contexts_max = contexts_max
        self._next: list[dict[int, int]] = [{}]  # state -> token -> state
        self._best = array("q", [-1])  # state -> its most frequent continuation; -1: none, yet
        self.length = array("i", [0])
        self.link = array("i", [-1])
        self.counts = array("i", [0])
        self.last = ROOT  # the state of the whole text
        self.size = 0  # tokens

    @property
    def recurring(self) -> int:
        """The state of the longest suffix of the text that has been there before."""
        return self.link[self.last] if self.size else ROOT

    def extend(self, token: int) -> None:
        """One more token.  Amortized O(1)."""
        following, length, link = self._next, self.length, self.link
        before = self.last
        state = self._add({}, length[before] + 1, ROOT, 1, -1)
        walker = before
        while walker >= 0 and token not in following[walker]:
            following[walker][token] = state
            walker = link[walker]
        self._best[before] = token  # the whole text was never followed by anything
        if walker >= 0:
            same = following[walker][token]
            link[state] = same if length[same] == length[walker] + 1 else self._split(walker, token, same)
        self.last = state
        self.size += 1
        self._count(before, token)

    def follow(self, state: int, tokens_max: int) -> tuple[list[int], list[float]]:
        """What came most often behind `state` and its continuations, and each one's share of what came."""
        following, counts, best = self._next, self.counts, self._best
        tokens: list[int] = []
        shares: list[float] = []
        # The text itself ends here for the time being: this one place has had no continuation.
        places = counts[state] - (state == self.recurring)
        while len(tokens) < tokens_max:
            token = best[state]
            if token < 0:
                break
            state = following[state][token]
            tokens.append(token)
            shares.append(min(1.0, counts[state] / places) if places > 0 else 1.0)
            places = counts[state]
        return tokens, shares

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """
        The longest suffix of (a match of `length` that ends in `state`) + `token` that is in the text, and its length.

        The match may be from before the text has grown: its state may have been split since.
        """
        following, link = self._next, self.link
        state = self.settle(state, length)
        while token not in following[state]:
            state = link[state]
            if state < 0:
                return ROOT, 0
            length = self.length[state]
        return following[state][token], length + 1

    def settle(self, state: int, length: int) -> int:
        """Where a match of `length` belongs that was in `state` once."""
        link = self.link
        while state != ROOT and length <= self.length[link[state]]:
            state = link[state]
        return state

    def continuations(self, state: int) -> dict[int, int]:
        """Which tokens followed, and how often: for tests."""
        return {token: self.counts[target] for token, target in self._next[state].items()}

    def _add(self, following: dict[int, int], length: int, link: int, count: int, best: int) -> int:
        self._next.append(following)
        self.length.append(length)
        self.link.append(link)
        self.counts.append(count)
        self._best.append(best)
        return len(self._next) - 1

    def _split(self, walker: int, token: int, same: int) -> int:
        """The shorter substrings of `same` now end at one place more than the longer ones: they get a state."""
        following, link = self._next, self.link
        clone = self._add(
            following[same].copy(), self.length[walker] + 1, link[same], self.counts[same], self._best[same]
        )
        while walker >= 0 and following[walker].get(token) == same:
            following[walker][token] = clone
            walker = link[walker]
        link[same] = clone
        return clone

    def _count(self, before: int, token: int) -> None:
        """The suffixes of the text end at one place more; those of the text before have one more continuation."""
        counts, link, best, following = self.counts, self.link, self._best, self._next
        state = link[self.last]
        for _ in range(self._contexts_max):
            if state <= ROOT:
                break
            counts[state] += 1
            state = link[state]
        state = link[before]
        for _ in range(self._contexts_max):
            if state <= ROOT:
                break
            favourite = best[state]
            targets = following[state]
            if favourite < 0 or counts[targets[token]] >= counts[targets[favourite]]:
                best[state] = token
            state = link[state]
