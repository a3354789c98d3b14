"""
A gateway process with its admin interface, and a server of its own behind both.
"""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from gateway.config import ADMIN_KEY_VARIABLE
from tests.cache import servers
from tests.http.fake_engine import FakeEngine
from tests.http.guard import Guard, bearer
from tests.http.model_files import EOS_ID
from tests.http.test_process import GatewayProcess

ADMIN_KEY = "admin-canary-0123456789abcdef"
PRICES = {"price_prompt_micros": 10**6, "price_output_micros": 10**6}
"""A token is a millionth."""
KEYS, TENANTS, ORGANISATIONS, AUDIT = (f"/admin/v1/{name}" for name in ("keys", "tenants", "organisations", "audit"))


class Place:
    """The process, and clients for both of its interfaces."""

    def __init__(self, process: GatewayProcess, admin_port: int, guard: Guard) -> None:
        self.process, self.admin_port, self.guard = process, admin_port, guard
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self.admin = httpx.Client(base_url=self.admin_url, headers=bearer(ADMIN_KEY), timeout=20)
        self.data = httpx.Client(base_url=process.url, timeout=20)

    def close(self) -> None:
        """Of the clients."""
        self.admin.close()
        self.data.close()


@contextlib.contextmanager
def surroundings(vocab_size: int) -> Iterator[tuple[Path, Guard, FakeEngine]]:
    """A folder, a server for keys with its pepper, and an engine."""
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory(prefix="pellucid")))
        guard = Guard(stack.enter_context(servers.embedded(home / "v")), home)
        engine = FakeEngine(str(home / "e.sock"), vocab_size=vocab_size, eos_id=EOS_ID)
        engine.start()
        stack.callback(engine.stop)
        yield home, guard, engine


@contextlib.contextmanager
def place_for(model_dir: Path, vocab_size: int, **options: object) -> Iterator[Place]:
    """Started, and stopped at the end.  What it logs waits in a pipe: a test that asks often leaves little there."""
    with contextlib.ExitStack() as stack:
        _, guard, engine = stack.enter_context(surroundings(vocab_size))
        port = servers.free_port()
        told = {**guard.options, **PRICES, "admin_port": port, **options}
        process = GatewayProcess(model_dir, engine.path, environ={ADMIN_KEY_VARIABLE: ADMIN_KEY}, **told)
        stack.callback(end, process)
        process.wait_until_connected()
        place = Place(process, port, guard)
        stack.callback(place.close)
        yield place


def end(process: GatewayProcess) -> None:
    """Unless it has ended already."""
    if process.process.poll() is None:
        process.process.send_signal(signal.SIGTERM)
        process.end()
