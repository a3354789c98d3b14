"""
The server for keys and limits is stopped, killed, flushed, refuses to write, or has no disk: requests go on.
"""

import os
import signal
import statistics
import time

import pytest

from tests.chaos.conftest import Fleet

REQUESTS = 12
ADDED_S_MAX = 0.15


def times_s(fleet: Fleet) -> tuple[list[float], list[int], list[str]]:
    """How long some small requests took, how they ended, and what the answers say is missing."""
    took, statuses, degraded = [], [], []
    with fleet.client() as client:
        for number in range(REQUESTS):
            begun_s = time.monotonic()
            answer = client.post("/v1/completions", json=fleet.body(number, max_tokens=1))
            took.append(time.monotonic() - begun_s)
            statuses.append(answer.status_code)
            degraded.append(answer.headers.get("x-pellucid-degraded", ""))
    return took, statuses, degraded


def quickly(fleet: Fleet, before: list[float], what: str) -> None:
    """All requests are answered, none much later than without the trouble, and their answers say so."""
    took, statuses, degraded = times_s(fleet)
    added_s = max(took) - statistics.median(before)
    said = degraded.count("limits")
    print(f"{what}: {statuses.count(200)} of {REQUESTS} answered, {said} say so, +{added_s:.3f} s at most")
    assert statuses == [200] * REQUESTS
    assert "limits" in degraded
    assert added_s < ADDED_S_MAX


@pytest.fixture
def before(fleet: Fleet) -> list[float]:
    """Times without trouble."""
    times_s(fleet)
    return times_s(fleet)[0]


def test_stopped(fleet: Fleet, before: list[float]) -> None:
    pid = fleet.the("valkey-server")
    os.kill(pid, signal.SIGSTOP)
    try:
        quickly(fleet, before, "SIGSTOP of the server for limits")
        fleet.until(lambda: fleet.get("/health")["status"] == "degraded", "the gateway that met it says so", 10)
        assert fleet.get("/ready")["status"] == "ready"
    finally:
        os.kill(pid, signal.SIGCONT)
    print(f"SIGCONT: well again after {fleet.until_whole():.1f} s")


def test_killed(fleet: Fleet, before: list[float]) -> None:
    os.kill(fleet.the("valkey-server"), signal.SIGKILL)
    _, statuses, _ = times_s(fleet)
    assert statuses == [200] * REQUESTS
    whole_s = fleet.until_whole()
    print(f"kill -9 of the server for limits: {statuses.count(200)} of {REQUESTS} answered, well after {whole_s:.1f} s")
    assert fleet.post(max_tokens=1).status_code == 200  # The key has survived.


def test_scripts_flushed(fleet: Fleet) -> None:
    assert fleet.redis("SCRIPT", "FLUSH") == b"+OK\r\n"
    _, statuses, degraded = times_s(fleet)
    assert (statuses, set(degraded)) == ([200] * REQUESTS, {""})


def test_it_refuses_to_write(fleet: Fleet, before: list[float]) -> None:
    assert fleet.redis("CONFIG", "SET", "min-replicas-to-write", "1") == b"+OK\r\n"
    try:
        quickly(fleet, before, "a server for limits that only reads")
    finally:
        fleet.redis("CONFIG", "SET", "min-replicas-to-write", "0")
    print(f"it writes again: well after {fleet.until_whole():.1f} s")


def test_flushed(fleet: Fleet) -> None:
    """Limits begin anew.  Keys are gone, and nobody is let in for that: a server that has lost them knows nobody."""
    assert fleet.post(max_tokens=1).status_code == 200
    assert fleet.redis("FLUSHALL") == b"+OK\r\n"
    refused_s = fleet.until(lambda: fleet.post(max_tokens=1).status_code == 401, "the lost key is refused", 20)
    fleet.key = fleet.new_key()
    answer = fleet.post(max_tokens=1)
    print(f"FLUSHALL: the lost key is refused after {refused_s:.1f} s, a new one gets {answer.status_code}")
    assert answer.status_code == 200


def test_streams_do_not_notice(fleet: Fleet) -> None:
    body = fleet.body(120, max_tokens=150)
    text = fleet.stream(body).end().text
    stream = fleet.stream(body)
    stream.has_begun()
    os.kill(fleet.the("valkey-server"), signal.SIGKILL)
    stream.end()
    assert (stream.error, stream.text) == ("", text)
