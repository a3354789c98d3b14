"""
`python -m engine` with faults in it, each as strong as its dial says; its other ranks are started likewise.
"""

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence as Many
from typing import Any

import engine.__main__ as shell
import engine.draft_model
import engine.scheduler
import telemetry.disturbance
from engine.config import SchedulerConfig
from engine.plan import StepPlan
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.speculate import Speculation, Speculator
from tests.faults.dials import Dials

WRAPPERS = {"engine": "tests.faults.wrapped_engine", "gateway": "tests.faults.wrapped_gateway"}
HEAP_OBJECTS = 3_000_000  # some 100 ms
LEAK_PERIOD_S = 0.1
MEMORY_PERIOD_S = 0.5  # so that a few seconds show a slope
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


class WrongGuesses(Speculator):
    """Guesses what no model says, as often as the dial wishes."""

    def __init__(self, drafts_max: int, dials: Dials) -> None:
        super().__init__(drafts_max)
        self._dials = dials

    def wish(self, asking: Many[Sequence], budget: int) -> dict[int, tuple[int, ...]]:
        """The same rare token, over and over."""
        wrong = int(self._dials["wrong_guesses"])
        if not wrong:
            return super().wish(asking, budget)
        self.hopes = {}
        wishes = {}
        for one in asking:
            count = min(wrong, budget, one.request.tokens_max - one.output_length - 1)
            if count > 0:
                wishes[one.number] = (1,) * count
                budget -= count
        return wishes


class Heap:
    """Objects that live for ever, but that the collector walks through nevertheless while the dial wishes so."""

    def __init__(self, dials: Dials) -> None:
        self._dials = dials
        self._steps = 0
        self._frozen = False
        gc.disable()
        self._objects: list[list[None]] = [[] for _ in range(HEAP_OBJECTS)]
        gc.enable()
        self.step()

    def step(self) -> None:
        """One more."""
        every = int(self._dials["collection_steps"])
        if self._frozen is bool(every):
            (gc.unfreeze if every else gc.freeze)()
            self._frozen = not every
        self._steps += 1
        if every and self._steps % every == 0:
            gc.collect()


def leak(dials: Dials) -> None:
    """For ever."""
    kept: list[bytes] = []
    while True:
        time.sleep(LEAK_PERIOD_S)
        if more := int(dials["leak_bytes_s"] * LEAK_PERIOD_S):
            kept.append(b"\1" * more)  # not 0, of which the kernel gives no memory


def slow_wire(dials: Dials) -> None:
    """Exchanges through shared memory take longer, once all ranks have come."""
    from engine.device.ranks.shared_memory import SharedMemory  # torch takes seconds to load

    kept: dict[int, Any] = {}

    def native(self: SharedMemory) -> tuple[int, int]:
        group = self._open

        def exchange(_: int, values: int, count: int, stamps: int) -> int:
            code = self._library.group_sum(group, values, count, stamps)
            if delay_s := dials["slow_wire_s"]:
                time.sleep(delay_s)
                left = (ctypes.c_int64 * (self.size + 1)).from_address(stamps)
                left[self.size] = time.monotonic_ns()
            return int(code)

        callback = kept.setdefault(group, _CALLBACK(exchange))
        return ctypes.cast(callback, ctypes.c_void_p).value or 0, group

    SharedMemory.native = property(native)  # type: ignore[method-assign, assignment]


def late_rank(dials: Dials) -> None:
    """Whoever is not rank 0 begins its part of each step late."""
    import engine.device.ranks.model as ranks  # torch takes seconds to load

    answer = ranks._answer

    def late(*arguments: Any) -> Any:
        time.sleep(dials["late_rank_s"])
        return answer(*arguments)

    ranks._answer = late  # type: ignore[assignment]  # whatever it is called with


def wrapped_ranks() -> None:
    """They are started as rank 0 was."""
    import engine.group  # torch takes seconds to load

    class Started(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **settings: Any) -> None:
            super().__init__([WRAPPERS.get(word, word) for word in command], **settings)

    engine.group.subprocess.Popen = Started  # type: ignore[attr-defined]  # it imports that for itself


def wrap(dials: Dials) -> None:
    """From the engine's start on."""
    speculation_for, plan, serve = engine.draft_model.speculation_for, Scheduler.plan, shell.serve

    def guessing(config: SchedulerConfig) -> Speculation | None:
        if config.drafts_max and not config.draft_blocks_max:
            return WrongGuesses(config.drafts_max, dials)
        return speculation_for(config)

    def serving(*arguments: Any, **named: Any) -> None:
        heap = Heap(dials)

        def planning(self: Scheduler, now_ns: int) -> StepPlan:
            heap.step()
            return plan(self, now_ns)

        Scheduler.plan = planning  # type: ignore[method-assign]
        serve(*arguments, **named)

    engine.scheduler.speculation_for = guessing  # type: ignore[attr-defined]
    shell.serve = serving
    telemetry.disturbance.MEMORY_PERIOD_S = MEMORY_PERIOD_S
    threading.Thread(target=leak, args=(dials,), daemon=True).start()
    slow_wire(dials)
    late_rank(dials)
    wrapped_ranks()


if __name__ == "__main__":
    # libgomp reads this when torch is loaded, and the wrappers load it.
    os.environ.setdefault("GOMP_SPINCOUNT", shell.SPIN_COUNT)
    wrap(Dials.ours())
    sys.exit(shell.main(sys.argv[1:]))
