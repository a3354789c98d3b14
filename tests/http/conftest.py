"""
Live servers for the tests of the gateway.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from cache.connection import Store
from gateway.config import GatewayOptions, UpstreamOptions
from gateway.tokens import load
from gateway.upstream_breaker import Breaker
from tests.cache import servers
from tests.http import asking
from tests.http.fake_engine import FakeEngine, greet_and_stop
from tests.http.fleet import Fleet
from tests.http.guard import Guard
from tests.http.harness import MODEL, LiveGateway, ShellEngine
from tests.http.model_files import EOS_ID, write_model
from tests.http.scripted_upstream import UPSTREAM_MODEL, ScriptedUpstream


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


@pytest.fixture(scope="session")
def _upstream_servers() -> Iterator[tuple[ScriptedUpstream, ScriptedUpstream]]:
    servers = ScriptedUpstream(), ScriptedUpstream()
    for server in servers:
        server.start()
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def upstream(_upstream_servers: tuple[ScriptedUpstream, ScriptedUpstream]) -> ScriptedUpstream:
    """A server that does as it is told."""
    return _upstream_servers[0].fresh()


@pytest.fixture
def other_upstream(_upstream_servers: tuple[ScriptedUpstream, ScriptedUpstream]) -> ScriptedUpstream:
    """Another one."""
    return _upstream_servers[1].fresh()


Relay = tuple[LiveGateway, ScriptedUpstream]
Relaying = Callable[..., LiveGateway]


@pytest.fixture
def relaying() -> Iterator[Relaying]:
    """`relaying(upstream, ..., idle_timeout_s=...)`: a gateway without engines, in front of these, for one test."""
    started: list[LiveGateway] = []

    def start(
        *upstreams: ScriptedUpstream | str,
        ready: bool = True,
        gateway: dict[str, object] | None = None,
        **changes: object,
    ) -> LiveGateway:
        live = LiveGateway(msgspec.structs.replace(relay_options(*upstreams, **changes), **(gateway or {})))
        live.start(ready=ready)
        started.append(live)
        return live

    yield start
    for live in started:
        live.stop()


@pytest.fixture(scope="session")
def _relay(_upstream_servers: tuple[ScriptedUpstream, ScriptedUpstream]) -> Iterator[LiveGateway]:
    gateway = LiveGateway(relay_options(_upstream_servers[0], probe_interval_s=3600))
    gateway.start()
    yield gateway
    gateway.stop()


@pytest.fixture
def relay(_relay: LiveGateway, upstream: ScriptedUpstream) -> Relay:
    """A gateway without engines, and the one upstream behind it; what another test did to it is forgotten."""
    [behind] = _relay.application.upstreams.upstreams
    behind.breaker = Breaker()
    behind.rests_until_ns = 0
    return _relay, upstream


def relay_options(*upstreams: ScriptedUpstream | str, **changes: object) -> GatewayOptions:
    """A gateway that has nothing but upstreams, all for one model."""
    urls = [one if isinstance(one, str) else one.url for one in upstreams]
    common = {"model": "remote", "upstream_model": UPSTREAM_MODEL, **changes}
    tables = ({"name": f"up{number}", "url": url, **common} for number, url in enumerate(urls))
    behind = msgspec.convert(tuple(tables), tuple[UpstreamOptions, ...])
    return GatewayOptions(model="", model_name="", engines=(), upstreams=behind)


@pytest.fixture
def guard() -> Iterator[Guard]:
    """A server for keys and limits."""
    with TemporaryDirectory(prefix="pellucid") as home, servers.embedded(Path(home) / "v") as server:
        yield Guard(server, Path(home))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server for keys and limits may take its time, as on a busy machine; what a slow one means is another test."""
    monkeypatch.setattr("gateway.admission.Store", partial(Store, connect_timeout_ms=5000, command_timeout_ms=5000))


@pytest.fixture
def guarded(guard: Guard, custom: Custom) -> tuple[LiveGateway, FakeEngine]:
    """A gateway in front of a fake engine."""
    return custom(**guard.options)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """The clients of a test are closed with it, not when the collector finds them."""
    yield
    while asking.CLIENTS:
        asking.CLIENTS.pop().close()


@pytest.fixture
def fleet(model_dir: Path, vocab_size: int, socket_path: str) -> Iterator[Fleet]:
    """A gateway and engines, to be started by the test."""
    found = Fleet(options_for(model_dir, ""), Path(socket_path).parent, vocab_size)
    yield found
    found.close()


def options_for(model_dir: Path, path: str) -> GatewayOptions:
    """A gateway in front of the engine that listens on `path`."""
    return GatewayOptions(model=str(model_dir), model_name=MODEL, engines=(f"unix:{path}",))
