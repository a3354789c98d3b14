"""
In which state the machine is: a virtual machine's cores move between caches, and rates move with them by up to 1.45.

Two cores on one L3 hand a cache line over in about 30 ns and read about 35 GB/s together; on two, about 155 ns and
58 GB/s.  Every sample of a benchmark carries the state before and after it; without, +-20 % means nothing.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_suffix(".c")
READ_BYTES = 128 << 20  # more than any L3 that is seen often
ONE_L3_NS_MAX = 80.0
COMPILE_S_MAX = 60


class State(NamedTuple):
    """One look at the machine."""

    handover_ns: float  # of a cache line between two cores; 0: unknown
    read_gbs: float  # by all threads together; 0: unknown

    @property
    def name(self) -> str:
        """The state in two words."""
        if not self.handover_ns:
            return "unknown"
        return "one L3" if self.handover_ns < ONE_L3_NS_MAX else "two L3s"

    def __str__(self) -> str:
        if not self.handover_ns:
            return "unknown state"
        return f"{self.name} ({self.handover_ns:.0f} ns, {self.read_gbs:.0f} GB/s)"


class Machine:
    """Looks at the machine; takes about 0.1 s a look.  Without a compiler or a second core the state is unknown."""

    def __init__(self) -> None:
        affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
        self.cpus = sorted(affinity(0))[:2] if affinity else []
        self._library = _build() if len(self.cpus) == 2 else None

    def state(self) -> State:
        """Measure now.  Whatever else runs at the moment disturbs it: the best of several short tries counts."""
        if self._library is None:
            return State(0.0, 0.0)
        handover_ns: float = self._library.machine_handover_ns(*self.cpus)
        cpus = (ctypes.c_int * len(self.cpus))(*self.cpus)
        read_gbs: float = self._library.machine_read_gbs(cpus, len(self.cpus), ctypes.c_long(READ_BYTES))
        return State(max(handover_ns, 0.0), max(read_gbs, 0.0))


def _build() -> ctypes.CDLL | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "machine.so"
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(out)]
        if subprocess.run(command, check=False, capture_output=True, timeout=COMPILE_S_MAX).returncode:
            return None
        library = ctypes.CDLL(str(out))  # stays mapped when its file is gone
    for function in (library.machine_handover_ns, library.machine_read_gbs):
        function.restype = ctypes.c_double
    return library
