"""
Every collective, as the contract suite opens it.

A new one adds a function that joins a group of ranks, and a row to IMPLEMENTATIONS.
"""

from collections.abc import Callable
from typing import TypeAlias

from engine.device.ranks.collective import Collective
from engine.device.ranks.gloo import Gloo, open_store
from telemetry.clock import CLOCK_ID
from tests.torch.ranks.processes import Seat

START_S = 30.0
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


IMPLEMENTATIONS: dict[str, Opener] = {"gloo": open_gloo}
