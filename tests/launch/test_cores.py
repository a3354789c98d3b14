"""Which processors a replica gets: no two the same, whole cores where they go round, and threads to match."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cores import Share, share_of, usable_cpus


@given(st.sets(st.integers(0, 255), min_size=1), st.integers(2, 64), st.integers(0, 4))
def test_shares_are_equal_and_do_not_overlap(cpus: set[int], replicas: int, threads: int) -> None:
    shares = [share_of(replica, replicas, threads, tuple(cpus)) for replica in range(replicas)]
    taken = [cpu for share in shares for cpu in share.cpus]
    assert len(taken) == len(set(taken)) and set(taken) <= cpus
    assert len({(share.threads, len(share.cpus)) for share in shares}) == 1
    share = shares[0]
    assert share.threads == (threads or max(1, len(cpus) // replicas))
    assert len(share.cpus) in (0, len(cpus) // replicas)
    assert bool(share.cpus) == (share.threads <= len(cpus) // replicas)  # no thread waits for another's processor


def test_an_only_replica_decides_by_itself() -> None:
    assert share_of(0, 1, 0, (0, 1, 2)) == Share(0, ())
    assert share_of(0, 1, 2, (0, 1, 2)) == Share(2, ())


def test_threads_of_one_core_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux often counts the first threads of all cores, and then the second ones."""
    for cpu in range(8):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)), raising=False)
    assert usable_cpus(tmp_path) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert share_of(1, 2, 0, usable_cpus(tmp_path)) == Share(4, (2, 6, 3, 7))


def test_without_a_topology_their_numbers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {3, 1, 2}, raising=False)
    assert usable_cpus(tmp_path) == (1, 2, 3)
