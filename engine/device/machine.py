"""
What this machine has for us: memory, threads, and whether it multiplies bfloat16 natively.
"""

import ctypes
import os
from pathlib import Path

import torch

from engine.device.errors import ModelError

_CGROUP = Path("/sys/fs/cgroup")


def memory_bytes() -> int | None:
    """Memory that this process may still take: the kernel's estimate, bounded by its cgroup.  None: no way to know."""
    meminfo = _lines(Path("/proc/meminfo"))
    limits = [int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:")]
    most, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if most is not None and used is not None:
        limits.append(max(0, most - used))
    return min(limits, default=None)


def threads() -> int:
    """Processors that this process may use: its affinity, bounded by its cgroup's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = next(iter(_lines(_CGROUP / "cpu.max")), "max").split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]) > 0:
        count = min(count, max(1, int(quota[0]) // int(quota[1])))
    return count


def choose_dtype(name: str) -> torch.dtype:
    """The dtype of that name; `auto` is bfloat16 where the processor multiplies it natively.  Raises ModelError."""
    if name == "auto":
        capable = torch.cpu.get_capabilities()
        return torch.bfloat16 if capable.get("avx512_bf16") or capable.get("amx_bf16") else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ModelError(f"dtype {name!r} is not supported: choose auto, float32 or bfloat16")
    return known[name]


def give_back_memory() -> None:
    """Freed memory goes back to the system: what loading took in passing would else count as ours for good."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc; others need no telling
    if trim is not None:
        trim(0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    line = next(iter(_lines(path)), "")
    return int(line) if line.isdigit() else None
