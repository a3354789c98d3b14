"""
Gateway workers as real processes on one port, which the test holds as the supervisor does.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec

from gateway.config import ADMIN_KEY_VARIABLE
from tests.contract.telemetry.test_metrics import Series, read
from tests.http.asking import CHAT_URL, chat
from tests.http.conftest import options_for
from tests.http.guard import until
from tests.http.harness import WAIT_S

ROOT = Path(__file__).resolve().parents[2]


class Workers:
    """Processes that share a socket, which this one holds, as the supervisor does."""

    def __init__(self, model_dir: Path, engine: str, home: Path, count: int, **changes: object) -> None:
        """`admin_key`, a text, among the changes: there is an admin interface too."""
        key = str(changes.pop("admin_key", ""))
        self._environ = {**os.environ, **({ADMIN_KEY_VARIABLE: key} if key else {})}
        self.admin_listener = socket.create_server(("127.0.0.1", 0))
        self.admin_port: int = self.admin_listener.getsockname()[1]
        if key:
            changes |= {"admin_port": self.admin_port, "admin_listener": self.admin_listener.fileno()}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.sockets = tuple(str(home / f"gateway-{number}.sock") for number in range(count))
        options = options_for(model_dir, engine)
        self._options = msgspec.structs.replace(
            options, worker_sockets=self.sockets, listener=self.listener.fileno(), log_format="json", **changes
        )
        self.logs = [home / f"{number}.log" for number in range(count)]
        self.processes = [self._start(number) for number in range(count)]
        for number in range(count):
            self.wait_until_connected(number)

    def _start(self, number: int) -> "subprocess.Popen[bytes]":
        options = msgspec.json.encode(msgspec.structs.replace(self._options, worker=number)).decode()
        command = [sys.executable, "-m", "gateway", "--options", options]
        with self.logs[number].open("ab") as log:
            descriptors = (self.listener.fileno(), self.admin_listener.fileno())
            return subprocess.Popen(command, cwd=ROOT, env=self._environ, stderr=log, pass_fds=descriptors)

    def wait_until_connected(self, number: int, times: int = 1) -> None:
        """Until it says for the n-th time that its engine is there."""
        log = self.logs[number]
        try:
            until(lambda: log.read_text().count("engine connected") >= times, f"worker {number} is not there")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.processes[number].poll()}\n{log.read_text()}") from error

    def restart(self, number: int) -> None:
        """As the supervisor does."""
        self.processes[number].wait(WAIT_S)
        times = self.logs[number].read_text().count("engine connected")
        self.processes[number] = self._start(number)
        self.wait_until_connected(number, times + 1)

    def stop(self) -> None:
        """All of them, by force."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(WAIT_S)
        self.listener.close()
        self.admin_listener.close()

    # ---- asking one of them, whichever takes the connection

    def connect(self) -> socket.socket:
        """A new connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def get(self, path: str) -> httpx.Response:
        """Over a connection of its own."""
        return httpx.get(self.url + path, timeout=WAIT_S)

    def post(self, request_id: str) -> httpx.Response:
        """The same."""
        return httpx.post(self.url + CHAT_URL, json=chat(), headers={"x-request-id": request_id}, timeout=WAIT_S)

    def metrics(self) -> Series:
        """What the worker says that happens to be asked."""
        return read(self.get("/metrics").content)

    def request_lines(self) -> list[dict[str, Any]]:
        """What the logs say of requests that have ended, all workers together."""
        lines = [json.loads(line) for log in self.logs for line in log.read_text().splitlines()]
        return [line for line in lines if line.get("event") == "request"]

    def worker_of(self, request_id: str) -> int | None:
        """Whose log has it."""
        return next((number for number, log in enumerate(self.logs) if f'"{request_id}"' in log.read_text()), None)
