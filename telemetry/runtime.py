"""
What the Python runtime does to everybody at once: a late event loop, and pauses for garbage collection.

Both overlap with the states of requests, so they are metrics of their own and never a state.
"""

import asyncio
import contextlib
from typing import Protocol

from telemetry import clock
from telemetry.disturbance import GcPauses, RunDelay

LAG_PERIOD_S = 0.1
LOOP_LAG = "pellucid_event_loop_lag_seconds"
GC_PAUSE = "pellucid_gc_pause_seconds"


class Observer(Protocol):
    """Where measurements go: the hub."""

    def observe(self, metric: str, amount: int, labels: tuple[str, ...] = ()) -> None:
        """Add nanoseconds to a metric; from any thread, and never waiting."""


class RuntimeSampler:
    """Measures while it runs."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._sampling: asyncio.Task[None] | None = None
        self._pauses = GcPauses(self._on_pause)
        self._delay = RunDelay()
        self._lag_ns = 0
        self._due_ns = 0
        self.starved_ns = 0
        """How long a thread of this process could have run and had no processor, as of the last look."""

    @property
    def gc_pause_ns(self) -> int:
        """All pauses so far."""
        return self._pauses.total_ns

    def loop_lag_ns(self, now_ns: int) -> int:
        """By how much the loop was late so far, all times together; what it is late by now counts already."""
        return self._lag_ns + (max(0, now_ns - self._due_ns) if self._due_ns else 0)

    def start(self) -> None:
        """Begin to measure, on the running event loop."""
        assert self._sampling is None, "started twice"
        self._pauses.start()
        self._delay.look_for_threads()
        self._sampling = asyncio.create_task(self._sample_for_ever(), name="event loop lag")

    async def stop(self) -> None:
        """Measure no more."""
        if self._sampling is None:
            return
        self._pauses.stop()
        self._sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sampling
        self._sampling = None
        self._due_ns = 0
        self._delay.close()

    async def _sample_for_ever(self) -> None:
        while True:
            self._due_ns = clock.now_ns() + int(LAG_PERIOD_S * 1e9)
            await asyncio.sleep(LAG_PERIOD_S)
            late_ns = max(0, clock.now_ns() - self._due_ns)
            self._lag_ns += late_ns
            self.starved_ns += self._delay.take_ns()
            self._observer.observe(LOOP_LAG, late_ns)

    def _on_pause(self, generation: int, pause_ns: int) -> None:
        self._observer.observe(GC_PAUSE, pause_ns, (str(generation),))
