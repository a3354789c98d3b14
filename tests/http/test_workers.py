"""
Several workers on one port, as real processes: what people read is of all, and one that dies takes only its own.
"""

import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import msgspec
import pytest

from diagnosis.sources.recording import recorded
from gateway.__main__ import main
from telemetry.flight import RING_BYTES_MIN, Recording, recordings
from tests.contract.telemetry.test_metrics import total
from tests.http.asking import CHAT_URL, chat, raw_request, read_until
from tests.http.conftest import options_for, relay_options
from tests.http.fake_engine import FakeEngine, Job
from tests.http.guard import until
from tests.http.harness import WAIT_S, ShellEngine
from tests.http.model_files import EOS_ID
from tests.http.scripted_upstream import ScriptedUpstream
from tests.http.workers import Workers

TRIES_MAX = 80


@pytest.fixture
def engine(socket_path: str, vocab_size: int) -> Iterator[FakeEngine]:
    engine = FakeEngine(socket_path, vocab_size=vocab_size, eos_id=EOS_ID)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def both(model_dir: Path, vocab_size: int) -> Iterator[Workers]:
    """Two workers before the real engine shell, which tells everybody of each step."""
    with TemporaryDirectory(prefix="pellucid") as home:
        shell = ShellEngine(f"{home}/engine.sock", vocab_size=vocab_size)
        shell.start()
        folder, size_bytes = f"{home}/flight", RING_BYTES_MIN
        workers = Workers(
            model_dir, f"{home}/engine.sock", Path(home), 2, flight_directory=folder, flight_memory_bytes=size_bytes
        )
        yield workers
        workers.stop()
        shell.stop()


def served_by_both(both: Workers, name: str) -> list[str]:
    """Requests that begin so, of which each worker has served some."""
    ids: list[str] = []
    while len({both.worker_of(one) for one in ids}) < 2:  # the kernel gives each connection to whoever is quicker
        assert len(ids) < TRIES_MAX, "one worker has taken every connection"
        ids.append(f"{name}-{len(ids)}")
        assert both.post(ids[-1]).status_code == 200
        until(lambda: both.worker_of(ids[-1]) is not None, "it is not logged")
    return ids


def test_whoever_is_asked_tells_of_all(both: Workers) -> None:
    before = both.metrics()
    ids = served_by_both(both, "request")
    for _ in range(6):  # each time of whoever takes the connection
        listed = both.get("/debug/requests").json()
        assert [one["request_id"] for one in listed["requests"]][: len(ids)] == ids[::-1]
        assert "workers_silent" not in listed
        series = both.metrics()
        for name in ("pellucid_requests_total", "pellucid_request_duration_seconds_count"):
            assert total(series, name, route=CHAT_URL) == total(before, name, route=CHAT_URL) + len(ids)
        emitted = total(series, "pellucid_engine_emitted_tokens_total")
        assert emitted == total(series, "pellucid_output_tokens_total") > 0, "each worker hears of each step"
        assert total(series, "pellucid_engine_sequences_per_step_count") == total(series, "pellucid_engine_steps_total")
        assert total(series, "pellucid_gateway_workers") == 2
        assert total(series, "pellucid_gateway_workers_silent") == 0
        assert total(series, "pellucid_engine_up") == 1
    for one in ids[::3]:
        assert both.get(f"/debug/requests/{one}").json()["request_id"] == one
    assert both.get("/debug/requests/nobody").status_code == 404
    assert both.get(f"/debug/requests/{'x' * 5000}").status_code == 404


def test_what_they_have_recorded_is_read_as_one(both: Workers) -> None:
    ids = served_by_both(both, "recorded")
    newest = {one.process: one for one in recordings(Path(both.sockets[0]).parent / "flight")}  # they may have died
    assert newest.keys() == {"gateway-0", "gateway-1"}

    def known(life: Recording) -> set[str]:
        return {one.request_id for one in recorded(life.path, None).requests}

    until(
        lambda: all(known(life) >= set(ids) for life in newest.values()), "a request is recorded after it is answered"
    )
    assert all(recorded(life.path, None).totals.steps > 0 for life in newest.values())


