"""
A collective whose wire is slow: it delays each exchange after all ranks have come, and before this one leaves.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.device.ranks.collective import Collective, Stamps


@dataclass
class Delaying:
    """`inner`, and `delay_s` on top of each exchange."""

    inner: Collective
    delay_s: float

    @property
    def kind(self) -> str:
        """As the inner one's."""
        return self.inner.kind

    @property
    def rank(self) -> int:
        """As the inner one's."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """As the inner one's."""
        return self.inner.size

    @property
    def clock_error_ns(self) -> int:
        """As the inner one's."""
        return self.inner.clock_error_ns

    def sum(self, values: Tensor) -> Stamps:
        """As the inner one's, later."""
        return self._late(self.inner.sum(values))

    def gather(self, values: Tensor, counts: Sequence[int]) -> tuple[list[Tensor], Stamps]:
        """As the inner one's, later."""
        gathered, stamps = self.inner.gather(values, counts)
        return gathered, self._late(stamps)

    def send(self, values: Tensor, receiver: int) -> Stamps:
        """As the inner one's, later."""
        return self._late(self.inner.send(values, receiver))

    def receive(self, values: Tensor, sender: int) -> Stamps:
        """As the inner one's, later."""
        return self._late(self.inner.receive(values, sender))

    def close(self) -> None:
        """At once."""
        self.inner.close()

    def _late(self, stamps: Stamps) -> Stamps:
        time.sleep(self.delay_s)
        return Stamps(stamps.entered_ns, time.monotonic_ns())
