"""
What the ranks of the contract suite do.  Each function is run by every rank; what it raises fails the test.
"""

import os
import signal
import time
from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from engine.device.ranks.collective import Collective, RankLost, Stamps
from tests.torch.ranks.implementations import Opener
from tests.torch.ranks.processes import Seat

PATIENT_S = 30.0


def numbers(seed: int, rank: int, shape: Sequence[int]) -> Tensor:
    """Of magnitudes so different that another order of summation gives other bits."""
    random = np.random.default_rng((seed, rank))
    wide = random.standard_normal(shape) * 10.0 ** random.integers(-4, 5, shape)
    return torch.from_numpy(np.asarray(wide, dtype=np.float32))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal is too little: -0.0 == 0.0."""
    return left.shape == right.shape and left.numpy().tobytes() == right.numpy().tobytes()


def summed(seed: int, size: int, shape: Sequence[int]) -> Tensor:
    """numpy's sum, in the order of the ranks."""
    total = reduce(np.add, (numbers(seed, rank, shape).numpy() for rank in range(size)))
    return torch.from_numpy(np.asarray(total))


def check_stamps(group: Collective, stamps: Stamps, before_ns: int, senders: Sequence[int]) -> None:
    """The own entry is true, nobody came after this one left, and of `senders` all are known."""
    after_ns = time.monotonic_ns()
    assert len(stamps.entered_ns) == group.size
    assert before_ns <= stamps.entered_ns[group.rank] <= stamps.left_ns <= after_ns
    assert all(entered_ns <= stamps.left_ns for entered_ns in stamps.entered_ns)
    assert all(stamps.entered_ns[rank] > 0 for rank in senders)


def sums(seat: Seat, opener: Opener, shapes: Sequence[tuple[int, ...]]) -> None:
    """One after the other."""
    group = opener(seat, "sums", PATIENT_S)
    assert (group.rank, group.size, group.clock_error_ns) == (seat.rank, seat.size, 0)
    for seed, shape in enumerate(shapes):
        values = numbers(seed, seat.rank, shape)
        before_ns = time.monotonic_ns()
        stamps = group.sum(values)
        check_stamps(group, stamps, before_ns, range(seat.size))
        assert same_bits(values, summed(seed, seat.size, shape)), shape
    group.close()


def gathers(seat: Seat, opener: Opener, counts_of: Sequence[Sequence[int]]) -> None:
    """What is gathered stays as it was when the next comes."""
    group = opener(seat, "gathers", PATIENT_S)
    kept: list[tuple[int, list[Tensor]]] = []
    for seed, counts in enumerate(counts_of):
        before_ns = time.monotonic_ns()
        values = numbers(seed, seat.rank, [counts[seat.rank]])
        gathered, stamps = group.gather(values, counts)
        check_stamps(group, stamps, before_ns, range(seat.size) if seat.rank == 0 else [])
        values.fill_(-1.0)
        kept.append((seed, gathered))
    for (seed, gathered), counts in zip(kept, counts_of, strict=True):
        if seat.rank == 0:
            wanted = [numbers(seed, rank, [counts[rank]]) for rank in range(seat.size)]
            assert [same_bits(one, other) for one, other in zip(gathered, wanted, strict=True)] == [True] * seat.size
        else:
            assert gathered == []
    group.close()


def relays(seat: Seat, opener: Opener, shapes: Sequence[tuple[int, ...]]) -> None:
    """From the first rank through all others to the last, and from the first to the last at once."""
    group = opener(seat, "relays", PATIENT_S)
    last = seat.size - 1
    for seed, shape in enumerate(shapes):
        values = numbers(seed, 0, shape) if seat.rank == 0 else torch.full(shape, -1.0)
        before_ns = time.monotonic_ns()
        if seat.rank > 0:
            check_stamps(group, group.receive(values, seat.rank - 1), before_ns, [seat.rank - 1])
        if seat.rank < last:
            before_ns = time.monotonic_ns()
            check_stamps(group, group.send(values, seat.rank + 1), before_ns, [])
        if seat.rank == 0:
            group.send(values * 2, last)
        assert same_bits(values, numbers(seed, 0, shape))
        if seat.rank == last:
            group.receive(values, 0)
            assert same_bits(values, numbers(seed, 0, shape) * 2)
    group.close()


def many(seat: Seat, opener: Opener, rounds: int) -> None:
    """Ranks run ahead of each other as far as they can; no exchange takes what belongs to another."""
    group = opener(seat, "many", PATIENT_S)
    for number in range(rounds):
        length = 1 + number % 7
        values = torch.full((length,), float(number + seat.rank))
        group.sum(values)
        total = seat.size * number + sum(range(seat.size))
        assert values.tolist() == [total] * length, number
        if number % 3 == 0:
            counts = [1 + (number + rank) % 4 for rank in range(seat.size)]
            gathered, _ = group.gather(torch.full((counts[seat.rank],), number + seat.rank / 8), counts)
            for rank, one in enumerate(gathered):
                assert one.tolist() == [number + rank / 8] * counts[rank], number
        if number % 5 == 0 and seat.rank + 1 < seat.size:
            group.send(torch.tensor([number + 0.5]), seat.rank + 1)
        if number % 5 == 0 and seat.rank > 0:
            values = torch.empty(1)
            group.receive(values, seat.rank - 1)
            assert values.tolist() == [number + 0.5]
    group.close()


def two_groups(seat: Seat, opener: Opener) -> None:
    """Exchanges of the one while the other is in use; and one goes on when the other is closed."""
    one, other = opener(seat, "one", PATIENT_S), opener(seat, "other", PATIENT_S)
    for number in range(100):
        here, there = torch.full((3,), float(number)), torch.full((5,), -1.0)
        one.sum(here)
        other.sum(there)
        assert here.tolist() == [float(number) * seat.size] * 3
        assert there.tolist() == [-1.0 * seat.size] * 5
    other.close()
    values = torch.ones(2)
    one.sum(values)
    assert values.tolist() == [seat.size] * 2
    one.close()


def closes_twice(seat: Seat, opener: Opener) -> None:
    """And says so to whoever goes on."""
    group = opener(seat, "closes", PATIENT_S)
    group.sum(torch.ones(1))
    group.close()
    group.close()
    try:
        group.sum(torch.ones(1))
    except RankLost:
        return
    raise AssertionError("a closed group sums")


def loses(seat: Seat, opener: Opener, *, how: str, victim: int, timeout_s: float, kind: str) -> tuple[int, float]:
    """
    One rank goes after some exchanges; the others learn which.

    Returns: whom RankLost names, and how many seconds the exchange took that raised it.
    """
    group = opener(seat, "loses", timeout_s)
    for _ in range(20):
        group.sum(torch.ones(64, 576))
    if seat.rank == victim:
        if how == "close":
            group.close()
            return -2, 0.0
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        while True:
            began_s = time.monotonic()
            exchange(group, kind)
    except RankLost as lost:
        took_s = time.monotonic() - began_s
        try:
            exchange(group, kind)
        except RankLost as again:
            assert again.rank == lost.rank
            group.close()
            return lost.rank, took_s
        raise AssertionError("a broken group goes on") from None


def exchange(group: Collective, kind: str) -> None:
    """A step's: of one class, or as in a model, where some ranks wait for others that wait."""
    if kind != "gather":
        group.sum(torch.ones(64, 576))
    if kind != "sum":
        group.gather(torch.ones(8), [8] * group.size)
