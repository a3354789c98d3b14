"""The supervisor: restart, back-off, order of the end, and no orphans.  Real processes, fake programs."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from launch.supervise import Backoff, describe_exit, where_to_look
from tests.tidy.imports import ROOT

DRIVER = Path(__file__).with_name("supervised.py")
QUICK = Backoff(first_s=0.01, most_s=0.04, healthy_s=60.0)
DEADLINE_S = 20.0


class Run:
    """A supervisor under test, and what was said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def until(self, fits: Callable[[str], bool]) -> str:
        """Read on until a line fits; that line."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := (await self.process.stdout.readline()).decode().strip():
                self.lines.append(line)
                if fits(line):
                    return line
        raise AssertionError(f"the pipe ended before that; {self.lines}")

    async def seen(self, *wanted: str) -> None:
        """Read on until each of these lines has come, in any order."""
        missing = set(wanted) - set(self.lines)
        while missing:
            missing.discard(await self.until(missing.__contains__))

    async def rest(self) -> list[str]:
        """All lines up to the end of the pipe, which is the end of every process that holds it."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            self.lines += (await self.process.stdout.read()).decode().splitlines()
        return self.lines


@asynccontextmanager
async def supervised(
    gateway: str,
    engine: str,
    *,
    ready: str = "yes",
    backoff: Backoff = QUICK,
    grace_s: float = 10.0,
    companion: str = "",
) -> AsyncIterator[Run]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(DRIVER),
        gateway,
        engine,
        ready,
        msgspec.json.encode(backoff).decode(),
        str(grace_s),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COMPANION": companion},
    )
    run = Run(process)
    try:
        yield run
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await run.rest()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_drains_the_gateway_first_and_ends_with_zero(number: signal.Signals) -> None:
    async with supervised("serves", "serves") as run:
        await run.seen("gateway up", "engine up", "supervisor: ready")
        run.process.send_signal(number)
        lines = await run.rest()
        assert lines[-5:] == ["gateway stops", "gateway gone", "supervisor: drained", "engine stops", "engine gone"]
        assert await run.process.wait() == 0


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace_time() -> None:
    async with supervised("stubborn", "serves", grace_s=0.2) as run:
        await run.seen("gateway up", "engine up")
        run.process.terminate()
        lines = await run.rest()
        assert lines[-4:] == ["gateway ignores SIGTERM", "supervisor: drained", "engine stops", "engine gone"]
        assert await run.process.wait() == 0


async def test_a_second_signal_kills() -> None:
    async with supervised("stubborn", "stubborn", grace_s=3600.0) as run:
        await run.seen("gateway up", "engine up")
        run.process.send_signal(signal.SIGINT)
        await run.seen("gateway ignores SIGTERM")
        run.process.send_signal(signal.SIGINT)
        await run.rest()
        assert await run.process.wait() == 130


async def test_a_companion_stops_last() -> None:
    async with supervised("serves", "serves", companion="serves") as run:
        await run.seen("gateway up", "engine up", "valkey up", "supervisor: ready")
        run.process.terminate()
        lines = await run.rest()
        assert lines[-4:] == ["engine stops", "engine gone", "valkey stops", "valkey gone"]
        assert await run.process.wait() == 0


@pytest.mark.parametrize("mode", ["dies", "mistake"])
async def test_a_companion_that_cannot_live_ends_nothing(mode: str) -> None:
    async with supervised("serves", "serves", ready="never", companion=mode) as run:
        for _ in range(5):
            await run.until(lambda line: line.startswith("supervisor: valkey ended"))
        await run.seen("gateway up", "engine up")
        run.process.terminate()
        await run.rest()
        assert await run.process.wait() == 0


@pytest.mark.parametrize("victim", ["engine", "gateway"])
async def test_a_dead_child_comes_back_and_the_other_one_stays(victim: str, tmp_path: Path) -> None:
    dies = f"dies-unless:{tmp_path / 'came back'}"
    modes = {"engine": "serves", "gateway": "serves"} | {victim: dies}
    async with supervised(modes["gateway"], modes["engine"]) as run:
        await run.until(lambda line: line.startswith(f"supervisor: {victim} ended with code 1"))
        await run.until(f"{victim} up".__eq__)
        other = {"engine": "gateway", "gateway": "engine"}[victim]
        await run.seen(f"{other} up")
        run.process.terminate()
        lines = await run.rest()
        assert (lines.count(f"{victim} up"), lines.count(f"{other} up")) == (2, 1)
        assert await run.process.wait() == 0


async def test_pauses_double_and_are_bounded() -> None:
    async with supervised("serves", "dies") as run:
        pauses: list[float] = []
        while len(pauses) < 5:
            line = await run.until(lambda line: "again in" in line)
            pauses.append(float(line.removesuffix(" s").rpartition(" ")[2]))
        assert pauses == [0.01, 0.02, 0.04, 0.04, 0.04]
        run.process.terminate()
        await run.rest()
        assert await run.process.wait() == 0


async def test_the_pause_is_short_again_after_a_healthy_life() -> None:
    async with supervised("serves", "dies", backoff=Backoff(first_s=0.01, most_s=9.0, healthy_s=0.0)) as run:
        for _ in range(4):
            assert (await run.until(lambda line: "again in" in line)).endswith("again in 0.01 s")


