"""
Every collective, as the contract suite opens it.

A new one adds a function that joins a group of ranks, and a row to IMPLEMENTATIONS.
"""

import os
from collections.abc import Callable
from typing import TypeAlias

from engine.device.ranks.collective import Collective
from engine.device.ranks.gloo import Gloo, open_store
from engine.device.ranks.shared_memory import SharedMemory, reserve
from telemetry.clock import CLOCK_ID
from tests.torch.ranks.processes import Seat

START_S = 30.0
VALUES_MAX = 5000
Opener: TypeAlias = Callable[[Seat, str, float], Collective]
"""Joins the group of that name as the rank of the seat; the float is its timeout_s."""


def open_gloo(seat: Seat, name: str, timeout_s: float) -> Gloo:
    """Rank 0 serves the store, as in an engine."""
    if seat.rank == 0:
        store = open_store("127.0.0.1", 0, leads=True, start_s=START_S)
        seat.say(name, store.port)
    else:
        store = open_store("127.0.0.1", int(seat.hear(name)), leads=False, start_s=START_S)
    return Gloo(
        store,
        rank=seat.rank,
        size=seat.size,
        address="127.0.0.1",
        timeout_s=timeout_s,
        start_s=START_S,
        clock_id=CLOCK_ID,
        name=name,
    )


def open_shared_memory(seat: Seat, name: str, timeout_s: float) -> SharedMemory:
    """The others take rank 0's descriptor, which in an engine they inherit.  Values in many pieces."""
    if seat.rank == 0:
        group = SharedMemory.join(reserve(seat.size, VALUES_MAX), 0, seat.size, VALUES_MAX, timeout_s)
        seat.say(name, f"/proc/{os.getpid()}/fd/{group.descriptor}")
    else:
        descriptor = os.open(seat.hear(name), os.O_RDWR)
        group = SharedMemory.join(descriptor, seat.rank, seat.size, VALUES_MAX, timeout_s)
    seat.say(f"{name}-{seat.rank}", "is here")
    for rank in range(seat.size):  # as ranks of an engine agree: the time of an exchange is none to start in
        seat.hear(f"{name}-{rank}")
    return group


IMPLEMENTATIONS: dict[str, Opener] = {"gloo": open_gloo, "shared-memory": open_shared_memory}
