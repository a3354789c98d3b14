"""One server of each kind for all tests that leave it as they found it; those that freeze or flush start their own."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from cache.connection import Store
from cache.redis_url import parse_redis_url
from tests.cache import servers
from tests.cache.servers import REDIS_SERVER, Server

OpenStore = Callable[..., Store]


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.embedded(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def debian_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if REDIS_SERVER is None:
        pytest.skip("no redis-server here: apt install redis-server")
    with servers.redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield "redis+cluster://" + ",".join(node.url.removeprefix("redis://") for node in nodes)


@pytest.fixture(params=["valkey", "redis", "cluster"])
def every_url(request: pytest.FixtureRequest) -> str:
    """The URL of each kind of server, in turn."""
    if request.param == "cluster":
        return str(request.getfixturevalue("cluster_url"))
    server = request.getfixturevalue("valkey" if request.param == "valkey" else "debian_redis")
    assert isinstance(server, Server)
    return server.url


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Server]:
    """One to be frozen, flushed or killed."""
    with servers.embedded(tmp_path / "v") as server:
        yield server


@pytest.fixture
async def open_store() -> AsyncIterator[OpenStore]:
    """Stores by URL, closed afterwards."""
    stores: list[Store] = []

    def make(url: str, **options: int) -> Store:
        options = {"connect_timeout_ms": 5000, "command_timeout_ms": 5000} | options  # the machine may be busy
        stores.append(Store(parse_redis_url(url), **options))  # type: ignore[arg-type]  # all of these are numbers
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()
