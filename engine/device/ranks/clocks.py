"""
What the clocks of other ranks say, in terms of this one's.

Ranks of one host read one clock.  Any two others estimate the offset of their clocks by ping-pong (Cristian 1989): a
rank asks another for its clock; with the answer `t` between its own readings a and b, the other clock is ahead by
`t - (a + b) / 2`, wrong by at most half of `b - a`.  Of several round trips the shortest is best.  Between estimates
clocks drift apart, by DRIFT_PPM at the most where they are kept by NTP (RFC 5905's PHI).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

ROUND_TRIPS = 8
INTERVAL_NS = 10_000_000_000
DRIFT_PPM = 15


class Link(Protocol):
    """What carries the stamps."""

    def exchange_stamp(self, stamp_ns: int, *, receiver: int = -1, sender: int = -1) -> int:
        """Hand a stamp to one rank, or take one from it.  Raises RankLost."""
        ...


class Clocks:
    """The offsets of the other ranks' clocks to this one, and their error."""

    def __init__(self, rank: int, ids: Sequence[str], clock: Callable[[], int]) -> None:
        self._rank = rank
        self._ids = ids
        self._clock = clock
        self._ahead_ns = [0] * len(ids)
        self._estimate_error_ns = 0
        self._estimated_ns = clock()
        self._leader_ns = 0

    @property
    def error_ns(self) -> int:
        """The largest of what stamps of others may be wrong by now; 0 where all ranks share this one's clock."""
        if self._estimate_error_ns == 0:
            return 0
        return self._estimate_error_ns + (self._clock() - self._estimated_ns) * DRIFT_PPM // 1_000_000

    def here(self, stamp_ns: int, rank: int) -> int:
        """A stamp of another rank, on this one's clock."""
        return stamp_ns - self._ahead_ns[rank]

    def outdated(self, leader_ns: int) -> bool:
        """Whether to estimate anew; `leader_ns`: when rank 0 came to an exchange of all ranks, on rank 0's clock."""
        if self._leader_ns == 0:
            self._leader_ns = leader_ns
        if not self._differ or leader_ns - self._leader_ns < INTERVAL_NS:
            return False
        self._leader_ns = leader_ns
        return True

    def estimate(self, link: Link) -> None:
        """Ask each rank on another clock; all ranks call this at the same place.  Raises RankLost."""
        self._estimated_ns = self._clock()
        self._estimate_error_ns = 0
        for asks in range(len(self._ids)):
            for answers in range(asks):
                if self._shared(asks, answers):
                    continue
                if self._rank == asks:
                    self._ask(link, answers)
                elif self._rank == answers:
                    self._answer(link, asks)

    def _ask(self, link: Link, other: int) -> None:
        best_ns, ahead_ns = 0, 0
        for trip in range(ROUND_TRIPS):
            asked_ns = self._clock()
            link.exchange_stamp(asked_ns, receiver=other)
            answer_ns = link.exchange_stamp(0, sender=other)
            trip_ns = self._clock() - asked_ns
            if trip == 0 or trip_ns < best_ns:
                best_ns, ahead_ns = trip_ns, answer_ns - (asked_ns + trip_ns // 2)
        self._learn(other, ahead_ns, best_ns)
        link.exchange_stamp(ahead_ns, receiver=other)
        link.exchange_stamp(best_ns, receiver=other)

    def _answer(self, link: Link, other: int) -> None:
        for _ in range(ROUND_TRIPS):
            link.exchange_stamp(0, sender=other)
            link.exchange_stamp(self._clock(), receiver=other)
        ahead_ns = link.exchange_stamp(0, sender=other)
        self._learn(other, -ahead_ns, link.exchange_stamp(0, sender=other))

    def _learn(self, other: int, ahead_ns: int, trip_ns: int) -> None:
        self._ahead_ns[other] = ahead_ns
        # Rounded up, and one more for the midpoint that was rounded down.
        self._estimate_error_ns = max(self._estimate_error_ns, (trip_ns + 1) // 2 + 1)

    @property
    def _differ(self) -> bool:
        return not all(self._shared(0, rank) for rank in range(1, len(self._ids)))

    def _shared(self, one: int, other: int) -> bool:
        return bool(self._ids[one]) and self._ids[one] == self._ids[other]
