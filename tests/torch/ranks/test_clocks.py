"""
Ranks whose clocks differ: the estimate is within its error.
"""

import time
from dataclasses import dataclass, field

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.device.ranks.clocks import INTERVAL_NS, ROUND_TRIPS, Clocks
from engine.device.ranks.collective import Stamps
from engine.device.ranks.gloo import Gloo, open_store
from tests.torch.ranks.processes import RankProcesses, Seat

HOUR_NS = 3_600_000_000_000
# By rank; the first two read one clock.
AHEAD_NS = (0, 0, -HOUR_NS // 8, 5 * HOUR_NS)
IDS = ("here", "here", "there", "")


@dataclass
class Wire:
    """A link to a rank whose clock is ahead, in a time that only passes on the way."""

    delays_ns: list[int]
    ahead_ns: int
    now_ns: int = 10**12
    heard: list[int] = field(default_factory=list)

    def clock(self) -> int:
        return self.now_ns

    def exchange_stamp(self, stamp_ns: int, *, receiver: int = -1, sender: int = -1) -> int:
        if sender < 0:
            self.now_ns += self.delays_ns.pop(0) if self.delays_ns else 0
            self.heard.append(stamp_ns)
            return stamp_ns
        answer_ns = self.now_ns + self.ahead_ns
        self.now_ns += self.delays_ns.pop(0)
        return answer_ns


@given(
    st.lists(st.integers(0, 10**8), min_size=2 * ROUND_TRIPS, max_size=2 * ROUND_TRIPS),
    st.integers(-(10**15), 10**15),
)
def test_the_estimate_is_within_its_error_whichever_way_is_longer(delays_ns: list[int], ahead_ns: int) -> None:
    trips = [there + back for there, back in zip(delays_ns[::2], delays_ns[1::2], strict=True)]
    wire = Wire(list(delays_ns), ahead_ns)
    clocks = Clocks(1, ["one", "other"], wire.clock)
    clocks.estimate(wire)
    stamp_ns = wire.now_ns + ahead_ns
    drift_ns = sum(trips) * 15 // 1_000_000
    assert clocks.error_ns <= min(trips) // 2 + 2 + drift_ns
    assert abs(clocks.here(stamp_ns, 0) - wire.now_ns) <= clocks.error_ns
    assert wire.heard[-2:] == [clocks.here(0, 0) * -1, min(trips)]


def test_ranks_that_share_a_clock_ask_nobody() -> None:
    wire = Wire([], 12345)
    clocks = Clocks(1, ["one", "one"], wire.clock)
    clocks.estimate(wire)
    assert (clocks.error_ns, clocks.here(99, 0), wire.heard) == (0, 99, [])
    assert not clocks.outdated(1) and not clocks.outdated(1 + INTERVAL_NS)


def test_a_new_error_grows_until_the_next_estimate() -> None:
    wire = Wire([1000] * 2 * ROUND_TRIPS, 0)
    clocks = Clocks(1, ["one", ""], wire.clock)
    clocks.estimate(wire)
    fresh_ns = clocks.error_ns
    wire.now_ns += INTERVAL_NS
    assert clocks.error_ns - fresh_ns == INTERVAL_NS * 15 // 1_000_000
    assert [clocks.outdated(stamp_ns) for stamp_ns in (5, INTERVAL_NS + 4, INTERVAL_NS + 5, INTERVAL_NS + 6)] == [
        False,
        False,
        True,
        False,
    ]


def with_clocks_apart(seat: Seat, jump_ns: tuple[int, ...]) -> list[tuple[Stamps, int]]:
    """Returns: stamps of a sum and the error that goes with them, before and after the clocks have moved."""
    ahead_ns = AHEAD_NS[seat.rank]
    moved_ns = 0
    store = open_store("127.0.0.1", 0 if seat.rank == 0 else int(seat.hear("p")), leads=seat.rank == 0, start_s=30.0)
    if seat.rank == 0:
        seat.say("p", store.port)
    group = Gloo(
        store,
        rank=seat.rank,
        size=seat.size,
        address="127.0.0.1",
        timeout_s=10.0,
        start_s=30.0,
        clock_id=IDS[seat.rank],
        clock=lambda: time.monotonic_ns() + 10 * HOUR_NS + ahead_ns + moved_ns,
    )
    values = torch.ones(5)
    found = [(group.sum(values), group.clock_error_ns)]
    moved_ns = jump_ns[seat.rank]
    group.sum(values)
    found.append((group.sum(values), group.clock_error_ns))
    group.close()
    return found


def test_stamps_of_other_clocks_are_right_within_the_error_and_stay_so(processes: RankProcesses) -> None:
    passed_ns = INTERVAL_NS + 1
    moved = (passed_ns, passed_ns, passed_ns + 30_000_000, passed_ns - 20_000_000)
    results = processes.results(4, with_clocks_apart, moved)
    for round_, ahead in enumerate((AHEAD_NS, tuple(a + b for a, b in zip(AHEAD_NS, moved, strict=True)))):
        true_ns = [results[rank][round_][0].entered_ns[rank] - ahead[rank] for rank in range(4)]
        for rank in range(4):
            stamps, error_ns = results[rank][round_]
            errors = [abs(stamps.entered_ns[other] - ahead[rank] - true_ns[other]) for other in range(4)]
            assert max(errors) <= error_ns < 20_000_000, (round_, rank, errors)
            if rank < 2:
                assert errors[:2] == [0, 0]
