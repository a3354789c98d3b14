"""
Two gateway workers before two engine replicas, as `pellucid serve` starts them: each process is killed once.

What its clients see in the worst moments, with figures, is tests/chaos; here is that none of it is forgotten.
"""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx

from tests.live.conftest import Appliance, serve
from tests.live.test_appliance import model_of, wait_for

RESTART_S = 60.0
"""An engine loads its model anew, beside one that works."""


def health(own: Appliance) -> dict[str, Any]:
    answer = httpx.get(f"{own.url}/health", timeout=10)  # a connection of its own: either worker may answer
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def connections(own: Appliance) -> int:
    """How many were made, from a worker to an engine."""
    return sum("engine connected" in line for line in own.log)


def says(own: Appliance, status: str) -> bool:
    """Whether both workers, very likely, say that."""
    return all(health(own)["status"] == status for _ in range(6))


class Story(threading.Thread):
    """A stream of text that is the same each time."""

    def __init__(self, own: Appliance) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.finish = ""
        self.begun = threading.Event()
        self._url = f"{own.url}/v1/completions"
        self._body = {
            "model": model_of(own),
            "prompt": "Once upon a time",
            "max_tokens": 200,
            "seed": 7,
            "ignore_eos": True,
            "stream": True,
        }

    def run(self) -> None:
        """Read it to its end."""
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    self.text += choice["text"]
                    self.finish = choice["finish_reason"] or self.finish
                self.begun.set()

    def told(self) -> str:
        """All of it."""
        self.join(60)
        assert not self.is_alive() and self.finish == "length"
        return self.text


def test_each_process_may_die(default_model: Path, tmp_path: Path) -> None:
    own_options = ("--workers", "2", "--replicas", "2", "--threads", "1", "--kv-memory", "256MiB", "--drain", "20")
    with serve("--model", str(default_model), "--data-dir", str(tmp_path), *own_options) as own:
        wait_for(lambda: connections(own) == 4, "each worker has both replicas", RESTART_S)
        undisturbed = Story(own)
        undisturbed.start()
        text = undisturbed.told()

        story = Story(own)
        story.start()
        assert story.begun.wait(60)
        rows = own.http.get("/debug/requests").json()["requests"]
        [replica] = [row["replica"] for row in rows if row["outcome"] is None and row["model"]]
        before = own.children()
        os.kill(before[f"engine-{replica}"], signal.SIGKILL)
        wait_for(lambda: says(own, "degraded"), "it is said that a replica is missing")
        assert health(own)["degraded"].startswith(f"Engine {replica}: not connected")
        assert story.told() == text, "the other replica has gone on with it"

        os.kill(before["valkey"], signal.SIGKILL)
        own.http.close()
        os.kill(before["gateway-0"], signal.SIGKILL)
        own.http = httpx.Client(base_url=own.url, timeout=60)
        wait_for(lambda: serves(own), "the other worker serves, with the other engine")
        wait_for(lambda: own.children().keys() == before.keys(), "all are started again")
        after = own.children()
        assert {name for name in after if after[name] != before[name]} == {f"engine-{replica}", "valkey", "gateway-0"}

        story = Story(own)
        story.start()
        assert story.begun.wait(60)
        assert own.terminate() == 0
        assert story.told() == text, "a drain lets it end"
        assert not any(Path(f"/proc/{pid}").exists() for pid in after.values())
        assert list((tmp_path / "run").iterdir()) == []
    log = "".join(own.log)
    assert log.count("call resumed") == 1
    assert log.count("engine lost") == 2, "one has died, before two workers; a stop loses none"
    assert "Traceback" not in log


def serves(own: Appliance) -> bool:
    """Whether a request is answered: the one that a dying worker has taken is not."""
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "x", "max_tokens": 1}
    try:
        return httpx.post(f"{own.url}/v1/completions", json=body, timeout=60).status_code == 200
    except httpx.TransportError:
        return False
