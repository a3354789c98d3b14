"""Which processors a replica and its ranks get: no two the same, whole cores where they go round, threads to match."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cores import Share, share_of, usable_cpus


@given(
    st.sets(st.integers(0, 255), min_size=1),
    st.tuples(st.integers(1, 64), st.integers(1, 64)).filter(lambda sizes: sizes != (1, 1)),
    st.integers(0, 4),
)
def test_shares_are_equal_and_do_not_overlap(cpus: set[int], sizes: tuple[int, int], threads: int) -> None:
    replicas, ranks = sizes
    shares = [share_of(replica, replicas, ranks, threads, tuple(cpus)) for replica in range(replicas)]
    taken = [cpu for share in shares for own in share.rank_cpus for cpu in own]
    assert len(taken) == len(set(taken)) and set(taken) <= cpus
    each = len(cpus) // (replicas * ranks)
    assert {share.threads for share in shares} == {threads or max(1, each)}
    enough = shares[0].threads <= each  # no thread waits for another's processor
    assert len(taken) == (replicas * ranks * each if enough else 0)
    assert {len(share.rank_cpus) for share in shares} == {ranks if enough else 0}
    assert {len(own) for share in shares for own in share.rank_cpus} <= {each}


@given(st.integers(1, 64), st.integers(1, 16), st.integers(2, 16))
def test_ranks_divide_what_their_replica_would_have(cpus: int, replicas: int, ranks: int) -> None:
    for replica in range(replicas):
        whole = share_of(replica, replicas + 1, 1, 0, tuple(range(cpus)))
        parts = share_of(replica, replicas + 1, ranks, 0, tuple(range(cpus)))
        taken = [cpu for own in parts.rank_cpus for cpu in own]
        assert taken == [cpu for own in whole.rank_cpus for cpu in own][: len(taken)]  # side by side, from its first on
        assert not taken or sum(map(len, whole.rank_cpus)) - len(taken) < ranks


def test_an_only_rank_decides_by_itself() -> None:
    assert share_of(0, 1, 1, 0, (0, 1, 2)) == Share(0, ())
    assert share_of(0, 1, 1, 2, (0, 1, 2)) == Share(2, ())


def test_more_ranks_than_processors_share_them_all() -> None:
    assert share_of(0, 1, 3, 0, (0, 1)) == Share(1, ())
    assert share_of(0, 1, 2, 2, (0, 1, 2)) == Share(2, ())


def test_threads_of_one_core_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux often counts the first threads of all cores, and then the second ones."""
    for cpu in range(8):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)), raising=False)
    assert usable_cpus(tmp_path) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert share_of(1, 2, 1, 0, usable_cpus(tmp_path)) == Share(4, ((2, 6, 3, 7),))
    assert share_of(1, 2, 2, 0, usable_cpus(tmp_path)) == Share(2, ((2, 6), (3, 7)))


def test_without_a_topology_their_numbers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {3, 1, 2}, raising=False)
    assert usable_cpus(tmp_path) == (1, 2, 3)
