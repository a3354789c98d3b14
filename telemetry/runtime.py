"""
What the Python runtime does to everybody at once: a late event loop, and pauses for garbage collection.

Both overlap with the states of requests, so they are metrics of their own and never a state.
"""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import NamedTuple, Protocol

from telemetry import clock
from telemetry.disturbance import GcPauses, RunDelay

LAG_PERIOD_S = 0.1
LATE_NS = 1_000_000
"""From here on it is asked why the loop is late just now: that is a system call."""
LOOP_LAG = "pellucid_event_loop_lag_seconds"
GC_PAUSE = "pellucid_gc_pause_seconds"


class Observer(Protocol):
    """Where measurements go: the hub."""

    def observe(self, metric: str, amount: int, labels: tuple[str, ...] = ()) -> None:
        """Add nanoseconds to a metric; from any thread, and never waiting."""


class Overlaps(NamedTuple):
    """Times that overlap with the states of requests, and not with each other."""

    gc_pause_ns: int
    loop_lag_ns: int
    """By how much the event loop was late for neither of the other reasons: something held it up."""
    starved_ns: int
    late_ns: int
    """As long as something has held the event loop up just now: so long may have lain unread what it takes up next."""


class RuntimeSampler:
    """Measures while it runs."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._sampling: asyncio.Task[None] | None = None
        self._pauses = GcPauses(self._on_pause)
        self._delay = RunDelay()
        self._lag_ns = 0
        self._due_ns = 0  # when the loop should wake up at the end of this period; 0: there is none
        self._collected_ns = self._starved_ns = 0  # as they were when it began
        self.starved_ns = 0
        """How long the thread of the event loop could have run and had no processor, as of the last look."""

    def overlaps(self, now_ns: int) -> Overlaps:
        """All of it so far; by what the loop is late just now counts already."""
        late_ns = self._late_ns(now_ns)
        held_ns = self._held_ns(late_ns) if late_ns >= LATE_NS else 0
        return Overlaps(self._pauses.total_ns, self._lag_ns + held_ns, self.starved_ns, held_ns)

    def start(self) -> None:
        """Begin to measure, on the running event loop."""
        assert self._sampling is None, "started twice"
        self._pauses.start()
        self._delay.look_at_this_thread()
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
            self._collected_ns, self._starved_ns = self._pauses.total_ns, self.starved_ns
            self._due_ns = clock.now_ns() + int(LAG_PERIOD_S * 1e9)
            await asyncio.sleep(LAG_PERIOD_S)
            late_ns = self._late_ns(clock.now_ns())
            self._lag_ns += self._held_ns(late_ns)
            self._observer.observe(LOOP_LAG, late_ns)

    def _late_ns(self, now_ns: int) -> int:
        return max(0, now_ns - self._due_ns) if self._due_ns else 0

    def _held_ns(self, late_ns: int) -> int:
        """Of a lateness, what neither collections nor the want of a processor in this period explain."""
        self.starved_ns += self._delay.take_ns()
        elsewhere_ns = self._pauses.total_ns - self._collected_ns + self.starved_ns - self._starved_ns
        return max(0, late_ns - elsewhere_ns)

    def _on_pause(self, generation: int, pause_ns: int) -> None:
        self._observer.observe(GC_PAUSE, pause_ns, (str(generation),))


def loop_tasks() -> int:
    """Tasks of the running event loop; 0 outside of one."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
