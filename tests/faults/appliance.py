"""
An appliance that faults are put into: started, asked, and taken down.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from bench.appliance import Appliance, serving
from launch.known import DEFAULT_MODEL
from launch.store import Store, data_dir
from tests.cache.proxy import Proxy, proxying
from tests.cache.servers import embedded
from tests.faults.dials import VARIABLE, Dials
from tests.http.scripted_upstream import UPSTREAM_MODEL, ScriptedUpstream
from tests.processes import children_of

PROGRAM = "tests.faults.wrapped_serve"
ENGINE = "tests.faults.wrapped_engine"
POLL_S = 0.05
QUIET_S_MAX = 90.0
LIMITS = ("--rpm", "100000", "--tpm", "100000000", "--concurrent", "256")

Row = dict[str, object]


class Setup(msgspec.Struct, frozen=True):
    """How an appliance is started."""

    options: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    keys: bool = False
    """Whether requests need a key, whose server is behind a proxy."""
    upstream: bool = False
    """Whether there is a server that answers for another model."""


class Patient:
    """One that runs."""

    def __init__(
        self, appliance: Appliance, dials: Dials, key: str, proxy: Proxy | None, upstream: ScriptedUpstream | None
    ) -> None:
        self.appliance = appliance
        self.dials = dials
        self.proxy = proxy
        """Before the server for keys and limits."""
        self.upstream = upstream
        self.session = appliance.session
        self.url = appliance.url
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.model = ""

    async def get(self, path: str) -> Row:
        """The JSON at `path`.  Raises aiohttp.ClientError and TimeoutError."""
        async with self.session.get(self.url + path, headers=self.headers, raise_for_status=True) as answer:
            return msgspec.json.decode(await answer.read(), type=Row)

    async def rows(self, path: str, name: str) -> list[Row]:
        """The list of objects under `name` there."""
        return msgspec.convert((await self.get(path))[name], list[Row])

    async def quiet(self) -> None:
        """Until nothing is in flight, and its engine serves."""
        async with asyncio.timeout(QUIET_S_MAX):
            while not await self._is_quiet():
                await asyncio.sleep(POLL_S)

    async def works(self) -> bool:
        """Whether anything is in flight."""
        return not all(row["outcome"] for row in await self.rows("/debug/requests", "requests"))

    async def _is_quiet(self) -> bool:
        return bool(await self.appliance.serving()) and not await self.works()

    def engine(self) -> int | None:
        """The process of its rank 0, if there is one now."""
        return next((pid for pid, words in children_of(self.appliance.pid).items() if ENGINE in words), None)


@contextlib.asynccontextmanager
async def started(setup: Setup, folder: Path) -> AsyncIterator[Patient]:
    """One of the default model, with its data in `folder`.  Raises Refused, and UserError: there is no such model."""
    model = Store(data_dir(os.environ.get("PELLUCID_DATA_DIR", ""), dict(os.environ))).pull(DEFAULT_MODEL)
    options = ["--model", str(model.path), *setup.options]
    data = folder / ("keyed" if setup.keys else "open")
    data.mkdir(exist_ok=True)
    dials = Dials.made(folder / "dials")
    key, proxy, upstream = "", None, None
    async with contextlib.AsyncExitStack() as stack:
        if setup.keys:
            (folder / "store").mkdir(exist_ok=True)
            server = stack.enter_context(embedded(folder / "store"))
            assert isinstance(server.address, Path)
            proxy = await stack.enter_async_context(proxying(server.address, folder / "proxy.sock"))
            options += ["--redis-url", f"unix://{proxy.path}"]
            key = await new_key(data, f"unix://{proxy.path}")
        if setup.upstream:
            upstream = ScriptedUpstream()
            upstream.start()
            stack.callback(upstream.stop)
            table = f'[[upstream]]\nname = "up"\nurl = "{upstream.url}"\nmodel = "{UPSTREAM_MODEL}"\n'
            (folder / "upstream.toml").write_text(table)
            options += ["--config", str(folder / "upstream.toml")]
        environ = {**os.environ, VARIABLE: str(folder / "dials"), **dict(setup.environ)}
        appliance = await stack.enter_async_context(serving(options, data, environ, replicas=1, program=PROGRAM))
        patient = Patient(appliance, dials, key, proxy, upstream)
        patient.model = str((await patient.rows("/v1/models", "data"))[0]["id"])
        yield patient


async def new_key(data: Path, redis_url: str) -> str:
    """A key with limits that nobody here comes near to."""
    create = ["keys", "create", "--tenant", "faults", *LIMITS, "--json"]
    places = ["--data-dir", str(data), "--redis-url", redis_url]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pellucid", *create, *places, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    return str(json.loads(said)["key"])