async def test_a_signal_during_a_long_pause_ends_at_once() -> None:
    async with supervised("serves", "dies", backoff=Backoff(first_s=3600.0, most_s=3600.0)) as run:
        await run.until(lambda line: "again in 3600 s" in line)
        await run.seen("gateway up")
        run.process.terminate()
        await run.rest()
        assert await run.process.wait() == 0


@pytest.mark.parametrize("modes", [("serves", "mistake"), ("mistake", "serves")])
async def test_a_users_mistake_is_forwarded_and_not_tried_again(modes: tuple[str, str]) -> None:
    async with supervised(*modes, ready="never") as run:
        lines = await run.rest()
        assert [line for line in lines if "the model is broken" in line] == [
            f"{'gateway' if modes[0] == 'mistake' else 'engine'}: the model is broken"
        ]
        said = {line for line in lines if line.startswith("supervisor:")}
        assert said <= {"supervisor: listening", "supervisor: drained"}
        assert await run.process.wait() == 2


async def test_what_has_lived_before_is_tried_again_whatever_it_says(tmp_path: Path) -> None:
    """One engine that finds no memory when it comes back must not take those down that serve."""
    async with supervised("serves", f"serves,mistake-if:{tmp_path / 'lived'}") as run:
        await run.until(lambda line: line.startswith("supervisor: engine-1 ended with code 1"))
        for _ in range(3):
            await run.until(lambda line: line.startswith("supervisor: engine-1 ended with code 2"))
        run.process.terminate()
        lines = await run.rest()
        assert (lines.count("engine up"), lines.count("gateway up"), lines.count("engine-1 up")) == (1, 1, 1)
        assert await run.process.wait() == 0


async def test_the_first_life_of_any_engine_may_end_all() -> None:
    async with supervised("serves", "serves,mistake") as run:
        await run.rest()
        assert await run.process.wait() == 2


async def test_other_engines_load_once_the_first_one_listens() -> None:
    async with supervised("serves", "serves,serves,serves") as run:
        await run.seen("gateway up", "engine up", "engine-1 up", "engine-2 up")
        assert run.lines.index("supervisor: listening") < run.lines.index("engine-1 up")
        run.process.terminate()
        lines = await run.rest()
        assert lines.index("gateway gone") < min(lines.index(f"engine{one} stops") for one in ("", "-1", "-2"))
        assert await run.process.wait() == 0


async def test_other_workers_start_once_the_first_one_is_ready_and_drain_with_it() -> None:
    async with supervised("serves,serves,serves", "serves") as run:
        await run.seen("gateway up", "gateway-1 up", "gateway-2 up")
        assert run.lines.index("supervisor: ready") < run.lines.index("gateway-1 up")
        run.process.terminate()
        lines = await run.rest()
        ends = [lines.index(f"gateway{one} gone") for one in ("", "-1", "-2")]
        assert max(ends) < lines.index("supervisor: drained") < lines.index("engine stops")
        assert await run.process.wait() == 0


async def test_workers_wait_in_vain_for_one_that_is_never_ready() -> None:
    async with supervised("serves,serves", "serves", ready="never") as run:
        await run.seen("gateway up", "engine up")
        run.process.terminate()
        lines = await run.rest()
        assert "gateway-1 up" not in lines
        assert await run.process.wait() == 0


async def test_a_gateway_waits_for_the_engine_and_is_never_started_in_vain() -> None:
    async with supervised("serves", "serves,serves", ready="loading") as run:
        await run.seen("engine up")
        run.process.terminate()
        lines = await run.rest()
        assert lines[-2:] == ["engine stops", "engine gone"] and not {"gateway up", "engine-1 up"} & set(lines)
        assert await run.process.wait() == 0


async def test_what_dies_again_and_again_before_it_was_ready_is_given_up() -> None:
    async with supervised("serves", "dies", ready="never") as run:
        lines = await run.rest()
        assert lines.count("engine up") == 3
        assert "supervisor: engine ended with code 1, 3 times before it was ready: giving up" in lines
        assert await run.process.wait() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux holds the leash")
async def test_no_child_outlives_a_killed_supervisor() -> None:
    async with supervised("stubborn", "stubborn", grace_s=3600.0) as run:
        await run.seen("gateway up", "engine up", "supervisor: ready")
        run.process.kill()
        await run.rest()  # ends only when both children are gone: they hold the pipe
        assert await run.process.wait() == -signal.SIGKILL


def test_pause_is_bounded_after_any_number_of_deaths() -> None:
    backoff = Backoff(first_s=0.5, most_s=30.0)
    pauses = [backoff.pause_s(deaths) for deaths in range(1, 5000)]
    assert pauses[:3] == [0.5, 1.0, 2.0] and max(pauses) == 30.0 and pauses == sorted(pauses)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "ended with code 1"),
        (0, "ended with code 0"),
        (-9, "was killed by SIGKILL"),
        (-77, "was killed by signal 77"),
    ],
)
def test_exits_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


@pytest.mark.parametrize(("free", "words"), [(1, "; see {}/log"), (0, "; the disk is full at {}")])
def test_a_full_disk_is_named_because_no_log_can(
    free: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert where_to_look(tmp_path / "log") == words.format(tmp_path)
