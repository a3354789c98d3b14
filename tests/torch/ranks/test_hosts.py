"""
Three hosts: what their network costs is transfer, not wait, whatever their clocks say.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median

import pytest
import torch

from engine.device.ranks.book import Interconnect
from engine.device.ranks.gloo import Gloo, open_store
from telemetry.records import InterconnectBook
from tests.torch.ranks.network import Switch, address_of, leave_for_own_host, limit_rate
from tests.torch.ranks.processes import RankProcesses, Seat, rank_processes

ROUNDS = 15
TRIES = 6
SIZE = 3
AHEAD_NS = (0, 3_600_000_000_000, -7_200_000_000_000)
LATE = 2


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Switch, RankProcesses]]:
    """A switch, and a process on each host."""
    switch = Switch(tmp_path_factory.mktemp("switch") / "socket")
    try:
        with rank_processes(SIZE) as processes:
            reasons = processes.results(SIZE, leave_for_own_host, switch.path)
            if any(reasons):
                pytest.skip(next(filter(None, reasons)))
            yield switch, processes
    finally:
        switch.close()


def exchange(seat: Seat, values_count: int, late_ns: int) -> list[tuple[InterconnectBook, int]]:
    """Returns: the book of each round, and by how much the worst stamp of another rank was off."""
    start_s = 30.0
    if seat.rank == 0:
        store = open_store(address_of(0), 0, leads=True, start_s=start_s)
        seat.say("port", store.port)
    else:
        store = open_store(address_of(0), int(seat.hear("port")), leads=False, start_s=start_s)
    ahead_ns = AHEAD_NS[seat.rank] + 10**14
    group = Gloo(
        store,
        rank=seat.rank,
        size=seat.size,
        address=address_of(seat.rank),
        timeout_s=20.0,
        start_s=start_s,
        clock_id=f"host {seat.rank}",
        clock=lambda: time.monotonic_ns() + ahead_ns,
    )
    ranks = Interconnect(group)
    values = torch.ones(values_count)
    rounds = []
    for number in range(ROUNDS):
        if seat.rank == 0:
            seat.say(f"begin {number}", time.monotonic_ns() + 40_000_000)
        begin_ns = int(seat.hear(f"begin {number}")) + (late_ns if seat.rank == LATE else 0)
        time.sleep(max(0, begin_ns - time.monotonic_ns()) / 1e9)
        stamps = group.sum(values)
        ranks.book("attention", stamps, values.nbytes * (seat.size - 1))
        seat.say(f"entered {number} {seat.rank}", stamps.entered_ns[seat.rank] - ahead_ns)
        true_ns = [int(seat.hear(f"entered {number} {rank}")) for rank in range(seat.size)]
        off_ns = max(abs(stamp - ahead_ns - truth) for stamp, truth in zip(stamps.entered_ns, true_ns, strict=True))
        rounds.append((ranks.close_book(), off_ns))
    group.close()
    return rounds


Rounds = list[tuple[InterconnectBook, int]]


def undisturbed(
    processes: RankProcesses, values_count: int, late_ns: int, check: Callable[[int, Rounds], None]
) -> None:
    """What `check` asserts of each rank holds in one of TRIES runs: what else a machine does makes some longer."""
    for left in reversed(range(TRIES)):
        results = processes.results(SIZE, exchange, values_count, late_ns)
        for rounds in results:
            check_clocks(rounds)
        try:
            for rank, rounds in enumerate(results):
                check(rank, rounds)
            return
        except AssertionError:
            if not left:
                raise


@pytest.mark.parametrize("delay_ms", [2, 8])
def test_a_long_way_is_transfer(hosts: tuple[Switch, RankProcesses], delay_ms: int) -> None:
    switch, processes = hosts
    switch.delay_ns = delay_ms * 1_000_000

    def check(rank: int, rounds: Rounds) -> None:
        books = [book for book, _ in rounds]
        # gloo tells the sender that the receiver is ready, and then the sender sends: one way, or two.
        assert switch.delay_ns * 0.9 < median(book.transfer_ns for book in books) < switch.delay_ns * 2 + 4_000_000
        assert median(book.wait_ns for book in books) < switch.delay_ns * 0.8, rank
        assert all(book.clock_error_ns >= switch.delay_ns for book in books)

    undisturbed(processes, 576, 0, check)


def test_a_rank_late_by_more_than_the_way_is_wait_and_the_way_is_transfer(hosts: tuple[Switch, RankProcesses]) -> None:
    switch, processes = hosts
    switch.delay_ns = 2_000_000
    late_ns = 20_000_000

    def check(rank: int, rounds: Rounds) -> None:
        books = [book for book, _ in rounds]
        wait_ns = 0 if rank == LATE else late_ns
        assert median(book.wait_ns for book in books) == pytest.approx(wait_ns, abs=2_000_000)
        assert switch.delay_ns * 0.9 < median(book.transfer_ns for book in books) < switch.delay_ns * 2 + 4_000_000
        assert median(book.straggler for book in books) == LATE

    undisturbed(processes, 576, late_ns, check)


@pytest.mark.parametrize("mbit", [20, 50])
def test_a_narrow_way_is_transfer(hosts: tuple[Switch, RankProcesses], mbit: int) -> None:
    switch, processes = hosts
    switch.delay_ns = 0
    values_count = 25_000
    send_ns = values_count * 32 * 1000 // mbit  # to one other; whose turn is first has it after one, else after all

    def check(rank: int, rounds: Rounds) -> None:
        books = [book for book, _ in rounds]
        most_ns = send_ns * (SIZE - 1) * 1.5 + 4_000_000
        assert send_ns * 0.8 < median(book.transfer_ns for book in books) < most_ns, rank
        assert median(book.wait_ns for book in books) < send_ns / 4

    try:
        reasons = processes.results(SIZE, narrowed, mbit)
        if any(reasons):
            pytest.skip(next(filter(None, reasons)))
        undisturbed(processes, values_count, 0, check)
    finally:
        processes.results(SIZE, narrowed, 10_000)


def narrowed(seat: Seat, mbit: int) -> str:
    """On each host."""
    return limit_rate(mbit)


def check_clocks(rounds: list[tuple[InterconnectBook, int]]) -> None:
    """No stamp was off by more than the error that stands in the book."""
    assert all(0 < book.clock_error_ns < 100_000_000 for book, _ in rounds)
    assert all(off_ns <= book.clock_error_ns for book, off_ns in rounds), rounds
