"""
The book of the interconnect: made-up stamps, and ranks that are late or far.
"""

import time
from collections.abc import Sequence
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.device.ranks.book import Interconnect
from engine.device.ranks.collective import Stamps
from telemetry.records import InterconnectBook
from tests.torch.ranks.delaying import Delaying
from tests.torch.ranks.implementations import IMPLEMENTATIONS, Opener
from tests.torch.ranks.processes import RankProcesses, Seat

ROUNDS = 31
LATE_NS = 5_000_000
LATE = 1
opened = pytest.mark.parametrize("opener", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())


class Scripted:
    """A collective without others: its stamps are made up."""

    kind = "scripted"
    clock_error_ns = 7

    def __init__(self, rank: int, size: int, script: Sequence[Stamps]) -> None:
        self.rank = rank
        self.size = size
        self._script = iter(script)

    def sum(self, values: Tensor) -> Stamps:
        return next(self._script)

    def gather(self, values: Tensor, counts: Sequence[int]) -> tuple[list[Tensor], Stamps]:
        return ([torch.empty(count) for count in counts] if self.rank == 0 else []), next(self._script)

    def send(self, values: Tensor, receiver: int) -> Stamps:
        return next(self._script)

    def receive(self, values: Tensor, sender: int) -> Stamps:
        return next(self._script)

    def close(self) -> None:
        pass


@st.composite
def scripts(draw: st.DrawFn) -> tuple[int, int, list[tuple[str, Stamps]]]:
    """A rank, the size of its group, and exchanges: the rank's own entry is true, the others' may be any, or none."""
    size = draw(st.integers(1, 5))
    rank = draw(st.integers(0, size - 1))
    exchanges = []
    for _ in range(draw(st.integers(0, 12))):
        entered = draw(st.lists(st.one_of(st.just(0), st.integers(1, 1000)), min_size=size, max_size=size))
        entered[rank] = draw(st.integers(1, 1000))
        left_ns = entered[rank] + draw(st.integers(0, 1000))
        exchanges.append((draw(st.sampled_from(["attention", "mlp", "head"])), Stamps(tuple(entered), left_ns)))
    return rank, size, exchanges


@given(scripts())
def test_the_book_closes_whatever_the_stamps(script: tuple[int, int, list[tuple[str, Stamps]]]) -> None:
    rank, size, exchanges = script
    ranks = Interconnect(Scripted(rank, size, [stamps for _, stamps in exchanges]))
    waits = [0] * size
    met = set()
    received = 0
    for name, stamps in exchanges:
        if name == "head":
            counts = list(range(1, size + 1))
            received += sum(one.nbytes for one in ranks.gather(torch.empty(counts[rank]), counts)[1:])
        else:
            ranks.sum(torch.empty(2, 3), name)
            received += 24 * (size - 1)
        last_ns = min(stamps.left_ns, max(stamps.entered_ns))
        met |= {other for other, entered_ns in enumerate(stamps.entered_ns) if entered_ns}
        for other in range(size):
            waits[other] += max(0, last_ns - stamps.entered_ns[other]) if stamps.entered_ns[other] else 0
    whole_ns = sum(stamps.left_ns - stamps.entered_ns[rank] for _, stamps in exchanges)
    book = ranks.close_book()
    assert book.wait_ns + book.transfer_ns == whole_ns
    assert book.imbalance() == 0
    assert (book.wait_ns, book.rank_wait_ns) == (waits[rank], tuple(waits))
    assert (book.kind, book.bytes, book.clock_error_ns) == ("scripted", received, 7)
    assert sum(one.calls for one in book.exchanges.values()) == len(exchanges)
    assert all(one.wait_ns >= 0 and one.transfer_ns >= 0 for one in book.exchanges.values())
    known = {waits[other] for other in met}
    if len(known) > 1:
        assert book.straggler in met and waits[book.straggler] == min(known)
    else:
        assert book.straggler == -1
    again = ranks.close_book()
    assert (again.exchanges, again.wait_ns, again.transfer_ns, again.straggler) == ({}, 0, 0, -1)


def test_a_rank_that_took_no_part_is_no_straggler() -> None:
    ranks = Interconnect(Scripted(2, 3, [Stamps((0, 800, 100), 900)]))
    ranks.sum(torch.empty(1), "attention")
    assert ranks.close_book().straggler == 1


def late(seat: Seat, opener: Opener) -> list[tuple[int, InterconnectBook]]:
    """Returns: of each round, when this rank really came (a loaded machine wakes none on time), and the book."""
    ranks = Interconnect(opener(seat, "late", 30.0))
    values = torch.ones(576)
    rounds = []
    for _ in range(ROUNDS):
        # Ranks leave an exchange one after the other; but all of them know when the last of them came.
        agreed_ns = max(ranks.collective.sum(values.fill_(1.0)).entered_ns) + 4 * LATE_NS
        if seat.rank == LATE:
            agreed_ns += LATE_NS
        time.sleep(max(0, agreed_ns - time.monotonic_ns()) / 1e9)
        came_ns = time.monotonic_ns()
        ranks.sum(values.fill_(1.0), "attention")
        rounds.append((came_ns, ranks.close_book()))
    ranks.collective.close()
    return rounds


@opened
def test_what_a_late_rank_costs_is_wait(processes: RankProcesses, opener: Opener) -> None:
    rounds = processes.results(3, late, opener)
    last_ns = [max(came_ns for came_ns, _ in round_) for round_ in zip(*rounds, strict=True)]
    for rank, of_rank in enumerate(rounds):
        books = [book for _, book in of_rank]
        true_ns = median(last - came_ns for last, (came_ns, _) in zip(last_ns, of_rank, strict=True))
        assert true_ns == pytest.approx(0 if rank == LATE else LATE_NS, rel=0.4)
        assert median(book.wait_ns for book in books) == pytest.approx(true_ns, rel=0.1)
        assert min(book.transfer_ns for book in books) < LATE_NS / 2
        assert median(book.straggler for book in books) == LATE
        assert median(book.rank_wait_ns[LATE] for book in books) == 0


def far(seat: Seat, opener: Opener, delay_s: float) -> list[InterconnectBook]:
    """Returns: the book of each round."""
    ranks = Interconnect(Delaying(opener(seat, "far", 30.0), delay_s))
    values = torch.ones(576)
    rounds = []
    for _ in range(ROUNDS):
        ranks.sum(values, "attention")
        ranks.gather(values[:8], [8] * seat.size)
        rounds.append(ranks.close_book())
    ranks.collective.close()
    return rounds


@opened
def test_what_the_wire_costs_is_transfer(processes: RankProcesses, opener: Opener) -> None:
    for books in processes.results(3, far, opener, LATE_NS / 1e9):
        for name in ("attention", "head"):
            assert min(book.exchanges[name].transfer_ns for book in books) >= LATE_NS
            assert min(book.exchanges[name].wait_ns for book in books) < LATE_NS / 2
        assert all(book.imbalance() == 0 for book in books)
