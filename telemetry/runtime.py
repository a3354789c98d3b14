"""
What the Python runtime does to everybody at once: a late event loop, and pauses for garbage collection.

Both overlap with the states of requests, so they are metrics of their own and never a state.
"""

import asyncio
import contextlib
import gc
from typing import Literal, Protocol

from telemetry import clock

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
        self._gc_started_ns = 0

    def start(self) -> None:
        """Begin to measure, on the running event loop."""
        assert self._sampling is None, "started twice"
        gc.callbacks.append(self._on_gc)
        self._sampling = asyncio.create_task(self._sample_for_ever(), name="event loop lag")

    async def stop(self) -> None:
        """Measure no more."""
        if self._sampling is None:
            return
        gc.callbacks.remove(self._on_gc)
        self._sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sampling
        self._sampling = None

    async def _sample_for_ever(self) -> None:
        while True:
            due_ns = clock.now_ns() + int(LAG_PERIOD_S * 1e9)
            await asyncio.sleep(LAG_PERIOD_S)
            self._observer.observe(LOOP_LAG, max(0, clock.now_ns() - due_ns))

    def _on_gc(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        # Collections do not nest, and the GIL is held from start to stop.
        if phase == "start":
            self._gc_started_ns = clock.now_ns()
        elif self._gc_started_ns:
            self._observer.observe(GC_PAUSE, clock.now_ns() - self._gc_started_ns, (str(info["generation"]),))
            self._gc_started_ns = 0
