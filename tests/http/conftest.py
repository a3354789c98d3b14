"""
Live servers for the tests of the gateway.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from gateway.config import GatewayOptions
from gateway.tokens import load
from tests.cache import servers
from tests.http.fake_engine import FakeEngine, greet_and_stop
from tests.http.fleet import Fleet
from tests.http.guard import Guard
from tests.http.harness import MODEL, LiveGateway, ShellEngine
from tests.http.model_files import EOS_ID, write_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model directory."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def vocab_size(model_dir: Path) -> int:
    """Of that model."""
    return load(model_dir).vocab_size


@pytest.fixture
def socket_path() -> Iterator[str]:
    """A place for a Unix socket; pytest's own paths may be too long for one."""
    with TemporaryDirectory(prefix="pellucid") as directory:
        yield f"{directory}/engine.sock"


@pytest.fixture(scope="session")
def shell(model_dir: Path, vocab_size: int) -> Iterator[LiveGateway]:
    """A gateway in front of the real engine shell."""
    with TemporaryDirectory(prefix="pellucid") as directory:
        path = f"{directory}/engine.sock"
        engine = ShellEngine(path, vocab_size=vocab_size)
        engine.start()
        gateway = LiveGateway(options_for(model_dir, path))
        gateway.start()
        yield gateway
        gateway.stop()
        engine.stop()


@pytest.fixture(scope="session")
def _fake_pair(model_dir: Path, vocab_size: int) -> Iterator[tuple[LiveGateway, FakeEngine]]:
    with TemporaryDirectory(prefix="pellucid") as directory:
        path = f"{directory}/engine.sock"
        engine = FakeEngine(path, vocab_size=vocab_size, eos_id=EOS_ID)
        engine.start()
        # An engine that dies on purpose is no reason to ask the next one.
        gateway = LiveGateway(msgspec.structs.replace(options_for(model_dir, path), resume_deadline_s=0.0))
        gateway.start()
        yield gateway, engine
        gateway.stop()
        engine.stop()


@pytest.fixture
def fake(_fake_pair: tuple[LiveGateway, FakeEngine]) -> tuple[LiveGateway, FakeEngine]:
    """A gateway in front of an engine that does as it is told."""
    gateway, engine = _fake_pair
    engine.behaviour = greet_and_stop
    gateway.until_ready()  # The test before may have broken the connection.
    return _fake_pair


Custom = Callable[..., tuple[LiveGateway, FakeEngine]]


@pytest.fixture
def custom(model_dir: Path, vocab_size: int, socket_path: str) -> Iterator[Custom]:
    """`custom(drain_s=..., ...)`: the same with other options, for one test."""
    started: list[tuple[LiveGateway, FakeEngine]] = []

    def start(*, greets: bool = True, ready: bool = True, **changes: object) -> tuple[LiveGateway, FakeEngine]:
        engine = FakeEngine(socket_path, vocab_size=vocab_size, eos_id=EOS_ID, greets=greets)
        engine.start()
        options = msgspec.structs.replace(options_for(model_dir, socket_path), **changes)
        gateway = LiveGateway(options)
        gateway.start(ready=ready)
        started.append((gateway, engine))
        return gateway, engine

    yield start
    for gateway, engine in started:
        gateway.stop()
        engine.stop()


@pytest.fixture
def guard() -> Iterator[Guard]:
    """A server for keys and limits."""
    with TemporaryDirectory(prefix="pellucid") as home, servers.embedded(Path(home) / "v") as server:
        yield Guard(server, Path(home))


@pytest.fixture
def guarded(guard: Guard, custom: Custom) -> tuple[LiveGateway, FakeEngine]:
    """A gateway in front of a fake engine."""
    return custom(**guard.options)


@pytest.fixture
def fleet(model_dir: Path, vocab_size: int, socket_path: str) -> Iterator[Fleet]:
    """A gateway and engines, to be started by the test."""
    found = Fleet(options_for(model_dir, ""), Path(socket_path).parent, vocab_size)
    yield found
    found.close()


def options_for(model_dir: Path, path: str) -> GatewayOptions:
    """A gateway in front of the engine that listens on `path`."""
    return GatewayOptions(model=str(model_dir), model_name=MODEL, engines=(f"unix:{path}",))
