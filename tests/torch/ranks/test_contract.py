"""
The contract of a collective: one suite, and every implementation passes it.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.torch.ranks import cases
from tests.torch.ranks.implementations import IMPLEMENTATIONS, Opener
from tests.torch.ranks.processes import RankProcesses

TIMEOUT_S = 1.5
SLACK_S = 1.0
SHAPES = [(1,), (0,), (576,), (3, 0, 2), (32, 576), (7, 3, 5), (), (1, 1), (100_003,), (2, 2)]

opened = pytest.mark.parametrize("opener", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
sized = pytest.mark.parametrize("size", [1, 2, 3, 4])
property_test = settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@opened
@sized
def test_a_sum_is_numpys_in_the_order_of_ranks_to_the_bit(processes: RankProcesses, opener: Opener, size: int) -> None:
    processes.results(size, cases.sums, opener, SHAPES)


@opened
@sized
@property_test
@given(shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=20))
def test_sums_of_any_shapes(processes: RankProcesses, opener: Opener, size: int, shapes: list[tuple[int, ...]]) -> None:
    processes.results(size, cases.sums, opener, shapes)


@opened
@sized
def test_a_gather_brings_each_ranks_own_count(processes: RankProcesses, opener: Opener, size: int) -> None:
    counts = [[1, 1, 1, 1], [0, 3, 0, 50_000], [5, 0, 2, 1], [0, 0, 0, 0], [4096, 7, 9, 0], [1, 2, 3, 4]]
    processes.results(size, cases.gathers, opener, [one[:size] for one in counts])


@opened
@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_is_sent_arrives(processes: RankProcesses, opener: Opener, size: int) -> None:
    processes.results(size, cases.relays, opener, SHAPES)


@opened
@pytest.mark.parametrize(("size", "rounds"), [(2, 1000), (4, 300)])
def test_thousands_in_a_row_do_not_mix(processes: RankProcesses, opener: Opener, size: int, rounds: int) -> None:
    processes.results(size, cases.many, opener, rounds)


@opened
def test_two_groups_do_not_disturb_each_other(processes: RankProcesses, opener: Opener) -> None:
    processes.results(3, cases.two_groups, opener)


@opened
@pytest.mark.parametrize("size", [1, 3])
def test_a_group_may_be_closed_twice(processes: RankProcesses, opener: Opener, size: int) -> None:
    processes.results(size, cases.closes_twice, opener)


@opened
@pytest.mark.parametrize(
    ("how", "victim", "kind"),
    [
        ("exit", 1, "sum"),
        ("kill", 2, "model"),
        ("kill", 0, "sum"),
        ("stop", 2, "sum"),
        ("stop", 1, "model"),
        ("stop", 0, "model"),
        ("stop", 2, "gather"),
        ("close", 1, "sum"),
    ],
)
def test_a_lost_rank_is_named_in_time(
    processes: RankProcesses, opener: Opener, how: str, victim: int, kind: str
) -> None:
    outcomes = processes.outcomes(3, 20.0, cases.loses, opener, how=how, victim=victim, timeout_s=TIMEOUT_S, kind=kind)
    assert [one.lost for one in outcomes] == [rank == victim and how != "close" for rank in range(3)], outcomes
    for rank, one in enumerate(outcomes):
        # Ranks that only give to a gather find out when rank 0, which waited for it, has left.
        if rank != victim:
            assert one.error == "" and one.value is not None, one.error
            named, took_s = one.value
            assert named == victim, f"rank {rank} names {named}"
            assert took_s < TIMEOUT_S + SLACK_S