def test_each_line_of_a_log_says_whose_it_is(both: Workers) -> None:
    for number, log in enumerate(both.logs):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        said = [line for line in lines if line["logger"].startswith("pellucid.")]
        assert said and all(line["worker"] == number for line in said)


def test_a_name_that_two_workers_know_is_that_of_the_newest(both: Workers) -> None:
    for _ in range(6):
        assert both.post("the-same").headers["x-request-id"] == "the-same"
        newest = both.get("/debug/requests").json()["requests"][0]
        assert both.get("/debug/requests/the-same").json() == newest


def test_a_worker_that_dies_takes_its_clients_and_nobody_else(model_dir: Path, engine: FakeEngine) -> None:
    asked_by: dict[int, list[str]] = {}  # by the gateway's connection to the engine

    async def talk(job: Job) -> None:
        asked_by.setdefault(id(job.writer), []).append(job.request.request_id.partition("#")[0])
        await job.accept()
        await job.emit([40, 41])
        await job.until_aborted()

    with TemporaryDirectory(prefix="pellucid") as home, contextlib.ExitStack() as sockets:
        # An engine that has work and says nothing is given up, and to start a worker anew takes a busy machine long.
        workers = Workers(model_dir, engine.path, Path(home), 2, silence_s=WAIT_S * 4)
        try:
            assert all(workers.post(f"before-{number}").status_code == 200 for number in range(8))
            until(lambda: _finished(workers) == 8, "a request is counted after it is answered")
            engine.behaviour = talk
            open_ones: dict[str, socket.socket] = {}
            while len(asked_by) < 2:
                assert len(open_ones) < TRIES_MAX, "one worker has taken every connection"
                one = f"open-{len(open_ones)}"
                raw = open_ones[one] = sockets.enter_context(workers.connect())
                raw.sendall(raw_request(chat(stream=True, max_tokens=400), one))
                read_until(raw, b"FG")
            rows = workers.get("/debug/requests").json()["requests"]
            assert {row["request_id"] for row in rows if row["outcome"] is None} == open_ones.keys(), "of both"
            workers.processes[0].kill()
            workers.processes[0].wait(WAIT_S)
            until(lambda: engine.connections == 1, "the engine holds on to a dead gateway")
            cut = {one for one, raw in open_ones.items() if _is_cut(raw)}
            assert cut in [set(ids) for ids in asked_by.values()]
            _the_other_one_serves_on(workers, live=len(open_ones) - len(cut))
            workers.restart(0)
            until(lambda: _silent(workers) == 0, "it does not come back")
            assert _finished(workers) == 8
            for raw in open_ones.values():
                raw.close()
            for one in open_ones.keys() - cut:
                engine.wait_for_abort(one)
            until(lambda: total(workers.metrics(), "pellucid_requests_live", route=CHAT_URL) == 0, "something is left")
        finally:
            workers.stop()


def _the_other_one_serves_on(workers: Workers, *, live: int) -> None:
    """And what was counted is still there."""
    assert workers.get("/ready").status_code == 200
    assert (_silent(workers), _finished(workers)) == (1, 8)
    assert total(workers.metrics(), "pellucid_requests_live", route=CHAT_URL) == live
    assert workers.get("/debug/requests").json()["workers_silent"] == [0]


def _finished(workers: Workers) -> float:
    return total(workers.metrics(), "pellucid_requests_total", outcome="length")


def _silent(workers: Workers) -> float:
    return total(workers.metrics(), "pellucid_gateway_workers_silent")


def _is_cut(raw: socket.socket) -> bool:
    """Whether the server's end is closed; what is open says nothing."""
    raw.settimeout(0.05)
    try:
        while data := raw.recv(65536):
            assert b"[DONE]" not in data
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def test_connections_that_wait_survive_the_workers(both: Workers) -> None:
    """They are the kernel's: no worker takes them with it, and the next one takes them."""
    for process in both.processes:
        process.kill()
        process.wait(WAIT_S)
    with both.connect() as raw:
        raw.sendall(raw_request(chat(), "waited"))
        for number in range(2):
            both.restart(number)
        assert read_until(raw, b'"usage"').startswith(b"HTTP/1.1 200")


