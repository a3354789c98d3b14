"""Two engines behind one gateway: it serves as soon as one of them does, and tells them apart."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from tests.http.asking import chat
from tests.http.conftest import options_for
from tests.http.guard import until
from tests.http.harness import WAIT_S, LiveGateway, ShellEngine

Two = tuple[LiveGateway, Callable[[int], ShellEngine]]


@pytest.fixture
def two(model_dir: Path, vocab_size: int) -> Iterator[Two]:
    """A gateway that knows of two engines, and a way to start them.  Both call themselves replica 0."""
    with TemporaryDirectory(prefix="pellucid") as directory:
        paths = [f"{directory}/{number}.sock" for number in range(2)]
        engines: list[ShellEngine] = []

        def start(number: int) -> ShellEngine:
            engines.append(ShellEngine(paths[number], vocab_size=vocab_size))
            engines[-1].start()
            return engines[-1]

        addresses = tuple(f"unix:{path}" for path in paths)
        gateway = LiveGateway(msgspec.structs.replace(options_for(model_dir, paths[0]), engines=addresses))
        gateway.start(ready=False)
        yield gateway, start
        gateway.stop()
        for engine in engines:
            engine.stop()


def test_one_is_enough_to_be_ready(two: Two) -> None:
    gateway, start = two
    refused = gateway.client.get("/ready")
    assert refused.status_code == 503
    assert refused.json()["reason"] == "engine 0 not connected; engine 1 not connected"
    start(1)
    until(lambda: gateway.client.get("/ready").status_code == 200, "not ready")
    assert gateway.client.get("/ready").json()["engines"] == {"0": "not connected"}
    health = gateway.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded"), "it lives, and one is missing"
    assert health.json()["degraded"] == gateway.client.get("/ready").json()["degraded"] == "Engine 0: not connected."
    assert [one["replica"] for one in health.json()["engines"]] == [1]
    assert gateway.client.post("/v1/chat/completions", json=chat()).status_code == 200
    start(0)
    until(lambda: gateway.client.get("/ready").json()["engines"] == {}, "the other one is not seen")
    assert gateway.client.get("/health").json()["status"] == "ok"


def test_what_people_read_is_of_both(two: Two) -> None:
    gateway, start = two
    for number in range(2):
        start(number)
    until(lambda: gateway.client.get("/ready").json()["engines"] == {}, "not both are seen")
    body = chat(max_tokens=400, ignore_eos=True, stream=True)

    def ask() -> None:
        gateway.client.post("/v1/chat/completions", json=body)

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(WAIT_S)
    kv = gateway.client.get("/debug/kv").json()
    assert set(kv["replicas"]) == {"0", "1"}
    for place, slots in kv["slots"].items():
        assert slots == sum(one["slots"][place] for one in kv["replicas"].values())
    steps = gateway.hub.debug_steps(limit=2000)["steps"]
    assert isinstance(steps, list)
    assert {step["replica"] for step in steps if isinstance(step, dict)} == {0, 1}
    lines = gateway.client.get("/metrics").text.splitlines()
    assert {'pellucid_engine_up{replica="0"} 1.0', 'pellucid_engine_up{replica="1"} 1.0'} <= set(lines)
    counted = {line.split()[0] for line in lines if line.startswith("pellucid_engine_steps_total{")}
    assert counted == {f'pellucid_engine_steps_total{{replica="{number}"}}' for number in range(2)}
