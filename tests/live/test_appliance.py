"""
What a new user does first, on the real model and the real processes.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from tests.live.conftest import Appliance, serve

Row = dict[str, object]


class Ledger(msgspec.Struct):
    """The promised fields of `/debug/requests`."""

    request_id: str
    tenant: str
    outcome: str | None
    e2e_ns: int
    states: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Ledgers(msgspec.Struct):
    """`/debug/requests`."""

    requests: list[Ledger]


class Steps(msgspec.Struct):
    """`/debug/steps`."""

    class Step(msgspec.Struct):
        """One of them."""

        class Interconnect(msgspec.Struct):
            """One rank has none."""

            kind: str
            wait_ns: int
            transfer_ns: int
            bytes: int
            straggler: int | None

        step_id: int
        replica: int
        step_ns: int
        parts: dict[str, int]
        tokens: int
        sequences: int
        interconnect: Interconnect

    steps: list[Step]


class Kv(msgspec.Struct):
    """`/debug/kv`."""

    slots: dict[str, int]
    utilization: float
    token_occupancy: float
    internal_fragmentation: float


def ledgers(appliance: Appliance) -> list[Ledger]:
    return msgspec.json.decode(appliance.http.get("/debug/requests").content, type=Ledgers).requests


def wait_for(truth: Callable[[], bool], what: str, within_s: float = 10.0) -> None:
    """Poll until it holds: the far side has its own clock."""
    end_s = time.monotonic() + within_s
    while not truth():
        assert time.monotonic() < end_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


def chat(appliance: Appliance, content: str, **fields: object) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
    body["model"] = model_of(appliance)
    return appliance.http.post("/v1/chat/completions", json=body)


def model_of(appliance: Appliance) -> str:
    listed = msgspec.json.decode(appliance.http.get("/v1/models").content)
    name = listed["data"][0]["id"]
    assert isinstance(name, str)
    return name


def test_the_printed_lines_work(appliance: Appliance) -> None:
    lines = [line for line in appliance.said if line.startswith("curl ") or " -c " in line]
    assert len(lines) == 2
    for line in lines:
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout) > 20
        assert "error" not in done.stdout[:20]


def test_the_ledger_of_every_request_sums_exactly(appliance: Appliance) -> None:
    answer = chat(appliance, "Count from one to five.", max_tokens=24)
    assert answer.status_code == 200
    request_id = answer.json()["id"]
    assert answer.headers["x-request-id"] == request_id

    def ledger() -> Ledger:
        return msgspec.json.decode(appliance.http.get(f"/debug/requests/{request_id}").content, type=Ledger)

    wait_for(lambda: ledger().outcome is not None, "its end is booked, which may be after it was answered")
    row = ledger()
    assert row.outcome in ("stop", "length")
    assert sum(row.states.values()) == row.e2e_ns > 0
    assert {"parse", "tokenize", "dispatch", "prefill", "decode"} <= row.states.keys()
    usage = answer.json()["usage"]
    assert (row.prompt_tokens, row.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert all(sum(one.states.values()) == one.e2e_ns for one in ledgers(appliance))


def test_steps_sum_exactly_and_the_kv_book_closes(appliance: Appliance) -> None:
    chat(appliance, "Say hello.", max_tokens=8)
    steps = msgspec.json.decode(appliance.http.get("/debug/steps").content, type=Steps).steps
    assert steps
    for step in steps:
        assert sum(step.parts.values()) == step.step_ns
        assert step.interconnect.kind == "none"
    slots = msgspec.json.decode(appliance.http.get("/debug/kv").content, type=Kv).slots
    assert slots["total"] == sum(count for place, count in slots.items() if place != "total")


def test_the_books_are_closed_in_the_metrics_too(appliance: Appliance) -> None:
    chat(appliance, "Say hello.", max_tokens=4)
    lines = appliance.http.get("/metrics").text.splitlines()
    mismatches = [line for line in lines if "mismatch" in line and not line.startswith("#")]
    assert mismatches
    assert all(line.endswith((" 0", " 0.0")) for line in mismatches), mismatches


def test_a_second_turn_finds_the_first_one_in_the_cache(appliance: Appliance) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20
    first, second = (chat(appliance, text, max_tokens=4).json() for _ in range(2))
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= second["usage"]["prompt_tokens"] - 32


def test_a_client_that_leaves_is_noticed_within_a_step(appliance: Appliance) -> None:
    body = {
        "model": model_of(appliance),
        "messages": [{"role": "user", "content": "Write a very long story."}],
        "stream": True,
        "max_tokens": 2000,
        "ignore_eos": True,
    }
    with appliance.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        next(stream.iter_lines())
        request_id = stream.headers["x-request-id"]

    def gone() -> bool:
        row = next(row for row in ledgers(appliance) if row.request_id == request_id)
        return row.outcome == "client_gone" and sum(row.states.values()) == row.e2e_ns

    wait_for(gone, "the request ends as client_gone", 3.0)
    wait_for(lambda: held(appliance) == 0, "no KV is held")


def held(appliance: Appliance) -> int:
    """Slots that somebody holds."""
    slots = msgspec.json.decode(appliance.http.get("/debug/kv").content, type=Kv).slots
    return slots["filled"] + slots["tail"] + slots["lookahead"] + slots["fenced"]


def test_a_killed_engine_comes_back(default_model: Path) -> None:
    with serve("--model", str(default_model), "--drain", "5") as own:
        os.kill(own.children()["engine-0"], signal.SIGKILL)
        wait_for(lambda: own.http.get("/ready").status_code == 503, "not ready without an engine")
        assert own.http.get("/health").status_code == 200
        refused = chat(own, "hello", max_tokens=2)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        wait_for(lambda: own.http.get("/ready").status_code == 200, "ready again", 60)
        assert chat(own, "hello", max_tokens=2).status_code == 200


def refuses(own: Appliance) -> bool:
    """Whether a new request is told to go elsewhere: by a 503, or because nobody listens any more."""
    try:
        return chat(own, "new", max_tokens=1).status_code == 503
    except httpx.TransportError:
        return True


def test_sigterm_lets_streams_run_and_refuses_new_ones(default_model: Path) -> None:
    with serve("--model", str(default_model), "--drain", "20") as own:
        model = model_of(own)
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 60}
        lines: list[str] = []
        with own.http.stream("POST", "/v1/chat/completions", json={**body, "ignore_eos": True}) as stream:
            reader = stream.iter_lines()
            lines.append(next(reader))
            children = own.children()
            code: list[int] = []
            stopper = threading.Thread(target=lambda: code.append(own.terminate()))
            stopper.start()
            wait_for(lambda: refuses(own), "new requests are refused while the stream runs on")
            lines += reader
        stopper.join()
        assert lines[-2] == "data: [DONE]" or lines[-1] == "data: [DONE]"
        assert code == [0]
        for pid in children.values():
            assert not Path(f"/proc/{pid}").exists()
