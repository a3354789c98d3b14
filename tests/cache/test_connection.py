"""The store: every kind of server, scripts, the deadline, the breaker."""

import asyncio
import contextlib
import statistics
import time
from contextvars import ContextVar
from pathlib import Path

import pytest
from redis.crc import key_slot

from cache.breaker import NS_PER_S, Breaker
from cache.connection import Script, Store
from cache.embedded import server_binary
from cache.errors import Misconfigured, Unavailable
from cache.lines import COMMAND_TIMEOUT_MS
from cache.redis_url import parse_redis_url
from tests.cache import servers
from tests.cache.conftest import OpenStore
from tests.cache.servers import REDIS_SERVER, Server

ECHO = Script("redis.call('SET', KEYS[1], ARGV[1], 'PX', 1000) return {ARGV[1], redis.call('GET', KEYS[1])}")
BROKEN = Script("return redis.call('GET')")


async def echo(store: Store, word: str, name: str = "echo:{x}") -> list[bytes]:
    return await store.run(ECHO, [name], [word])


async def test_a_script_runs_on_every_server(every_url: str, open_store: OpenStore) -> None:
    store = open_store(every_url)
    assert await store.start()
    for tag in ("a", "b", "c", "d", "e"):  # on a cluster: on several nodes
        assert await echo(store, tag, f"echo:{{{tag}}}") == [tag.encode(), tag.encode()]
    assert store.health.state == "closed"


async def test_a_flushed_script_is_sent_again(own_valkey: Server, open_store: OpenStore) -> None:
    store = open_store(own_valkey.url)
    await echo(store, "one")
    own_valkey.ask("SCRIPT", "FLUSH")
    assert await echo(store, "two") == [b"two", b"two"]
    assert b"ECHO" not in own_valkey.ask("SCRIPT", "EXISTS", ECHO.sha)


async def test_many_commands_at_once_are_answered_each_with_its_own(every_url: str, open_store: OpenStore) -> None:
    store = open_store(every_url, connections_max=2)
    words = [str(number) for number in range(200)]
    replies = await asyncio.gather(*(echo(store, word, f"echo:{{{word}}}") for word in words))
    assert [reply[0].decode() for reply in replies] == words


async def test_no_server_is_unavailable_and_comes_back_by_itself(tmp_path: Path, open_store: OpenStore) -> None:
    home = tmp_path / "v"
    store = open_store(f"unix://{home}/valkey.sock", probe_interval_ms=20)
    assert not await store.start()
    assert (store.health.state, store.health.openings) == ("open", 1)
    with pytest.raises(Unavailable) as caught:
        await echo(store, "x")
    assert not caught.value.maybe_ran
    with servers.embedded(home):
        await asyncio.wait_for(store.up.wait(), 10)
        assert await echo(store, "x")
        assert store.health.reason == ""


