"""
The real processes, with some engines, keys and limits, and ways to hurt them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache.embedded import SOCKET
from tests.live.conftest import ROOT, Appliance, serve
from tests.processes import children_of, ranks_of

WAIT_S = 90.0
"""For a restarted engine: it loads the model anew, beside one that works."""
REQUESTS_PER_MINUTE = 6000
CONCURRENT = 64
ASKED = 8
"""So often that both gateways have very likely answered."""


class Stream:
    """One streamed completion, read in a thread of its own; what its client saw, and when."""

    def __init__(self, fleet: "Fleet", body: dict[str, Any]) -> None:
        self.text = ""
        self.finish_reason = ""
        self.error = ""
        self.usage: dict[str, Any] = {}
        self.request_id = ""
        self.pause_s = 0.0
        """The longest wait for anything."""
        self.begun = threading.Event()
        self._fleet = fleet
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def end(self) -> "Stream":
        """Wait for its end."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "a stream does not end"
        return self

    def has_begun(self) -> None:
        """Wait for its first text."""
        assert self.begun.wait(WAIT_S), self.error

    def _read(self) -> None:
        heard_s = time.monotonic()
        try:
            with self._fleet.client() as client, client.stream("POST", "/v1/completions", json=self._body) as answer:
                self.request_id = answer.headers["x-request-id"]
                if answer.status_code != 200:
                    self.error = f"{answer.status_code} {answer.read().decode()}"
                    return
                for line in answer.iter_lines():
                    now_s = time.monotonic()
                    self.pause_s, heard_s = max(self.pause_s, now_s - heard_s), now_s
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.begun.set()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
            return
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if choice["text"]:
                self.begun.set()


