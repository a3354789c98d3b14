"""
What gloo alone has: a start, and a store where ranks meet.
"""

import time

import pytest
import torch

from engine.device.ranks.collective import RankLost
from engine.device.ranks.gloo import Gloo, open_store
from tests.torch.ranks.processes import RankProcesses, Seat

START_S = 1.0


def begins(seat: Seat, absent: int) -> tuple[int, str, float]:
    """Returns: whom RankLost names, its words, and after how long it came."""
    if seat.rank == absent:
        return absent, "", 0.0
    if seat.rank == 0:
        store = open_store("127.0.0.1", 0, leads=True, start_s=START_S)
        seat.say("port", store.port)
    else:
        store = open_store("127.0.0.1", int(seat.hear("port")), leads=False, start_s=START_S)
    began_s = time.monotonic()
    try:
        Gloo(store, rank=seat.rank, size=3, address="127.0.0.1", timeout_s=9.0, start_s=START_S, clock_id="the same")
    except RankLost as lost:
        took_s = time.monotonic() - began_s
        seat.say(f"done {seat.rank}", "")
        for rank in {0, 1, 2} - {absent}:
            seat.hear(f"done {rank}")  # The store lives as long as its maker.
        return lost.rank, str(lost), took_s
    raise AssertionError("a group of two of three")


@pytest.mark.parametrize("absent", [1, 2])
def test_a_rank_that_does_not_come_to_the_start_is_named(processes: RankProcesses, absent: int) -> None:
    for rank, (named, words, took_s) in enumerate(processes.results(3, begins, absent)):
        assert named == absent
        assert took_s < START_S + 1.0
        if rank != absent:
            assert words == f"rank {absent} did not come within 1 s"


def test_a_store_that_is_not_there_is_rank_0s_fault() -> None:
    leader = open_store("127.0.0.1", 0, leads=True, start_s=5.0)
    port = leader.port
    del leader
    with pytest.raises(RankLost, match=rf"rank 0 does not answer at 127\.0\.0\.1:{port}"):
        open_store("127.0.0.1", port, leads=False, start_s=0.2)


def test_a_store_listens_on_one_address_alone() -> None:
    leader = open_store("127.0.0.1", 0, leads=True, start_s=5.0)
    with pytest.raises(RankLost):
        open_store("127.0.0.2", leader.port, leads=False, start_s=0.2)
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", leader.port, leads=True, start_s=0.2)


def test_one_rank_needs_nobody() -> None:
    store = open_store("127.0.0.1", 0, leads=True, start_s=5.0)
    group = Gloo(store, rank=0, size=1, address="127.0.0.1", timeout_s=1.0, start_s=1.0, clock_id="")
    values = torch.tensor([-0.0, 1.5])
    stamps = group.sum(values)
    assert (str(values.tolist()), len(stamps.entered_ns), group.clock_error_ns) == ("[-0.0, 1.5]", 1, 0)
    group.close()
