"""
A browser, and what it is shown: the whole appliance on the default model, and a gateway in this process.

Screenshots go to $PELLUCID_SCREENSHOTS, else to a directory of this run.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import msgspec
import pytest
import pytest_asyncio

from gateway.config import GatewayOptions
from gateway.tokens import load
from tests.browser.chromium import Browser, Tab, executable, running
from tests.http.harness import MODEL, WAIT_S, LiveGateway, ShellEngine
from tests.http.model_files import write_model
from tests.live.conftest import Appliance, serve

STREAMS = 6


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they are kept."""
    chosen = os.environ.get("PELLUCID_SCREENSHOTS", "")
    return Path(chosen) if chosen else tmp_path_factory.mktemp("screenshots")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Chromium."""
    program = executable()
    if program is None:
        pytest.skip("no Chromium here; on Debian and Ubuntu: apt install chromium")
    with TemporaryDirectory(prefix="pellucid-browser", ignore_cleanup_errors=True) as home:
        async with running(program, Path(home)) as started:
            yield started


@pytest_asyncio.fixture(loop_scope="session")
async def tab(browser: Browser) -> AsyncIterator[Tab]:
    """A tab of this test alone; nothing in its console is bad at its end."""
    opened = await browser.tab()
    yield opened
    await opened.close()
    assert opened.complaints == []


@pytest.fixture(scope="session")
def appliance(default_model: Path) -> Iterator[Appliance]:
    """`pellucid serve`, for all tests that leave it well."""
    with serve("--model", str(default_model)) as started:
        yield started


@contextlib.contextmanager
def small_gateway(
    *, step_delay_s: float = 0.004, options: Mapping[str, object] | None = None
) -> Iterator[tuple[LiveGateway, ShellEngine]]:
    """A gateway in this process, before an engine with true books and no model."""
    with TemporaryDirectory(prefix="pellucid") as home:
        model = write_model(Path(home))
        path = f"{home}/engine.sock"
        engine = ShellEngine(path, vocab_size=load(model).vocab_size, step_delay_s=step_delay_s)
        engine.start()
        own = GatewayOptions(model=str(model), model_name=MODEL, engines=(f"unix:{path}",))
        gateway = LiveGateway(msgspec.structs.replace(own, **(options or {})))
        gateway.start()
        try:
            yield gateway, engine
        finally:
            asyncio.run_coroutine_threadsafe(gateway.application.gateway.drain(), gateway.loop).result(WAIT_S)
            gateway.stop()
            engine.stop()


@contextlib.asynccontextmanager
async def busy(url: str, model: str, streams: int = STREAMS, tokens_max: int = 90) -> AsyncIterator[None]:
    """So many chats at a time, meanwhile."""

    async def ask_for_ever(client: httpx.AsyncClient, number: int) -> None:
        words = f"{number}: tell a long story about a river and its bridges. " * (1 + number % 4)
        body = {"model": model, "messages": [{"role": "user", "content": words}], "ignore_eos": True}
        while True:
            answer = await client.post("/v1/chat/completions", json={**body, "max_tokens": tokens_max + 20 * number})
            assert answer.status_code == 200, answer.text

    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client:
        asking = [asyncio.create_task(ask_for_ever(client, number)) for number in range(streams)]
        try:
            yield
        finally:
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