class Fleet:
    """A running appliance, its processes, and a key for it."""

    def __init__(self, appliance: Appliance, data: Path, key: str, replicas: int) -> None:
        self.appliance = appliance
        self.replicas = replicas
        self.data = data
        self.key = key
        self.orphans: set[bytes] = set()
        """Reservations of a gateway that is dead: nobody settles them, they expire."""
        self.model = self.get("/v1/models")["data"][0]["id"]

    def new_key(self, **limits: int) -> str:
        """One more key."""
        return new_key(self.data, **limits)

    def redis(self, *words: str) -> bytes:
        """What the server for keys and limits answers to a command."""
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(10)
            self.until(lambda: _connected(raw, str(self.data / "valkey" / SOCKET)), "the server for limits listens", 10)
            lines = [f"*{len(words)}", *(part for word in words for part in (f"${len(word)}", word))]
            raw.sendall(("\r\n".join(lines) + "\r\n").encode())
            return raw.recv(1 << 16)

    def reservations(self) -> set[bytes]:
        """The names of those that are not settled, and not void."""
        names = {line for line in self.redis("KEYS", "*:reservation:*").split(b"\r\n") if b":reservation:" in line}
        return {name for name in names if b"void" not in self.redis("GET", name.decode())}

    def client(self, timeout_s: float = WAIT_S) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.appliance.url, headers=headers, timeout=timeout_s)

    def get(self, path: str) -> Any:
        with self.client() as client:
            answer = client.get(path)
            assert answer.status_code in (200, 503), answer.text
            return answer.json()

    def post(self, **changes: object) -> httpx.Response:
        with self.client() as client:
            return client.post("/v1/completions", json=self.body(0, **changes))

    def body(self, number: int, **changes: object) -> dict[str, Any]:
        """A request that says the same each time."""
        return {
            "model": self.model,
            "prompt": f"Story number {number}. Once upon a time there was a",
            "max_tokens": 80,
            "temperature": 1,
            "seed": number,
            "ignore_eos": True,
            **changes,
        }

    def stream(self, body: dict[str, Any]) -> Stream:
        return Stream(self, body)

    # ---- processes

    def processes(self, module: str) -> dict[int, list[str]]:
        """Process ids and command lines of our children that run `module`, or a program of that name."""
        found: dict[int, list[str]] = {}
        for pid, words in children_of(self.appliance.process.pid).items():
            program = words[0].partition(" ")[0]  # Valkey says behind its name where it listens
            if module in words or program.endswith(module):
                found[pid] = words
        return found

    def engine(self, replica: int) -> int:
        """The process id of a replica."""
        return self._engines()[replica]

    def _engines(self) -> dict[int, int]:
        """The process ids of those that are there, by replica."""
        found = self.processes("engine")
        return {json.loads(words[words.index("--options") + 1])["replica"]: pid for pid, words in found.items()}

    def ranks(self, replica: int) -> list[int]:
        """The process ids of a replica's ranks that have been started, by rank."""
        return ranks_of(self.engine(replica))

    def worker(self, number: int) -> int:
        """The process id of a gateway."""
        for pid, words in self.processes("gateway").items():
            if json.loads(words[words.index("--options") + 1])["worker"] == number:
                return pid
        raise AssertionError(f"there is no worker {number}")

    def takes(self, requests: int) -> bool:
        """Whether so many requests are let in at the same time."""
        streams = [self.stream(self.body(number, max_tokens=100)) for number in range(requests)]
        return [stream.end().error for stream in streams] == [""] * requests

    def the(self, module: str) -> int:
        """The process id of the only one."""
        [pid] = self.processes(module)
        return pid

    def held(self) -> dict[int, int]:
        """KV slots that are held, by replica; nothing of one that is gone, whose last book is shown as stale."""
        books = self.get("/debug/kv").get("replicas", {})
        held = {int(number): book["slots"]["filled"] for number, book in books.items() if not book["stale"]}
        return {number: slots for number, slots in held.items() if slots}

    def busy(self) -> int:
        """The replica that holds the most KV now."""
        held: dict[int, int] = {}

        def works() -> bool:
            here = self._engines()  # one that has just been killed is not known to be gone at once
            held.update({number: slots for number, slots in self.held().items() if number in here})
            return bool(held)

        self.until(works, "an engine works", 10)
        return max(held, key=lambda number: held[number])

    def kill_busy(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to the replica that works; its process id."""
        pid = self.engine(self.busy())
        os.kill(pid, number)
        return pid

    # ---- waiting, and the books

    def until(self, truth: Callable[[], bool], what: str, within_s: float = WAIT_S) -> float:
        """Poll until it holds; how long that took, in seconds."""
        begun_s = time.monotonic()
        while not truth():
            assert time.monotonic() - begun_s < within_s, f"not within {within_s:g} s: {what}"
            time.sleep(0.02)
        return time.monotonic() - begun_s

    def until_whole(self) -> float:
        """Until all replicas serve and the limits are kept by the server again."""

        def whole() -> bool:
            return self.all_see(self.replicas) and self.get("/health")["status"] == "ok"

        return self.until(whole, "all is well again")

    def all_see(self, engines: int) -> bool:
        """Whether every gateway is connected to so many: each question is a new connection, to either of them."""
        return all(len(self.get("/health")["engines"]) == engines for _ in range(ASKED))

    def check_books(self) -> None:
        """Every ledger sums, no book has failed to close, no KV is held, nothing is held of the limits."""

        def quiet() -> bool:
            kv = self.get("/debug/kv")["slots"]
            rows = self.get("/debug/requests")["requests"]
            return kv["filled"] + kv["tail"] + kv["lookahead"] + kv["fenced"] == 0 and all(
                row["outcome"] for row in rows
            )

        self.until(quiet, "everything is given back", 20)
        self.until(lambda: self.reservations() <= self.orphans, "no reservation is left", 20)
        for row in self.get("/debug/requests")["requests"]:
            assert sum(row["states"].values()) == row["e2e_ns"], row
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        mismatches = [line for line in lines if line.startswith("pellucid_book_mismatches_total{")]
        assert mismatches and all(line.endswith((" 0", " 0.0")) for line in mismatches), mismatches

    def ledger(self, request_id: str) -> Any:
        """One request's."""
        return self.get(f"/debug/requests/{request_id}")


def _connected(raw: socket.socket, path: str) -> bool:
    """Whether a server that may be on its way back takes the connection."""
    try:
        raw.connect(path)
    except OSError:
        return False
    return True


def new_key(data: Path, *, concurrent: int = CONCURRENT) -> str:
    """A key with limits that no test here comes near to, unless it says so."""
    limits = ["--rpm", str(REQUESTS_PER_MINUTE), "--tpm", "10000000", "--concurrent", str(concurrent)]
    create = ["keys", "create", "--tenant", "chaos", *limits, "--json", "--data-dir", str(data)]
    command = [sys.executable, "-m", "pellucid", *create]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    key = json.loads(made.stdout)["key"]
    assert isinstance(key, str)
    return key


@contextmanager
def started(model: Path, data: Path, replicas: int, *options: str) -> Iterator[Fleet]:
    """An appliance of `model` whose engines have one thread each, when all is well."""
    key = new_key(data)
    common = ["--model", str(model), "--data-dir", str(data), "--replicas", str(replicas), "--threads", "1"]
    with serve(*common, "--drain", "5", *options) as appliance:
        running = Fleet(appliance, data, key, replicas)
        running.until_whole()
        yield running


@pytest.fixture(scope="session")
def fleet(default_model: Path) -> Iterator[Fleet]:
    """Two gateways, and two replicas of the default model, for all tests of this folder but those of ranks."""
    with (
        tempfile.TemporaryDirectory(prefix="pellucid-chaos-") as folder,
        started(default_model, Path(folder), 2, "--workers", "2", "--kv-memory", "256MiB") as running,
    ):
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An engine may have to load twice in a test."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(autouse=True)
def whole(fleet: Fleet) -> Iterator[None]:
    """Each test begins, and ends, with everything well and every book closed."""
    fleet.until_whole()
    yield
    fleet.until_whole()
    fleet.check_books()
