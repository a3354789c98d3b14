"""
Clients leave in crowds, and a gateway dies with all that it holds.
"""

import os
import random
import signal
import threading
import time

import httpx

from tests.chaos.conftest import Fleet

SEED = 11
CROWD = 60
LEASE_S = 30.0


def test_a_crowd_leaves(fleet: Fleet) -> None:
    """Streams are cut at random moments; what nobody waits for is stopped, given back and settled."""
    pick = random.Random(SEED)
    moments = [pick.uniform(0.0, 1.5) for _ in range(CROWD)]
    outcomes: list[str] = []

    def come_and_go(number: int) -> None:
        begun_s = time.monotonic()
        body = {**fleet.body(number, max_tokens=200), "stream": True}
        try:
            with (
                fleet.client(timeout_s=moments[number]) as client,
                client.stream("POST", "/v1/completions", json=body) as answer,
            ):
                for _ in answer.iter_raw():
                    if time.monotonic() - begun_s > moments[number]:
                        break
                outcomes.append("left")
        except httpx.TimeoutException:
            outcomes.append("left")

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(CROWD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begun_s = time.monotonic()
    fleet.check_books()
    back_s = time.monotonic() - begun_s
    gone = [row for row in fleet.get("/debug/requests")["requests"] if row["outcome"] == "client_gone"]
    print(f"{CROWD} streams cut within 1.5 s: {len(gone)} ledgers say so, all given back after {back_s:.1f} s")
    assert outcomes == ["left"] * CROWD
    assert len(gone) > CROWD / 2


def test_a_gateway_dies(fleet: Fleet) -> None:
    """Its clients see a broken connection.  The engines stop at once; places at a limit come back by themselves."""
    narrow = fleet.new_key(concurrent=2)
    wide, fleet.key = fleet.key, narrow
    try:
        streams = [fleet.stream(fleet.body(number, max_tokens=400)) for number in range(2)]
        for stream in streams:
            stream.has_begun()
        third = fleet.post(max_tokens=1)
        assert third.status_code == 429
        fleet.orphans = fleet.reservations()
        os.kill(fleet.the("gateway"), signal.SIGKILL)
        for stream in streams:
            stream.end()
            assert stream.error and not stream.finish_reason
        back_s = fleet.until(lambda: answers(fleet), "a gateway is there again")
        fleet.until_whole()
        place_s = fleet.until(lambda: fleet.post(max_tokens=1).status_code == 200, "a place is free", LEASE_S + 10)
        print(f"kill -9 of the gateway: back after {back_s:.1f} s, places at the limit {place_s:.1f} s later")
    finally:
        fleet.key = wide


def answers(fleet: Fleet) -> bool:
    """Whether anybody listens and is ready."""
    try:
        return httpx.get(fleet.appliance.url + "/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
