"""
Which processors each engine replica keeps to, and each of its ranks.

A step has hundreds of barriers, and at each of them the slowest thread is waited for: replicas, or ranks, that shared
processors would wait for each other all the time.  The threads of one core stay together, because they share what it
computes with; what does not divide evenly is left to the gateway.
"""

import os
from pathlib import Path

import msgspec


class Share(msgspec.Struct, frozen=True):
    """One replica's."""

    threads: int
    """Of each rank."""
    rank_cpus: tuple[tuple[int, ...], ...]
    """Of each rank.  Empty: all; there are too few for each to have its own, or this system pins nothing."""


def share_of(replica: int, replicas: int, ranks: int, threads: int, cpus: tuple[int, ...]) -> Share:
    """
    What replica `replica` of `replicas` gets, for each of its `ranks`.

    Args:
        threads: what the person wants for each rank; 0: as many as it has processors.  One replica of one rank decides
            by itself.
        cpus: what this process may use, cores in one piece.
    """
    if replicas * ranks == 1:
        return Share(threads, ())
    replica_cpus = len(cpus) // replicas
    count = replica_cpus // ranks
    if count < max(threads, 1) or not hasattr(os, "sched_setaffinity"):
        return Share(threads or max(1, count), ())
    first = replica * replica_cpus  # its ranks lie side by side
    starts = range(first, first + ranks * count, count)
    return Share(threads or count, tuple(cpus[start : start + count] for start in starts))


def usable_cpus(root: Path = Path("/")) -> tuple[int, ...]:
    """The processors that this process may use, those of one core side by side; `root` is where /sys is found."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0), key=lambda cpu: (*_core(root, cpu), cpu)))


def _core(root: Path, cpu: int) -> tuple[int, int]:
    """Package and core; where the system does not say, each processor is a core."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu
