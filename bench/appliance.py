"""
A `pellucid serve` of one's own on a free port, and what it says of itself.
"""

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.host import ROOT
from launch.leash import leashed
from launch.options import PREFIX

START_S = 180.0  # until all of its engines serve
STOP_S = 30.0
ASK_S = 10.0
POLL_S = 0.05
KEPT = ("PELLUCID_KERNELS",)  # of our variables: the others would set options behind the back of the one who compares
BANNER = re.compile(r"http://127\.0\.0\.1:\d+")
OURS = re.compile(r"pellucid( \w+)?: ")
PART = "pellucid_engine_step_part_seconds_total"
STEPS = "pellucid_engine_steps_total"
STRAGGLER = "pellucid_engine_straggler_steps_total"


class Refused(Exception):
    """It would not start; the words are its own."""


class Books(msgspec.Struct, frozen=True):
    """The engines' counters, summed over replicas."""

    steps: float
    parts_s: dict[str, float]
    straggler_steps: dict[str, float]
    """By rank."""

    def since(self, earlier: "Books") -> "Books":
        """What has come since `earlier`."""
        return Books(
            self.steps - earlier.steps,
            {part: spent - earlier.parts_s.get(part, 0) for part, spent in self.parts_s.items()},
            {rank: steps - earlier.straggler_steps.get(rank, 0) for rank, steps in self.straggler_steps.items()},
        )


def read_books(metrics: str) -> Books:
    """From the text of /metrics."""
    steps = 0.0
    parts_s: dict[str, float] = {}
    straggler_steps: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == STEPS:
                steps += sample.value
            elif sample.name == PART:
                parts_s[sample.labels["part"]] = parts_s.get(sample.labels["part"], 0) + sample.value
            elif sample.name == STRAGGLER:
                straggler_steps[sample.labels["rank"]] = straggler_steps.get(sample.labels["rank"], 0) + sample.value
    return Books(steps, parts_s, straggler_steps)


class Appliance:
    """One that runs."""

    def __init__(self, session: aiohttp.ClientSession, url: str, pid: int) -> None:
        self.session = session
        self.url = url
        self.pid = pid
        """Of the supervisor."""

    async def get(self, path: str) -> bytes:
        """The body at `path`.  Raises aiohttp.ClientError and TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        async with self.session.get(self.url + path, timeout=timeout, raise_for_status=True) as answer:
            return await answer.read()

    async def books(self) -> Books:
        """As they are now.  Raises aiohttp.ClientError and TimeoutError."""
        return read_books((await self.get("/metrics")).decode())

    async def serving(self) -> int:
        """How many engine replicas serve.  Raises aiohttp.ClientError, TimeoutError and ValueError."""
        health = msgspec.json.decode(await self.get("/health"), type=dict[str, object])
        engines = health.get("engines")
        return len(engines) if isinstance(engines, list) else 0

    async def interconnect(self) -> str:
        """Of which kind the way between the ranks of its last step is.  Raises as `get`, and ValueError."""
        match msgspec.json.decode(await self.get("/debug/steps")):
            case {"steps": [{"interconnect": {"kind": str(kind)}}, *_]}:
                return kind
        return ""


@asynccontextmanager
async def serving(
    options: Sequence[str], data: Path, environ: Mapping[str, str], *, replicas: int, program: str = "pellucid"
) -> AsyncIterator[Appliance]:
    """
    An appliance with its data in `data`, of which `replicas` serve, until the block ends.  Raises Refused.

    `program`: the module with the command line.
    """
    command = [sys.executable, "-m", program, "serve", "--port", "0", "--data-dir", str(data), *options]
    log = data.with_suffix(".log")
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *leashed(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=clean(environ),
            start_new_session=True,  # Ctrl-C is ours: it is stopped below
        )
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            until_s = time.monotonic() + START_S
            appliance = Appliance(session, await _address(process, log), process.pid)
            while await appliance.serving() < replicas:
                if time.monotonic() > until_s:
                    raise Refused(f"not all of its {replicas} replicas serve after {START_S:g} s: {last_words(log)}")
                await asyncio.sleep(POLL_S)
            yield appliance
    finally:
        await _stop(process)


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would change one of our options or send spans, and with the way to our packages."""
    kept = {
        name: value
        for name, value in environ.items()
        if name in KEPT or not name.startswith((PREFIX, "OTEL_EXPORTER_"))
    }
    return kept | {"PYTHONPATH": ":".join(filter(None, (str(ROOT), environ.get("PYTHONPATH", ""))))}


async def _address(process: asyncio.subprocess.Process, log: Path) -> str:
    """Where it listens, from what it says when it serves."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            async for line in process.stdout:
                if found := BANNER.search(line.decode(errors="replace")):
                    return found[0]
    except TimeoutError:
        raise Refused(f"it does not serve after {START_S:g} s: {last_words(log)}") from None
    code = await process.wait()
    raise Refused(last_words(log) or f"it ended with code {code}")


def last_words(log: Path) -> str:
    """The last thing that it had to say to a person, or else the last line; without the name in front."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line for line in lines if OURS.match(line)]
    return OURS.sub("", (ours or lines or [""])[-1])


async def _stop(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL if that does not help; the banner's rest is thrown away."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
