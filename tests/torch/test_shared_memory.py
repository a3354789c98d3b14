"""
The exchange over shared memory: sums in the order of the ranks with equal bits, whatever the sizes; and ranks that do
not come.  Ranks are threads here, each with a mapping of its own, where it does not matter that they are no processes.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.device.native import library as native_library
from engine.device.native.library import CHOICE, Unavailable, instruction_sets
from engine.device.ranks.collective import Collective, RankLost, Stamps
from engine.device.ranks.shared_memory import SharedMemory, reserve
from tests.torch.kernels import DIRECTORY, every_isa, native

Result = TypeVar("Result")
PATIENCE_S = 60.0
"""Longer than any test takes."""


def members(isa: str, size: int, values_max: int, timeout_s: float = PATIENCE_S) -> list[SharedMemory]:
    """All ranks."""
    memory = reserve(size, values_max, library=native(isa))
    return [
        SharedMemory.join(os.dup(memory) if rank else memory, rank, size, values_max, timeout_s, library=native(isa))
        for rank in reversed(range(size))
    ][::-1]


def together(ranks: list[SharedMemory], work: Callable[[SharedMemory], Result]) -> list[Result]:
    """What `work` finds on each rank, all at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [one.result(PATIENCE_S) for one in [pool.submit(work, rank) for rank in ranks]]


def values_of(seed: int, rank: int, count: int) -> Tensor:
    """Of every size, so that another order of summation has other bits."""
    numbers = np.random.default_rng((seed, rank))
    return torch.from_numpy((numbers.standard_normal(count) * 10.0 ** numbers.integers(-3, 4, count)).astype("f4"))


def summed(seed: int, size: int, count: int) -> Tensor:
    """In the order of the ranks, one after the other."""
    total = values_of(seed, 0, count).numpy().copy()
    for rank in range(1, size):
        total = total + values_of(seed, rank, count).numpy()
    return torch.from_numpy(total)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_it_is_a_collective() -> None:
    ranks: list[Collective] = [*members(instruction_sets()[0], 2, 16)]
    assert [(one.kind, one.rank, one.size, one.clock_error_ns) for one in ranks] == [
        ("shared-memory", 0, 2, 0),
        ("shared-memory", 1, 2, 0),
    ]


