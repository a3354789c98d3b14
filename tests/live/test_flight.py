"""
The flight recorder of the whole appliance: its engine and its gateway are killed in the midst of requests, and what
they did last can be read and replayed.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from telemetry.books import step_mismatches
from telemetry.flight import read_records, recordings
from telemetry.records import RequestRecord, StepRecord
from tests.live.conftest import ROOT, Appliance, serve
from tests.live.test_appliance import model_of, wait_for

STREAMS = 4
RESTART_S = 90.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def own(default_model: Path, data: Path) -> Iterator[Appliance]:
    """One that may be hurt, with a data directory of its own."""
    with serve("--model", str(default_model), "--data-dir", str(data), "--flight-memory", "8MiB") as running:
        yield running


def flight(data: Path, *words: str) -> tuple[int, list[str]]:
    """Exit code and lines of `pellucid flight ...`."""
    command = [sys.executable, "-m", "pellucid", "flight", *words, "--data-dir", str(data)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == "", done.stderr
    return done.returncode, done.stdout.splitlines()


class Load:
    """Streams that follow each other until it ends; prompts are long and repeat themselves, so that drafts are made."""

    def __init__(self, own: Appliance) -> None:
        self._own = own
        self._ending = threading.Event()
        self._model = model_of(own)
        self.begun = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._stream, args=(number,)) for number in range(STREAMS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        for _ in range(2 * STREAMS):
            assert self.begun.acquire(timeout=RESTART_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _stream(self, number: int) -> None:
        turn = 0
        while not self._ending.is_set():
            turn += 1
            body = {
                "model": self._model,
                "prompt": f"Story {number}, part {turn}. " + "The cat sat on the mat and looked at the dog. " * 12,
                "max_tokens": 30 + 10 * (number % 3),
                "ignore_eos": True,
                "seed": number,
                "stream": True,
            }
            try:
                with httpx.stream("POST", f"{self._own.url}/v1/completions", json=body, timeout=RESTART_S) as answer:
                    for _ in answer.iter_lines():
                        if self._ending.is_set():
                            break
                self.begun.release()
            except httpx.HTTPError:
                self._ending.wait(0.1)  # the gateway has been killed


def test_a_dump_while_it_runs_has_what_the_debug_routes_have(own: Appliance, data: Path) -> None:
    with Load(own):
        pass
    shown: list[dict[str, Any]] = own.http.get("/debug/steps").json()["steps"]
    code, lines = flight(data, "dump")
    assert code == 0
    head, *records = map(json.loads, lines)
    assert head["being_written"] and head["lost"] == 0 and not head["torn"]
    recorded = [one for one in records if one["record"] == "step"]
    assert len(recorded) == head["steps"] > 30
    steps = {one["step_id"]: one for one in recorded}  # the newest: an engine may have had two lives
    assert len(shown) > 20 and all(steps[one["step_id"]].items() >= one.items() for one in shown)
    ended = [one for one in records if one["record"] == "request" and one["route"] == "/v1/completions"]
    assert len(ended) >= 2 * STREAMS and {one["imbalance_ns"] for one in ended} == {0}


def test_the_journal_of_a_killed_engine_replays(own: Appliance, data: Path) -> None:
    with Load(own) as load:
        code, lines = flight(data, "replay")  # while it is written
        assert code == 0 and lines[0].endswith(": all plans are the same."), lines
        os.kill(own.children()["engine-0"], signal.SIGKILL)
        wait_for(lambda: len(engines(data)) == 2, "another engine", RESTART_S)
        for _ in range(STREAMS):
            assert load.begun.acquire(timeout=RESTART_S)  # they have been resumed, or were begun anew
    killed, restarted = engines(data)
    code, lines = flight(data, "replay", killed.path.name)
    assert code == 0 and lines[0].endswith(": all plans are the same."), lines
    assert lines[1:] == [] or "was in flight at the end, for cmpl-" in lines[1]
    code, lines = flight(data, "dump", killed.path.name)
    head, *entries = map(json.loads, lines)
    assert code == 0 and not head["being_written"] and not head["torn"] and head["steps"] > 50
    kinds = [one["entry"] for one in entries]
    assert kinds[0] == "snapshot" and kinds[-1] in ("applied", "planned", "committed")
    assert sum(piece["drafts"] for one in entries if one["entry"] == "planned" for piece in one["plan"]["slices"]) > 0
    code, lines = flight(data, "replay", restarted.path.name)
    assert code == 0 and lines[0].endswith(": all plans are the same."), lines


def test_the_records_of_a_killed_gateway_are_there(own: Appliance, data: Path) -> None:
    with Load(own) as load:
        os.kill(own.children()["gateway-0"], signal.SIGKILL)
        wait_for(lambda: len(gateways(data)) == 2, "another gateway", RESTART_S)
        for _ in range(3 * STREAMS):  # some have ended before
            assert load.begun.acquire(timeout=RESTART_S)
    killed, restarted = gateways(data)
    assert (killed.living, restarted.living) == (False, True)
    for recording in (killed, restarted):
        records = list(read_records(recording.path))
        steps = [one for one in records if isinstance(one, StepRecord)]
        assert len(steps) > 20 and [list(step_mismatches(step)) for step in steps] == [[]] * len(steps)
        assert any(isinstance(one, RequestRecord) and one.route == "/v1/completions" for one in records)
        last_ns = max(step.ended_ns for step in steps)
        assert any(one.ended_ns > last_ns - 1_000_000_000 for one in steps)
    assert flight(data, "replay")[0] == 0


def test_in_the_end_nobody_writes_any_more(default_model: Path, tmp_path: Path) -> None:
    data = tmp_path
    with serve("--model", str(default_model), "--data-dir", str(data), "--flight-memory", "8MiB") as running:
        with Load(running):
            pass
        assert running.terminate() == 0
    assert not any(one.living for one in recordings(data / "flight"))
    code, lines = flight(data, "replay")
    assert code == 0 and len(lines) == 1 and lines[0].endswith(": all plans are the same.")
    code, lines = flight(data, "dump", "--journal")
    assert json.loads(lines[-1])["entry"] in ("committed", "stopped")


def engines(data: Path) -> list[Any]:
    return [one for one in recordings(data / "flight") if one.process == "engine-0"]


def gateways(data: Path) -> list[Any]:
    return [one for one in recordings(data / "flight") if one.process == "gateway-0"]
