"""
What disturbs a process from outside of what it does: garbage collection, processors that others have, memory.

Nothing here knows of requests.  Who keeps a book of steps or requests takes what has happened since it last asked, and
writes it beside its states: these times overlap with them.
"""

import ctypes
import gc
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from telemetry import clock
from telemetry.records import MemoryReading
from telemetry.vocabulary import PRESSURES

MEMORY_PERIOD_S = 1.0
"""How often memory is looked at: the kernel walks through all pages of the process for it."""


class GcPauses:
    """Adds up the garbage collections of this process, and tells of each: its generation, and how long it took."""

    def __init__(self, tell: Callable[[int, int], None] | None = None) -> None:
        self.total_ns = 0
        self._tell = tell
        self._started_ns = 0

    def start(self) -> None:
        """Begin to listen."""
        gc.callbacks.append(self._on_gc)

    def stop(self) -> None:
        """Listen no more."""
        gc.callbacks.remove(self._on_gc)

    def _on_gc(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        # Collections do not nest, and the GIL is held from start to stop.
        if phase == "start":
            self._started_ns = clock.now_ns()
        elif self._started_ns:
            pause_ns = clock.now_ns() - self._started_ns
            self.total_ns += pause_ns
            self._started_ns = 0
            if self._tell is not None:
                self._tell(info["generation"], pause_ns)


class RunDelay:
    """
    How long threads of this process could have run and had no processor: `run_delay` of the kernel's scheduler.

    Of all threads the one that it happened to most counts: what they compute together waits for the last of them.
    Where the kernel does not say (no /proc/self/schedstat) it is 0 for ever.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._delays_ns: dict[str, int] = {}

    def look_for_threads(self) -> None:
        """Threads come and go; to be called now and then."""
        try:
            tasks = os.listdir("/proc/self/task")  # noqa: PTH208  names are all that is wanted
        except OSError:
            return
        for task in [task for task in self._files if task not in tasks]:
            self._forget(task)
        for task in tasks:
            if task not in self._files:
                self._look_at(task)

    def look_at_this_thread(self) -> None:
        """At the one that calls, and, unless others are looked for, at no other."""
        self._look_at(str(threading.get_native_id()))

    def take_ns(self) -> int:
        """Since the last call, of the thread that has waited longest."""
        worst_ns = 0
        for task, file in list(self._files.items()):
            try:
                delay_ns = int(os.pread(file, 96, 0).split()[1])
            except (OSError, IndexError, ValueError):
                self._forget(task)
                continue
            worst_ns = max(worst_ns, delay_ns - self._delays_ns.get(task, delay_ns))
            self._delays_ns[task] = delay_ns
        return worst_ns

    def close(self) -> None:
        """Open files are given back."""
        for task in list(self._files):
            self._forget(task)

    def _look_at(self, task: str) -> None:
        with suppress(OSError):
            self._files[task] = os.open(f"/proc/self/task/{task}/schedstat", os.O_RDONLY)

    def _forget(self, task: str) -> None:
        os.close(self._files.pop(task))
        self._delays_ns.pop(task, None)


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later: malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def read_memory() -> MemoryReading:
    """Of this process, now."""
    rollup = _rollup()
    used, free = _heap()
    return MemoryReading(
        resident_bytes=rollup.get("Rss", 0),
        private_bytes=rollup.get("Private_Clean", 0) + rollup.get("Private_Dirty", 0),
        heap_used_bytes=used,
        heap_free_bytes=free,
    )


def _rollup() -> dict[str, int]:
    """The kernel's sums over all mappings, in bytes."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {one[0].rstrip(":"): int(one[1]) * 1024 for one in words if len(one) == 3}


def _heap() -> tuple[int, int]:
    """What the C library has handed out, and what it keeps for later."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):  # another C library, or an old one
        return 0, 0
    mallinfo.restype = _Mallinfo2
    info = mallinfo()
    return info.uordblks + info.hblkhd, info.fordblks


def host_pressure_ns() -> dict[str, int]:
    """How long something on this machine has waited so far, by resource; empty where the kernel does not say."""
    found: dict[str, int] = {}
    for resource in PRESSURES:
        try:
            some = Path(f"/proc/pressure/{resource}").read_text().splitlines()[0]
            found[resource] = int(some.rpartition("total=")[2]) * 1000
        except (OSError, IndexError, ValueError):
            continue
    return found


class Disturbed(NamedTuple):
    """Since somebody last asked."""

    gc_pause_ns: int = 0
    starved_ns: int = 0
    memory: MemoryReading | None = None


class Disturbing(Protocol):
    """What tells of it: `Disturbances`, or nothing."""

    def take(self) -> Disturbed:
        """What has happened since the last call."""
        ...

    def skip(self) -> None:
        """Forget how long no processor was there up to now."""
        ...


class Undisturbed:
    """Implements `Disturbing`: nothing happens."""

    def take(self) -> Disturbed:
        """Nothing."""
        return Disturbed()

    def skip(self) -> None:
        """Nothing."""


DELAY_PERIOD_NS = 50_000_000
"""How often threads are asked how long they had no processor: each of them is a system call."""


class Disturbances:
    """All of it, of this process; memory is read by a thread of its own, since the kernel may take long."""

    def __init__(self) -> None:
        self._gc = GcPauses()
        self._delay = RunDelay()
        self._gc_taken_ns = 0
        self._asked_ns = 0
        self._memory: MemoryReading | None = None
        self._stopping = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="memory", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._gc.start()
        self._delay.look_for_threads()
        self._watching.start()

    def stop(self) -> None:
        """Look no more."""
        self._gc.stop()
        self._stopping.set()
        self._watching.join()
        self._delay.close()

    def take(self) -> Disturbed:
        """What has happened since the last call; memory if it was read anew."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._delay.look_for_threads()
        gc_ns, self._gc_taken_ns = self._gc.total_ns - self._gc_taken_ns, self._gc.total_ns
        now_ns = clock.now_ns()
        if now_ns - self._asked_ns < DELAY_PERIOD_NS:
            return Disturbed(gc_ns, 0, memory)
        self._asked_ns = now_ns
        return Disturbed(gc_ns, self._delay.take_ns(), memory)

    def skip(self) -> None:
        """Nobody had anything to do up to now: that no processor was there then has cost nothing."""
        self._asked_ns = clock.now_ns()
        self._delay.take_ns()

    def _watch(self) -> None:
        while not self._stopping.wait(MEMORY_PERIOD_S):
            self._memory = read_memory()
