"""
The servers that are compared: how each is started, told to be ready, watched and stopped.

All run at the same time and only one is under load: each is asked for its processor time, so that an idle one that does
not rest is seen in the table of samples.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
READY_S_MAX = 300.0
STOP_S_MAX = 30.0
POLL_S = 0.1
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Server:
    """How to start one; `{port}` in its command is replaced."""

    name: str
    command: tuple[str, ...]
    ready_path: str
    model: str  # what clients call it


@dataclass(frozen=True)
class Running:
    """A server that is ready."""

    server: Server
    process: subprocess.Popen[bytes]
    url: str

    def cpu_s(self) -> float:
        """Processor seconds of all its processes so far."""
        return sum(_cpu_s(process_id) for process_id in family(self.process.pid))

    def resident_bytes(self) -> int:
        """Resident memory of all its processes together; what they share counts in each."""
        return sum(_resident_bytes(process_id) for process_id in family(self.process.pid))


@contextmanager
def started(server: Server, logs: Path) -> Iterator[Running]:
    """The server, ready; its output goes to a file in `logs`.  Stopped at the end, with whatever it started."""
    port = _free_port()
    command = [part.format(port=port) for part in server.command]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PELLUCID_", "LLAMA_ARG_"))}
    log_file = logs / f"{server.name.replace(' ', '_').replace('/', '_')}.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        running = Running(server, process, f"http://127.0.0.1:{port}")
        _wait_until_ready(running, log_file)
        yield running
    finally:
        _stop(process)


def _wait_until_ready(running: Running, log_file: Path) -> None:
    ends = time.monotonic() + READY_S_MAX
    while time.monotonic() < ends:
        if running.process.poll() is not None:
            tail = log_file.read_text(errors="replace")[-2000:]
            sys.exit(f"{running.server.name} ended with code {running.process.returncode}:\n{tail}")
        try:
            with urllib.request.urlopen(running.url + running.server.ready_path, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass  # not listening, or listening and loading
        time.sleep(POLL_S)
    sys.exit(f"{running.server.name} was not ready after {READY_S_MAX:.0f} s: {log_file}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server; SIGKILL to it and to all that it started, if it does not go."""
    members = family(process.pid)
    process.terminate()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        for process_id in members:
            try:
                os.kill(process_id, signal.SIGKILL)
            except ProcessLookupError:
                pass  # gone by itself meanwhile
        process.wait()


def family(root: int) -> list[int]:
    """A process and all its descendants; empty if it is gone."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    members, unseen = [], [root] if _stat(root) else []
    while unseen:
        members.append(process_id := unseen.pop())
        unseen += children.get(process_id, [])
    return members


def _stat(process_id: int) -> list[str]:
    """The fields of /proc/N/stat from the state on: [0] state, [1] parent, [11] and [12] processor time."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def _cpu_s(process_id: int) -> float:
    fields = _stat(process_id)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def _resident_bytes(process_id: int) -> int:
    try:
        return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---- Which

PELLUCID = "Pellucid"
LLAMA_FLAGS = "-fa on -np 32 -c 65536 --cache-ram 0"
"""Reasoned, not searched (`--try-flags` tries others beside them); -t and -tb are added."""


def known(peers: Path, model: Path, quantized: Mapping[str, Path], *, threads: int, llama_flags: str) -> list[Server]:
    """All servers, Pellucid first.  `quantized` has the forms that llama.cpp reads, by name."""
    serve = (sys.executable, "pellucid.py", "serve", "--model", str(model), "--model-name", "bench", "--port", "{port}")
    ours = Server(PELLUCID, serve, "/ready", "bench")
    undrafted = Server(f"{PELLUCID} --speculative off", (*serve, "--speculative", "off"), "/ready", "bench")
    return [
        ours,
        undrafted,
        *(llama(peers, name, path, llama_flags, threads=threads) for name, path in quantized.items()),
        Server(
            "OpenVINO GenAI",
            (
                str(peers / "openvino/bin/python"),
                "tests/bench/peers/openvino_front.py",
                *("--model", str(quantized["q8_0"]), "--port", "{port}", "--threads", str(threads)),
            ),
            "/health",
            "bench",
        ),
    ]


def llama(peers: Path, name: str, model: Path, flags: str, *, threads: int) -> Server:
    """llama-server with some flags."""
    command = (str(peers / "llama.cpp/bin/llama-server"), "-m", str(model), "--host", "127.0.0.1", "--port", "{port}")
    return Server(
        f"llama.cpp {name}", (*command, "-t", str(threads), "-tb", str(threads), *flags.split()), "/health", "bench"
    )
