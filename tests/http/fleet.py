"""
A gateway, and engines that come and go.
"""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from gateway.config import GatewayOptions
from tests.http.fake_engine import FakeEngine
from tests.http.harness import WAIT_S, LiveGateway, ShellEngine
from tests.http.model_files import EOS_ID

STEP_S = 0.004


class Fleet:
    """A gateway, and engines that come and go."""

    def __init__(self, options: GatewayOptions, folder: Path, vocab_size: int) -> None:
        self._options = options
        self._folder = folder
        self._vocab_size = vocab_size
        self._stack = ExitStack()
        self.gateway: LiveGateway

    def serve(self, names: str, **changes: object) -> LiveGateway:
        """A gateway in front of the engines of these names, one letter each."""
        engines = tuple(f"unix:{self.path(name)}" for name in names)
        self.gateway = LiveGateway(msgspec.structs.replace(self._options, engines=engines, **changes))
        self.gateway.start()
        self._stack.callback(self.gateway.stop)
        return self.gateway

    def path(self, name: str) -> str:
        return str(self._folder / name)

    def shell(self, name: str, **settings: Any) -> ShellEngine:
        """The real engine shell, with a device whose next token is a hash of all before."""
        engine = ShellEngine(self.path(name), vocab_size=self._vocab_size, step_delay_s=STEP_S, **settings)
        engine.start()
        return engine

    def fake(self, name: str, **settings: Any) -> FakeEngine:
        """One that does as it is told."""
        engine = FakeEngine(self.path(name), vocab_size=self._vocab_size, eos_id=EOS_ID, **settings)
        engine.start()
        self._stack.callback(engine.stop)
        return engine

    def connected(self, count: int) -> None:
        """Wait until so many engines are."""

        async def wait() -> None:
            while len(self.gateway.application.backend.hellos()) != count:
                await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(wait(), self.gateway.loop).result(WAIT_S)

    def close(self) -> None:
        self._stack.close()
