"""
How ranks exchange numbers, behind one Protocol.

    shared_memory   ranks on one host            gloo   ranks anywhere, over torch.distributed

All ranks call the same methods in the same order with the same sizes.  A sum is made in float32 by each rank for
itself, always in the order of the ranks, so that all of them have the same bits, and have them again on every run
(DESIGN 5).  No call waits for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.device.errors import DeviceLost


class RankLost(DeviceLost):
    """A rank did not come to an exchange in time, or is gone: its group can compute nothing any more."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Stamps:
    """When the ranks of one exchange came, and when this one left, in ns of this rank's monotonic clock."""

    entered_ns: Sequence[int]  # of each rank that takes part, by rank; 0: it takes no part
    left_ns: int


class Collective(Protocol):
    """One rank's way to the others."""

    @property
    def kind(self) -> str:
        """For records: shared-memory, gloo."""
        ...

    @property
    def rank(self) -> int:
        """Which one this is; 0 leads."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def clock_error_ns(self) -> int:
        """By how much the stamps of ranks on other hosts may be wrong; 0 where all read one clock."""
        ...

    def sum(self, values: Tensor) -> Stamps:
        """Sum float32 `values`, contiguous and of any shape, over all ranks, in place.  Raises RankLost."""
        ...

    def gather(self, values: Tensor, counts: Sequence[int]) -> tuple[list[Tensor], Stamps]:
        """
        Bring the `counts[rank]` float32 `values` of each rank to rank 0.  Raises RankLost.

        Returns: on rank 0 those of all ranks, each [counts[rank]], whose memory is the caller's; elsewhere none.
        """
        ...

    def send(self, values: Tensor, receiver: int) -> Stamps:
        """Hand float32 `values`, contiguous, to a rank of a higher number.  Raises RankLost."""
        ...

    def receive(self, values: Tensor, sender: int) -> Stamps:
        """Fill `values` with what a rank of a lower number sends.  Raises RankLost."""
        ...

    def close(self) -> None:
        """Let go of what it holds; the others notice when they next wait for this one."""
        ...
