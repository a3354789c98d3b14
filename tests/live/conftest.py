"""
The whole appliance as a user starts it: `pellucid serve` on the real default model.

One server serves all tests of this folder that do not stop it.
"""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

START_S = 120


class Appliance:
    """A running `pellucid serve`."""

    def __init__(self, process: subprocess.Popen[str], said: list[str], log: list[str]) -> None:
        self.process = process
        self.said = said
        self.log = log
        """Of all its processes; whole when it has ended."""
        banner = "\n".join(said)
        found = re.search(r"http://127\.0\.0\.1:\d+", banner)
        assert found is not None, banner
        self.url = found[0]
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def get(self, path: str) -> dict[str, object]:
        """The JSON at `path`."""
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=dict[str, object])

    def children(self) -> dict[str, int]:
        """Process ids by name: `engine-0`, `gateway-0`, `valkey`."""
        found: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue  # It has just ended.
            if parent == self.process.pid:
                found[_name(words)] = int(entry.name)
        return found

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def _name(words: list[str]) -> str:
    """Of the program with this command line."""
    if "--options" not in words:
        return "valkey" if "valkey" in words[0] else words[0]
    module = words[words.index("-m") + 1]
    options = msgspec.json.decode(words[words.index("--options") + 1])
    return f"{module}-{options['replica' if module == 'engine' else 'worker']}"


@contextmanager
def serve(*options: str) -> Iterator[Appliance]:
    """Start the appliance on a free port, and take it down."""
    command = [sys.executable, "-m", "pellucid", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stderr is not None
    log: list[str] = []
    stderr = process.stderr
    reader = threading.Thread(target=lambda: log.extend(stderr))
    reader.start()
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    said: list[str] = []
    for line in process.stdout:
        said.append(line.rstrip("\n"))
        if "/debug/requests" in line:
            break
    watchdog.cancel()
    try:
        assert process.poll() is None and said, "it did not start:\n" + "".join(log)
        appliance = Appliance(process, said, log)
        with appliance.http:
            yield appliance
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        process.stdout.close()
        stderr.close()


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def appliance(default_model: Path) -> Iterator[Appliance]:
    """One server for all tests that leave it as it was."""
    with serve("--model", str(default_model)) as running:
        yield running
