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
    """
    Its clients see a broken connection, those of the other worker nothing.

    The engines stop what nobody waits for at once; places at a limit come back by themselves, when their leases end.
    """
    bodies = [fleet.body(200 + number, max_tokens=200) for number in range(8)]
    texts = [fleet.stream(body).end().text for body in bodies]
    narrow = fleet.new_key(concurrent=len(bodies))
    wide, fleet.key = fleet.key, narrow
    try:
        streams = [fleet.stream(body) for body in bodies]
        for stream in streams:
            stream.has_begun()
        assert fleet.post(max_tokens=1).status_code == 429
        fleet.orphans = fleet.reservations()
        os.kill(fleet.worker(0), signal.SIGKILL)
        for stream in streams:
            stream.end()
        broken = [stream for stream in streams if stream.error]
        whole = [(stream, text) for stream, text in zip(streams, texts, strict=True) if not stream.error]
        assert all(stream.text == text and stream.finish_reason == "length" for stream, text in whole)
        assert all(not stream.finish_reason for stream in broken)
        fleet.key = wide
        assert [fleet.post(max_tokens=1).status_code for _ in range(8)] == [200] * 8, "the other worker serves on"
        fleet.key = narrow
        back_s = fleet.until(lambda: len(fleet.processes("gateway")) == 2, "it is started again")
        place_s = fleet.until(lambda: fleet.takes(len(bodies)), "all places are free", LEASE_S + 10)
        print(
            f"kill -9 of one of two gateways: {len(broken)} of {len(streams)} streams broken, the others whole; "
            f"started again after {back_s:.1f} s, all places at the limit free {place_s:.1f} s later"
        )
    finally:
        fleet.key = wide