def test_a_worker_that_is_stuck_is_left_out_and_named(both: Workers) -> None:
    for number in range(8):
        assert both.post(f"stuck-{number}").status_code == 200
    counted = both.metrics()
    both.processes[1].send_signal(signal.SIGSTOP)
    try:
        listed = both.get("/debug/requests").json()
        assert listed["workers_silent"] == [1]
        series = both.metrics()
        missing = both.get("/debug/requests/nobody").json()["error"]["message"]
        why = [both.get(f"/debug/why/stuck-{number}").json() for number in range(8)]
        report = both.get("/debug/doctor").json()
    finally:
        both.processes[1].send_signal(signal.SIGCONT)
    assert total(series, "pellucid_gateway_workers_silent") == 1
    for name, labels in (("pellucid_requests_total", {"route": CHAT_URL}), ("pellucid_engine_steps_total", {})):
        assert total(series, name, **labels) == total(counted, name, **labels)
    memory = "pellucid_process_resident_memory_bytes"
    assert total(series, memory) < total(counted, memory), "what it sees now is not known"
    assert missing == "No such request is remembered. Workers that do not answer: [1]."
    known = [one for one in why if "error" not in one]
    assert 0 < len(known) < 8, "each has served some"
    assert all(one["workers_silent"] == [1] for one in known)
    assert {one["error"]["message"] for one in why if "error" in one} == {missing}
    assert report["workers_silent"] == [1] and report["requests"] == len(listed["requests"]) >= len(known)
    whole = both.get("/debug/doctor").json()
    assert whole["workers_silent"] == [] and whole["requests"] >= 8
    until(lambda: "workers_silent" not in both.get("/debug/requests").json(), "it is not heard of again")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker": 1}, "there is no worker 1 of 1"),
        ({"listener": 999}, "no socket for 127.0.0.1:8000 was inherited"),
    ],
)
def test_a_worker_that_is_told_nonsense(
    model_dir: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, object], words: str
) -> None:
    options = msgspec.structs.replace(options_for(model_dir, "/nowhere"), **changes)
    assert main(["--options", msgspec.json.encode(options).decode()]) == 2
    assert words in capfd.readouterr().err


@pytest.mark.usefixtures("engine")
def test_what_upstreams_did_for_workers_is_told_of_all(
    model_dir: Path, socket_path: str, upstream: ScriptedUpstream
) -> None:
    with TemporaryDirectory(prefix="pellucid") as home:
        workers = Workers(model_dir, socket_path, Path(home), 2, upstreams=relay_options(upstream).upstreams)
        try:
            ids: list[str] = []
            while len({workers.worker_of(one) for one in ids}) < 2:
                assert len(ids) < TRIES_MAX, "one worker has taken every connection"
                ids.append(f"far-{len(ids)}")
                asked = {**chat(), "model": "remote"}
                answer = httpx.post(
                    workers.url + CHAT_URL, json=asked, headers={"x-request-id": ids[-1]}, timeout=WAIT_S
                )
                assert answer.status_code == 200
                until(lambda: workers.worker_of(ids[-1]) is not None, "it is not logged")
            for _ in range(4):  # each time of whoever takes the connection
                listed = workers.get("/debug/requests").json()["requests"]
                assert [(one["request_id"], one["upstream"]) for one in listed] == [(one, "up0") for one in ids[::-1]]
                _see_upstream(workers, len(ids))
            workers.processes[0].kill()
            workers.restart(0)
            _see_upstream(workers, len(ids))
        finally:
            workers.stop()


def _see_upstream(workers: Workers, count: int) -> None:
    until(lambda: total(workers.metrics(), "pellucid_upstream_up") == 1, "all workers have heard of it")
    series = workers.metrics()
    assert total(series, "pellucid_upstream_attempts_total") == count
    assert total(series, "pellucid_upstream_attempts_total", result="complete") == count
    assert total(series, "pellucid_upstream_tokens_total", usage="output") == 3 * count
    assert total(series, "pellucid_upstream_requests_live") == 0
