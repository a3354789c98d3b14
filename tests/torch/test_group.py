"""
A group of ranks as processes, `python -m engine`: what becomes of one is noticed, it is named, and nobody stays.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from engine.api import GenerateRequest, Sampling, encode
from engine.config import EngineOptions
from tests.processes import is_there, ranks_of
from tests.torch.tiny import write_model

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
NOTICED_S = 10.0
"""For what takes two seconds and the start of no process, on a busy machine."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


class Ranks:
    """One engine of several ranks, its processes, and what it says."""

    def __init__(self, folder: Path, options: EngineOptions, environ: dict[str, str]) -> None:
        self._log = folder / "log"
        self._listen = options.listen.removeprefix("unix:")
        command = [sys.executable, "-P", "-m", "engine", "--options", msgspec.json.encode(options).decode()]
        environ = os.environ | {"PYTHONPATH": str(ROOT)} | environ
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ)
        self._count = options.tensor_parallel
        self._gateway = socket.socket(socket.AF_UNIX)

    @property
    def said(self) -> str:
        """By all ranks, until now."""
        return self._log.read_text()

    def pids(self) -> list[int]:
        """Of each rank.  All are there."""

        def complete() -> bool:
            assert self._process.poll() is None, self.said
            return len(ranks_of(self._process.pid)) == self._count

        self.until(complete, "all ranks have been started")
        return ranks_of(self._process.pid)

    def ready(self) -> list[int]:
        """Wait until it serves; the process ids by rank."""

        def serves() -> bool:
            assert self._process.poll() is None, self.said
            return "engine_ready" in self.said

        self.until(serves, "it serves")
        return self.pids()

    def work(self) -> None:
        """Give it work that takes long, and wait until it has begun."""
        sampling = Sampling(temperature=0)
        ask = GenerateRequest(request_id="r", prompt=(3, 4, 5), tokens_max=1900, sampling=sampling)
        self._gateway.settimeout(WAIT_S)
        self._gateway.connect(self._listen)
        self._gateway.sendall(encode(ask))
        heard = 0
        while heard < 8192:  # a greeting is shorter
            heard += len(self._gateway.recv(1024))

    def end(self, within_s: float = WAIT_S) -> int:
        """Wait for the end; the exit code."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end within {within_s:g} s:\n{self.said}") from None

    def close(self) -> None:
        """Nobody is left, also of what failed."""
        self._gateway.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @staticmethod
    def until(truth: Callable[[], bool], what: str, within_s: float = WAIT_S) -> None:
        """Poll until it holds."""
        begun_s = time.monotonic()
        while not truth():
            assert time.monotonic() - begun_s < within_s, f"not within {within_s:g} s: {what}"
            time.sleep(0.01)


Start = Callable[..., Ranks]


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Iterator[Start]:
    """Engines of the tiny model, which are gone afterwards."""
    started: list[Ranks] = []

    def begin(model: Path = tiny_model, environ: dict[str, str] | None = None, **changes: object) -> Ranks:
        given: dict[str, object] = {
            "dtype": "float32",
            "quantization": "none",
            "threads": 1,
            "kv_memory_bytes": 4 << 20,
            "tokens_step_max": 64,
            "tensor_parallel": 2,
            "rank_timeout_s": 1.0,
        }
        place = f"unix:{tmp_path}/s"
        options = EngineOptions(model=str(model), model_name="tiny", listen=place, **(given | changes))  # type: ignore[arg-type]
        started.append(Ranks(tmp_path, options, environ or {}))
        return started[-1]

    yield begin
    for one in started:
        one.close()


def _nobody_is_left(pids: list[int]) -> None:
    Ranks.until(lambda: not any(map(is_there, pids)), "all ranks are gone", NOTICED_S)


def test_a_rank_that_dies_is_named_and_ends_its_group(start: Start) -> None:
    ranks = start()
    pids = ranks.ready()
    os.kill(pids[1], signal.SIGKILL)
    assert ranks.end(NOTICED_S) == 1
    assert "rank 1 was killed by SIGKILL" in ranks.said
    _nobody_is_left(pids)


@pytest.mark.parametrize("way", ["shared-memory", "gloo"])
def test_a_rank_that_hangs_in_a_step_is_named_and_killed(start: Start, way: str) -> None:
    """It is the exchange that notices: no pulse is missed so early."""
    ranks = start(interconnect=way, rank_timeout_s=0.5)
    pids = ranks.ready()
    ranks.work()
    os.kill(pids[1], signal.SIGSTOP)
    assert ranks.end(NOTICED_S) == 1
    assert re.search(r"rank_lost|device_lost", ranks.said) and "rank 1 " in ranks.said
    assert "no sign of life" not in ranks.said
    _nobody_is_left(pids)


def test_an_idle_rank_that_hangs_is_named_and_killed(start: Start) -> None:
    ranks = start()
    pids = ranks.ready()
    os.kill(pids[1], signal.SIGSTOP)
    assert ranks.end(NOTICED_S) == 1
    assert "rank 1 gave no sign of life for 2 s" in ranks.said
    _nobody_is_left(pids)


def test_an_idle_rank_0_that_hangs_is_named_and_killed_by_the_others(start: Start) -> None:
    ranks = start()
    pids = ranks.ready()
    os.kill(pids[0], signal.SIGSTOP)
    assert ranks.end(NOTICED_S) == -signal.SIGKILL
    assert "rank 0 gave no sign of life for 2 s" in ranks.said
    _nobody_is_left(pids)


def test_when_rank_0_dies_the_others_are_gone_at_once(start: Start) -> None:
    ranks = start(interconnect="gloo")
    pids = ranks.ready()
    os.kill(pids[0], signal.SIGKILL)
    assert ranks.end() == -signal.SIGKILL
    _nobody_is_left(pids)


def test_it_stops_when_it_is_told_to(start: Start) -> None:
    ranks = start(interconnect="gloo")
    pids = ranks.ready()
    for pid in reversed(pids):  # as a service manager does it
        os.kill(pid, signal.SIGTERM)
    assert ranks.end() == 0
    assert "lost" not in ranks.said
    _nobody_is_left(pids)


def test_a_rank_that_dies_while_it_loads_is_named(start: Start) -> None:
    """Gloo waits for all ranks before it begins, for as long as it takes to start one: not for one that is dead."""
    ranks = start(interconnect="gloo")
    pids = ranks.pids()
    os.kill(pids[1], signal.SIGKILL)
    assert ranks.end() == 1
    assert "rank 1 was killed by SIGKILL" in ranks.said
    _nobody_is_left(pids)


def test_what_all_ranks_refuse_is_said_once(start: Start, tmp_path: Path) -> None:
    model = write_model(tmp_path / "broken")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-400])
    ranks = start(model, tensor_parallel=3)
    assert ranks.end() == 2
    assert ranks.said.startswith("pellucid engine: model.safetensors is broken") and ranks.said.count("\n") == 1


def test_more_ranks_than_the_model_can_have_start_none(start: Start) -> None:
    ranks = start(tensor_parallel=9)
    assert ranks.end() == 2
    assert ranks.said == "pellucid engine: --tensor-parallel 9: the model has 6 query heads; choose 1 to 6\n"


def test_what_one_rank_refuses_is_said_once_for_all(start: Start, tmp_path: Path) -> None:
    """What a process needs may be missing there alone; here rank 1 is told something else."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif '\"rank\":1' in str(sys.orig_argv): os.environ['PELLUCID_KERNELS'] = 'no'\n"
    )
    ranks = start(environ={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, dtype="auto", quantization="auto")
    assert ranks.end() == 2
    assert ranks.said.startswith("pellucid engine: rank 1: PELLUCID_KERNELS") and ranks.said.count("\n") == 1
