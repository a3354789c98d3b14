"""
The queue, and whose turn it is: the Virtual Token Counter (Sheng et al. 2024, "Fairness in Serving Large Language
Models", algorithm 2, with the weights of section 4.3), for each priority class on its own.

A share (an API key; all requests without one) has a counter of the tokens that it was served, over its weight.  The
waiting share with the least goes first, its own requests in order of arrival.  One whose requests had all been let in
is lifted to the least of those that wait before it waits again: having been idle is no credit.

What counts: at its admission all of a prompt that is not cached, so that the next choice knows of it, and each token
of output as it comes, OUTPUT_COST times.  Cached tokens cost the others no time; recompute is not the request's doing.

Beyond the paper: a share that is behind what it would be lifted to is forgotten once it has no request here, which
nobody can tell; and all counters are, once their class has none.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import groupby

from engine.sequence import Sequence

OUTPUT_COST = 2
"""Prompt tokens that one of output counts for: w_q over w_p, as in the paper's experiments."""
UNITS = 1_000_000
"""Of a counter, for a prompt token at weight 1: integers, so that a replay comes to the same on any machine."""
DEBTORS_MAX = 1024
"""Shares of a class without a request here that are remembered because they have had more than others."""


@dataclass(slots=True)
class Account:
    """One share in one class."""

    units: int = 0
    """Served, over the weight."""
    waiting: int = 0
    """Sequences."""
    here: int = 0
    """Those that run, too."""


@dataclass(slots=True)
class Book:
    """The shares of one class."""

    accounts: dict[str, Account] = field(default_factory=dict)
    last: Account = field(default_factory=Account)
    """Whose sequence has left the queue last."""

    def level(self) -> int:
        """What a share that comes back is lifted to.  It never falls."""
        return min((one.units for one in self.accounts.values() if one.waiting), default=self.last.units)

    def forget(self, debtors_max: int) -> None:
        """Drop who would come back as if never seen; and of too many others the one that has had least."""
        level = self.level()
        self.accounts = {share: one for share, one in self.accounts.items() if one.here or one.units > level}
        debtors = [share for share, one in self.accounts.items() if not one.here]
        if len(debtors) > debtors_max:
            del self.accounts[min(debtors, key=lambda share: self.accounts[share].units)]


class FairQueue:
    """The waiting sequences, and the accounts of all sequences that are here.  Iterates in order of arrival."""

    def __init__(self, *, debtors_max: int = DEBTORS_MAX) -> None:
        self.books: dict[int, Book] = {}  # by priority
        self._debtors_max = debtors_max
        self._line: list[Sequence] = []  # in order

    def __len__(self) -> int:
        """How many wait."""
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of priority and arrival."""
        return iter(self._line)

    def turns(self) -> Iterator[Sequence]:
        """Each that waits now, once, in the order in which they may go; what happens to one decides who is next."""
        for priority, members in groupby(list(self._line), key=lambda one: one.request.priority):
            lines: dict[str, deque[Sequence]] = {}
            for sequence in members:
                lines.setdefault(sequence.request.share, deque()).append(sequence)
            accounts = self.books[priority].accounts
            heap = [(accounts[share].units, line[0].number, share) for share, line in lines.items()]
            heapify(heap)
            while heap:
                share = heap[0][2]
                line, account = lines[share], accounts[share]
                yield line.popleft()
                if line:
                    heapreplace(heap, (account.units, line[0].number, share))
                else:
                    heappop(heap)

    def add(self, sequence: Sequence) -> None:
        """A sequence waits: a new one, or one that was preempted."""
        book = self.books.setdefault(sequence.request.priority, Book())
        account = book.accounts.setdefault(sequence.request.share, Account())
        if not account.waiting:
            account.units = max(account.units, book.level())
        account.waiting += 1
        account.here += not sequence.preemptions
        insort(self._line, sequence, key=lambda one: one.order)

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer."""
        self._line.remove(sequence)
        book = self.books[sequence.request.priority]
        book.last = book.accounts[sequence.request.share]
        book.last.waiting -= 1

    def admit(self, sequence: Sequence, tokens: int) -> None:
        """It is let in, with so many tokens to compute.  Those are paid for once."""
        self.remove(sequence)
        if not sequence.preemptions:
            self._charge(sequence, tokens)

    def emitted(self, sequence: Sequence, tokens: int) -> None:
        """So many more tokens of output."""
        self._charge(sequence, tokens * OUTPUT_COST)

    def end(self, sequence: Sequence) -> None:
        """It is here no longer.  To be called when it does not wait any more."""
        book = self.books[sequence.request.priority]
        book.accounts[sequence.request.share].here -= 1
        book.forget(self._debtors_max)
        if not any(one.here for one in book.accounts.values()):
            del self.books[sequence.request.priority]

    def _charge(self, sequence: Sequence, tokens: int) -> None:
        account = self.books[sequence.request.priority].accounts[sequence.request.share]
        account.units += tokens * UNITS // sequence.request.weight

    def check(self, running: list[Sequence]) -> None:
        """Every sequence is in one account.  O(sequences + shares): for tests."""
        assert self._line == sorted(self._line, key=lambda one: one.order)
        for priority, book in self.books.items():
            assert sum(not one.here for one in book.accounts.values()) <= self._debtors_max
            for share, account in book.accounts.items():
                waiting, here = (
                    sum((one.request.priority, one.request.share) == (priority, share) for one in many)
                    for many in (self._line, [*self._line, *running])
                )
                assert (account.waiting, account.here) == (waiting, here)
        everybody = [*self._line, *running]
        assert sum(one.here for book in self.books.values() for one in book.accounts.values()) == len(everybody)