@every_isa
@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 4),
    values_max=st.integers(1, 100),
    exchanges=st.lists(st.tuples(st.sampled_from(("sum", "gather", "send")), st.integers(0, 230)), max_size=8),
    seed=st.integers(0, 1000),
)
def test_any_exchanges_in_any_order(
    isa: str, size: int, values_max: int, exchanges: list[tuple[str, int]], seed: int
) -> None:
    """Also in pieces, of nothing, and of counts that differ."""

    def work(rank: SharedMemory) -> None:
        for number, (kind, count) in enumerate(exchanges, seed):
            if kind == "sum":
                values = values_of(number, rank.rank, count)
                rank.sum(values)
                assert same_bits(values, summed(number, size, count))
            elif kind == "gather":
                counts = [random.Random(number + one).choice((0, count, count // 3)) for one in range(size)]
                found, _ = rank.gather(values_of(number, rank.rank, counts[rank.rank]), counts)
                assert len(found) == (0 if rank.rank else size)
                for one, values in enumerate(found):
                    assert same_bits(values, values_of(number, one, counts[one]))
            else:
                _send_on(rank, number, count)

    together(members(isa, size, values_max), work)


def _send_on(rank: SharedMemory, number: int, count: int) -> None:
    """From each rank to each higher one, all of them before the first is received."""
    for receiver in range(rank.rank + 1, rank.size):
        rank.send(values_of(number, rank.rank, min(count, 2)), receiver)
    for sender in range(rank.rank):
        values = torch.empty(min(count, 2))
        rank.receive(values, sender)
        assert same_bits(values, values_of(number, sender, min(count, 2)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_thousands_of_exchanges_in_a_row(size: int) -> None:
    """More ranks than processors too: each has the same bits every time."""

    def work(rank: SharedMemory) -> Tensor:
        values = values_of(size, rank.rank, 600) / 1e4
        for _ in range(3000):
            rank.sum(values)
            values *= 1 / size
            if rank.rank == 0:
                values[0] += 1e-3
        return values

    found = together(members(instruction_sets()[0], size, 256), work)
    assert bool(torch.isfinite(found[0]).all())
    assert all(same_bits(one[1:], found[0][1:]) for one in found)


def test_a_pipeline_of_long_rows() -> None:
    """The sender goes ahead by two buffers, then waits until one is taken."""
    first, second = members(instruction_sets()[0], 2, 64)
    rows = [values_of(number, 0, 1000) for number in range(50)]

    def work(rank: SharedMemory) -> list[Stamps]:
        if rank is first:
            return [rank.send(row, 1) for row in rows]
        found, stamps = torch.empty(1000), []
        for row in rows:
            stamps.append(rank.receive(found, 0))
            assert same_bits(found, row)
        return stamps

    for sent, received in zip(*together([first, second], work), strict=True):
        assert sent.entered_ns[0] == received.entered_ns[0] and sent.entered_ns[1] == 0
        assert 0 < sent.entered_ns[0] <= sent.left_ns and max(received.entered_ns) <= received.left_ns


def test_all_ranks_know_when_each_came() -> None:
    ranks = members(instruction_sets()[0], 3, 10)
    before_ns = time.monotonic_ns()

    def work(rank: SharedMemory) -> tuple[int, list[Stamps]]:
        counts, began_ns = [35, 0, 5], time.monotonic_ns()
        summed = rank.sum(torch.ones(35))
        return began_ns, [summed, rank.gather(torch.ones(counts[rank.rank]), counts)[1]]

    found = together(ranks, work)
    for which in (0, 1):
        entered_ns = found[0][1][which].entered_ns
        for began_ns, stamps in found:
            assert stamps[which].entered_ns == entered_ns
            assert max(entered_ns) <= stamps[which].left_ns <= time.monotonic_ns()
            assert before_ns <= began_ns
    assert all(began_ns <= came_ns for (began_ns, _), came_ns in zip(found, found[0][1][0].entered_ns, strict=True))


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_does_not_come_is_named(size: int) -> None:
    """Within the time, by all others; and afterwards at once, whatever they are asked for."""
    ranks = members(instruction_sets()[0], size, 16, timeout_s=0.3)
    absent = size - 1

    def work(rank: SharedMemory) -> float:
        if rank.rank == absent:
            return 0.0
        began_s = time.monotonic()
        with pytest.raises(RankLost, match=rf"rank {absent} did not come to an exchange within 0\.3 s") as lost:
            rank.sum(torch.ones(40))
        took_s = time.monotonic() - began_s
        assert lost.value.rank == absent
        with pytest.raises(RankLost, match=f"rank {absent} "):
            rank.sum(torch.ones(1))
        with pytest.raises(RankLost, match=f"rank {absent} "):
            rank.send(torch.ones(1), absent)
        return took_s

    assert all(0.3 <= took_s < 3 for took_s in together(ranks, work)[:absent])


def test_who_waits_for_one_that_is_closed_is_woken() -> None:
    """In each kind of exchange, long before its time."""
    waits: tuple[Callable[[SharedMemory], object], ...] = (
        lambda rank: rank.sum(torch.ones(40)),
        lambda rank: rank.gather(torch.ones(0), [0, 0]),
        lambda rank: rank.send(torch.ones(16 * 3), 1),
    )
    for wait in waits:
        ranks = members(instruction_sets()[0], 2, 16)
        _closing_wakes(ranks[0], ranks[1], wait)
    ranks = members(instruction_sets()[0], 2, 16)
    ranks[0].send(torch.ones(1), 1)
    ranks[0].close()
    ranks[0].close()
    ranks[1].receive(torch.ones(1), 0)  # what was sent before can still be had
    with pytest.raises(RankLost, match="rank 0 has left the others"):
        ranks[1].receive(torch.ones(1), 0)
    with pytest.raises(RankLost, match="rank 0 has left the others"):
        ranks[0].sum(torch.ones(1))


def _closing_wakes(waits: SharedMemory, leaves: SharedMemory, wait: Callable[[SharedMemory], object]) -> None:
    caught: list[RankLost] = []

    def until_lost() -> None:
        try:
            wait(waits)
        except RankLost as lost:
            caught.append(lost)

    thread = threading.Thread(target=until_lost)
    thread.start()
    leaves.close()
    thread.join(PATIENCE_S / 2)
    assert [lost.rank for lost in caught] == [leaves.rank]


FOLLOWER = """
import sys, torch
from pathlib import Path
from engine.device.native.library import open_library
from engine.device.ranks.collective import RankLost
from engine.device.ranks.shared_memory import SharedMemory, reserve
descriptor, rank, isa, directory = sys.argv[1:]
library = open_library(isa, Path(directory))
values = torch.arange(100.) * int(rank)
member = SharedMemory.join(int(descriptor), int(rank), 3, 64, 2, library=library)
print("here", flush=True)
try:
    while True:
        member.sum(values.clone())
except RankLost as lost:
    print(lost)
"""


def test_processes_one_of_which_stops() -> None:
    """Ranks as they are in earnest, more than this machine may have processors."""
    isa = instruction_sets()[0]
    first = SharedMemory.join(reserve(3, 64, library=native(isa)), 0, 3, 64, 2, library=native(isa))
    arguments = [sys.executable, "-c", FOLLOWER, str(first.descriptor)]
    others = [
        subprocess.Popen(
            [*arguments, str(rank), isa, str(DIRECTORY.absolute())],
            pass_fds=[first.descriptor],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 2)
    ]
    try:
        for other in others:
            assert other.stdout is not None and other.stdout.readline() == "here\n"
        for _ in range(500):
            assert same_bits(_sum_of_processes(first), torch.arange(100.0) * 3)
        others[1].send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(RankLost, match="rank 2 did not come to an exchange within 2 s"):
            while time.monotonic() < began_s + PATIENCE_S:
                _sum_of_processes(first)
        assert time.monotonic() - began_s < 10
        assert others[0].communicate(timeout=PATIENCE_S)[0] == "rank 2 did not come to an exchange within 2 s\n"
    finally:
        for other in others:
            other.kill()
            other.communicate()


def _sum_of_processes(rank: SharedMemory) -> Tensor:
    values = torch.zeros(100)
    rank.sum(values)
    return values


def test_any_library_will_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the decoder in torch was asked for; where there is none, that is said."""
    native(instruction_sets()[0])
    monkeypatch.setenv(CHOICE, "torch")
    with_torch = SharedMemory.join(reserve(1, 8), 0, 1, 8, 1.0)
    values = torch.ones(20)
    with_torch.sum(values)
    assert torch.equal(values, torch.ones(20))
    monkeypatch.setattr(native_library, "LIBRARIES", tmp_path)
    with pytest.raises(Unavailable, match="they were not built"):
        reserve(1, 8)