async def test_what_the_probe_logs_is_no_requests(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage that a request was the first to meet is not that request's."""
    seen: list[str] = []
    whose: ContextVar[str] = ContextVar("whose", default="nobody's")
    monkeypatch.setattr("cache.connection._log.info", lambda *_, **__: seen.append(whose.get()))
    store = open_store(f"unix://{tmp_path}/v/valkey.sock", probe_interval_ms=20)
    whose.set("a request's")
    assert not await store.start()
    with servers.embedded(tmp_path / "v"):
        await asyncio.wait_for(store.up.wait(), 10)
    assert seen == ["nobody's"]


async def test_a_frozen_server_costs_a_few_requests_100_ms_and_the_rest_nothing(
    own_valkey: Server, open_store: OpenStore
) -> None:
    store = open_store(own_valkey.url, probe_interval_ms=20, command_timeout_ms=COMMAND_TIMEOUT_MS)
    await echo(store, "warm")
    own_valkey.freeze()
    waits_s: list[float] = []
    for _ in range(100):
        began_s = time.monotonic()
        with pytest.raises(Unavailable):
            await echo(store, "x")
        waits_s.append(time.monotonic() - began_s)
    # Medians: the machine may be busy.  That nobody else waits is what counts.
    assert statistics.median(waits_s[:5]) < 0.150
    assert statistics.median(waits_s[5:]) < 0.005 and store.health.openings == 1
    own_valkey.thaw()
    await asyncio.wait_for(store.up.wait(), 10)
    assert await echo(store, "y") == [b"y", b"y"]


async def test_a_server_that_takes_no_writes_is_unavailable(tmp_path: Path, open_store: OpenStore) -> None:
    with servers.over_tcp(tmp_path, "--min-replicas-to-write", "1") as server:
        store = open_store(server.url, probe_interval_ms=20)
        assert not await store.start()
        server.ask("CONFIG", "SET", "min-replicas-to-write", "0")
        await asyncio.wait_for(store.up.wait(), 10)
        for _ in range(5):
            server.ask("REPLICAOF", "127.0.0.1", "1")  # a demoted master: it answers PING, and is read-only
            with pytest.raises(Unavailable, match=r"(?i)read.?only"):
                await echo(store, "x")
        assert store.health.state == "open"
        server.ask("REPLICAOF", "NO", "ONE")
        await asyncio.wait_for(store.up.wait(), 10)


async def test_a_failing_script_is_unavailable_and_not_a_crash(valkey: Server, open_store: OpenStore) -> None:
    with pytest.raises(Unavailable):
        await open_store(valkey.url).run(BROKEN, ["x:{x}"], [])


async def test_a_password_is_used_and_never_shown(
    tmp_path: Path, open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    with servers.over_tcp(tmp_path) as server:
        server.ask("ACL", "SETUSER", "me", "on", ">c@nary/1", "~*", "+@all")
        server.ask("ACL", "SETUSER", "default", "off")
        place = server.url.removeprefix("redis://")
        store = open_store(f"redis://me:c%40nary%2F1@{place}/0")
        assert await store.start()
        wrong = open_store(f"redis://me:wr0ng@{place}")
        assert not await wrong.start()
        assert "nary" not in repr(parse_redis_url(f"redis://me:c%40nary%2F1@{place}/0")) + caplog.text
        assert "wr0ng" not in wrong.health.reason + caplog.text


async def test_a_sentinel_leads_to_the_master(tmp_path: Path, open_store: OpenStore) -> None:
    with servers.over_tcp(tmp_path) as master:
        assert isinstance(master.address, tuple)
        config = tmp_path / "sentinel.conf"
        port = servers.free_port()
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor main 127.0.0.1 {master.address[1]} 1\n"
        )
        command = (str(server_binary()), str(config), "--sentinel")
        with servers.running(command, ("127.0.0.1", port)):
            dead = servers.free_port()
            store = open_store(f"redis+sentinel://127.0.0.1:{dead},127.0.0.1:{port}/main")
            assert await store.start()
            assert await echo(store, "x") == [b"x", b"x"]


@pytest.mark.skipif(REDIS_SERVER is None, reason="no redis-server with TLS here: apt install redis-server")
async def test_tls_is_used_and_checked(tmp_path: Path, open_store: OpenStore) -> None:
    pem = servers.certificate(tmp_path)
    if pem is None:
        pytest.skip("no openssl here to make a certificate with")
    with servers.with_tls(tmp_path, pem) as url:
        assert await open_store(f"{url}?ssl_ca_certs={pem}").start()
        assert await open_store(f"{url}?ssl_cert_reqs=none").start()
        assert not await open_store(url).start()  # nobody vouches for it
        with pytest.raises(Misconfigured, match="ssl_"):
            open_store(f"{url}?ssl_ca_certs={tmp_path}/nowhere")


async def test_cluster_commands_survive_a_dead_node_elsewhere(tmp_path: Path, open_store: OpenStore) -> None:
    with servers.cluster(tmp_path) as nodes:
        for node in nodes:
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        store = open_store("redis+cluster://" + nodes[0].url.removeprefix("redis://"))
        assert await store.start()
        tags = "abcdefghij"
        for tag in tags:
            await echo(store, tag, f"echo:{{{tag}}}")
        nodes[2].kill()
        served = 0
        for tag in tags:
            try:
                served += await echo(store, tag, f"echo:{{{tag}}}") == [tag.encode()] * 2
            except Unavailable:
                pass  # its slots lay on the dead node
        assert served


async def test_the_probe_goes_where_the_failure_was(tmp_path: Path, open_store: OpenStore) -> None:
    """On a cluster another node is well, and says nothing of the one that is not."""
    with servers.cluster(tmp_path) as nodes:
        for node in nodes:
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        share = 16384 // 3
        home = min(2, key_slot(b"pellucid") // share)  # where a probe goes before anything has failed
        dead = next(number for number in (1, 2) if number != home)
        tag = next(str(n) for n in range(999) if min(2, key_slot(str(n).encode()) // share) == dead)
        url = "redis+cluster://" + nodes[0].url.removeprefix("redis://")
        store = open_store(url, probe_interval_ms=20, command_timeout_ms=200)
        await echo(store, "x", f"echo:{{{tag}}}")
        nodes[dead].kill()
        async with asyncio.timeout(20):
            while store.health.state == "closed":
                with contextlib.suppress(Unavailable):
                    await echo(store, "x", f"echo:{{{tag}}}")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(store.up.wait(), 0.5)
        assert store.health.openings == 1


async def test_a_probe_that_meets_a_fault_of_ours_is_not_the_last(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"unix://{tmp_path}/v/valkey.sock", probe_interval_ms=20)
    assert not await store.start()
    faults = 0

    async def fail(*_: object) -> object:
        nonlocal faults
        faults += 1
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr("cache.link.Link.execute", fail)
        async with asyncio.timeout(10):
            while faults < 2:
                await asyncio.sleep(0.005)
    with servers.embedded(tmp_path / "v"):
        await asyncio.wait_for(store.up.wait(), 10)


def test_the_breaker_opens_at_the_fifth_failure_within_the_window() -> None:
    breaker = Breaker()
    assert not any(breaker.failed(number * NS_PER_S) for number in range(4))
    assert breaker.failed(4 * NS_PER_S)
    assert not breaker.failed(5 * NS_PER_S), "it opens once"
    assert [breaker.close(), breaker.close()] == [True, False]
    assert not any(breaker.failed(10**12 + number * 3 * NS_PER_S) for number in range(20)), "four within 10 s, for ever"
    assert breaker.openings == 1
