"""
The interconnect book: what one rank waited for in the exchanges of a step, and whom.

With entries a_r of the ranks and this rank's exit e, on one clock: it waited `max(a) - a_own` for ranks that came
later, and transferred `e - max(a)`.  Both are differences of stamps, so they sum to the time of the exchange exactly.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.device.ranks.collective import Collective, Stamps
from telemetry.records import Exchange, InterconnectBook


class Interconnect:
    """A collective whose exchanges are booked."""

    def __init__(self, collective: Collective, *, stages: int = 1) -> None:
        """`stages`: so many equal groups of ranks compute one after the other, and rank 0 waits for the last one."""
        assert collective.size % stages == 0
        self.collective = collective
        self.stages = stages
        self._stage_ranks = collective.size // stages
        self._open()

    @property
    def rank(self) -> int:
        """Which one this is."""
        return self.collective.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.collective.size

    @property
    def stage(self) -> int:
        """Of the pipeline, that this rank is in."""
        return self.rank // self._stage_ranks

    def sum(self, values: Tensor, exchange: str) -> None:
        """Sum over ranks in place.  Raises RankLost."""
        received = values.nbytes * (self.size - 1)
        self.book(exchange, self.collective.sum(values), received)

    def gather(self, values: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """What each rank has, on rank 0.  Raises RankLost."""
        gathered, stamps = self.collective.gather(values, counts)
        if self.stages > 1:  # That is no straggler, but the bubble.
            last_ns = min(max(stamps.entered_ns), stamps.left_ns)
            self._bubble_ns += last_ns - stamps.entered_ns[self.rank]
            stamps = self._alone(last_ns, stamps.left_ns)
        self.book("head", stamps, sum(one.nbytes for one in gathered[1:]))
        return gathered

    def send(self, values: Tensor) -> None:
        """To the rank of the same place in the next stage.  Raises RankLost."""
        stamps = self.collective.send(values, self.rank + self._stage_ranks)
        self.book("stage", self._alone(stamps.entered_ns[self.rank], stamps.left_ns), values.nbytes)

    def receive(self, values: Tensor) -> None:
        """From that of the stage before.  Raises RankLost."""
        self.book("stage", self.collective.receive(values, self.rank - self._stage_ranks), values.nbytes)

    def told(self, began_ns: int, ended_ns: int, sent_bytes: int) -> None:
        """Rank 0 has told the others what to do."""
        self.book("plan", self._alone(began_ns, ended_ns), sent_bytes)

    def _alone(self, entered_ns: int, left_ns: int) -> Stamps:
        """Of an exchange for which this rank waited for nobody."""
        return Stamps([entered_ns if rank == self.rank else 0 for rank in range(self.size)], left_ns)

    def book(self, exchange: str, stamps: Stamps, received_bytes: int) -> None:
        """Write an exchange of this step down: of telemetry.records.EXCHANGES."""
        entered = stamps.entered_ns
        last_ns = max(entered)
        own_ns = entered[self.rank]
        # Stamps of other hosts are estimates: a rank cannot have waited past its own exit.
        last_ns = max(own_ns, min(last_ns, stamps.left_ns))
        tally = self._tallies.setdefault(exchange, [0, 0, 0, 0])
        tally[0] += 1
        tally[1] += last_ns - own_ns
        tally[2] += stamps.left_ns - last_ns
        tally[3] += received_bytes
        for rank, entered_ns in enumerate(entered):
            if entered_ns:
                self._met[rank] = True
                self._rank_wait_ns[rank] += max(0, last_ns - entered_ns)

    def book_all(self, exchanges: Sequence[str], stamps: NDArray[np.int64], received_bytes: int) -> None:
        """
        Write many down at once, as `book` does: `stamps` [n, len(exchanges), size + 1], of each one the entries of all
        ranks and then the exit of this one; each received so many bytes.
        """
        entered_ns, left_ns = stamps[..., :-1], stamps[..., -1]
        own_ns = entered_ns[..., self.rank]
        last_ns = np.maximum(own_ns, np.minimum(entered_ns.max(-1), left_ns))
        waits, transfers = (last_ns - own_ns).sum(0).tolist(), (left_ns - last_ns).sum(0).tolist()
        for exchange, wait_ns, transfer_ns in zip(exchanges, waits, transfers, strict=True):
            tally = self._tallies.setdefault(exchange, [0, 0, 0, 0])
            for place, more in enumerate((len(stamps), wait_ns, transfer_ns, len(stamps) * received_bytes)):
                tally[place] += more
        came = entered_ns != 0
        waited_ns = np.where(came, np.maximum(0, last_ns[..., None] - entered_ns), 0)
        for rank, (met, wait_ns) in enumerate(zip(came.any((0, 1)), waited_ns.sum((0, 1)).tolist(), strict=True)):
            self._met[rank] = self._met[rank] or bool(met)
            self._rank_wait_ns[rank] += wait_ns

    def take(self, other: "Interconnect") -> None:
        """Book what ranks 0 .. of `other`, which are the same ranks here, have exchanged among themselves."""
        for exchange, counts in other._tallies.items():
            tally = self._tallies.setdefault(exchange, [0, 0, 0, 0])
            for place, more in enumerate(counts):
                tally[place] += more
        for rank in range(other.size):
            self._met[rank] = self._met[rank] or other._met[rank]
            self._rank_wait_ns[rank] += other._rank_wait_ns[rank]
        other._open()

    def close_book(self) -> InterconnectBook:
        """The book of the step that ends; the next one begins."""
        exchanges = {name: Exchange(*tally) for name, tally in self._tallies.items()}
        waits = tuple(self._rank_wait_ns)
        known = exchanges.values()
        book = InterconnectBook(
            kind=self.collective.kind,
            wait_ns=sum(one.wait_ns for one in known),
            transfer_ns=sum(one.transfer_ns for one in known),
            bubble_ns=self._bubble_ns,
            bytes=sum(one.bytes for one in known),
            straggler=self._straggler(),
            exchanges=exchanges,
            rank_wait_ns=waits,
            clock_error_ns=self.collective.clock_error_ns,
        )
        self._open()
        return book

    def _straggler(self) -> int:
        """Who waited least of the ranks that this one met; -1 where none waited longer than another."""
        waits = [(wait_ns, rank) for rank, wait_ns in enumerate(self._rank_wait_ns) if self._met[rank]]
        if not waits or min(waits)[0] == max(waits)[0]:
            return -1
        return min(waits)[1]

    def _open(self) -> None:
        self._tallies: dict[str, list[int]] = {}
        self._bubble_ns = 0
        self._rank_wait_ns = [0] * self.collective.size
        self._met = [False] * self.collective.size
