"""A command whose caller has gone leaves no reply for the next user of its connection, and no connection behind."""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop
from redis.asyncio.cluster import RedisCluster

from cache.connection import Health, Script, Store
from cache.errors import Unavailable
from cache.redis_url import parse_redis_url
from tests.cache import servers
from tests.cache.conftest import OpenStore
from tests.cache.proxy import Proxy, proxying
from tests.cache.servers import Server

SAY = Script("return {KEYS[1], ARGV[1]}")
SET = Script("redis.call('SET', KEYS[1], '1', 'PX', 1000) return {}")


@pytest.fixture
async def proxy(valkey: Server, tmp_path: Path) -> AsyncIterator[Proxy]:
    assert isinstance(valkey.address, Path)
    async with proxying(valkey.address, tmp_path / "p") as proxy:
        yield proxy


async def storm(store: Store) -> tuple[int, int]:
    """A thousand commands of which half are left, at any time.  How many were answered, and how many left."""
    choose = random.Random(1)

    async def one(number: int) -> bool:
        reply = await store.run(SAY, [f"storm:{{{number}}}"], [str(number)])
        return reply == [f"storm:{{{number}}}".encode(), str(number).encode()]

    right = cancelled = 0
    for round_ in range(20):
        tasks = [asyncio.create_task(one(round_ * 50 + number)) for number in range(50)]
        for task in tasks:
            if choose.random() < 0.5:
                asyncio.get_running_loop().call_later(choose.random() * 0.01, task.cancel)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is True or isinstance(outcome, asyncio.CancelledError)
            right += outcome is True
            cancelled += isinstance(outcome, asyncio.CancelledError)
    return right, cancelled


async def test_a_storm_of_cancels_mixes_up_no_replies(proxy: Proxy, open_store: OpenStore) -> None:
    store = open_store(f"unix://{proxy.path}")
    proxy.delay_s = 0.005
    right, cancelled = await storm(store)
    await store.aclose()
    assert right > 100 and cancelled > 100
    assert proxy.connections == 1, "a cancelled caller costs no connection"


async def test_a_storm_of_cancels_mixes_up_no_replies_of_a_cluster(cluster_url: str, open_store: OpenStore) -> None:
    right, cancelled = await storm(open_store(cluster_url, connections_max=4))
    assert right > 100 and cancelled > 10


async def test_a_storm_of_deadlines_mixes_up_no_replies(proxy: Proxy, open_store: OpenStore) -> None:
    store = open_store(f"unix://{proxy.path}", command_timeout_ms=12, probe_interval_ms=1)
    choose = random.Random(2)
    right = late = 0
    for number in range(200):
        proxy.delay_s = choose.choice((0.0, 0.011, 0.012, 0.013))
        try:
            assert await store.run(SAY, [f"late:{{{number}}}"], [str(number)]) == [
                f"late:{{{number}}}".encode(),
                str(number).encode(),
            ]
            right += 1
        except Unavailable:
            late += 1
            proxy.delay_s = 0.0
            await asyncio.wait_for(store.up.wait(), 10)
    assert right > 10 and late > 10


async def test_redis_py_drops_the_connection_of_a_cancelled_command(tmp_path: Path) -> None:
    """What a cluster's deadlines rely on, in the installed version, at every point in time."""
    with servers.cluster(tmp_path, nodes=1) as (node,):
        assert isinstance(node.address, tuple)
        client = RedisCluster(*node.address, protocol=2, max_connections=1)
        async with client:
            for step in range(300):
                task = asyncio.create_task(client.execute_command("EVAL", f"return 'gone {step}'", 1, "x"))
                await asyncio.sleep(step * 0.000003)
                task.cancel()
                await asyncio.wait({task})
                answer = await client.execute_command("EVAL", f"return 'mine {step}'", 1, "x")
                assert answer == f"mine {step}".encode()


async def test_replies_that_a_frozen_cluster_held_back_are_nobodys(tmp_path: Path, open_store: OpenStore) -> None:
    with servers.cluster(tmp_path, nodes=1) as (node,):
        url = node.url.replace("redis:", "redis+cluster:")
        store = open_store(url, probe_interval_ms=5, command_timeout_ms=250)
        await store.run(SAY, ["x:{x}"], ["warm"])
        node.freeze()
        for number in range(3):
            with pytest.raises(Unavailable):
                await store.run(SAY, ["x:{x}"], [f"lost {number}"])
        node.thaw()
        found = 0
        while found < 20:
            with contextlib.suppress(Unavailable):  # the first may find an end of the old connections
                answer = await store.run(SAY, ["x:{x}"], [f"found {found}"])
                assert answer == [b"x:{x}", f"found {found}".encode()]
                found += 1
            await asyncio.wait_for(store.up.wait(), 10)


async def test_held_back_replies_are_dropped_and_not_delivered_later(proxy: Proxy, open_store: OpenStore) -> None:
    store = open_store(f"unix://{proxy.path}", probe_interval_ms=5, command_timeout_ms=100)
    await store.run(SAY, ["x:{x}"], ["warm"])
    proxy.passing.clear()
    for number in range(3):
        with pytest.raises(Unavailable) as caught:
            await store.run(SAY, ["x:{x}"], [f"lost {number}"])
        assert caught.value.maybe_ran
    proxy.passing.set()
    for number in range(10):
        assert await store.run(SAY, ["x:{x}"], [f"found {number}"]) == [b"x:{x}", f"found {number}".encode()]


async def test_commands_whose_callers_left_retire_a_connection_that_is_dead(
    proxy: Proxy, open_store: OpenStore
) -> None:
    """Nobody waits for its deadline, and yet it must be noticed: else the next ones would go to the dead for ever."""
    store = open_store(f"unix://{proxy.path}", command_timeout_ms=50)
    await store.run(SAY, ["x:{x}"], [""])
    proxy.passing.clear()
    for _ in range(3):
        task = asyncio.create_task(store.run(SAY, ["x:{x}"], [""]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
    async with asyncio.timeout(10):
        while proxy.open:
            await asyncio.sleep(0.005)
    proxy.passing.set()
    assert await store.run(SAY, ["x:{x}"], ["new"]) == [b"x:{x}", b"new"]
    assert proxy.connections == 2


async def test_what_is_under_way_when_a_connection_retires_is_still_answered(
    proxy: Proxy, open_store: OpenStore
) -> None:
    """One slow command is no reason to forget the others."""
    store, patient = (open_store(f"unix://{proxy.path}", command_timeout_ms=ms) for ms in (60, 5_000))
    store._line = patient._line
    await store.run(SAY, ["x:{x}"], [""])
    proxy.passing.clear()
    long = asyncio.create_task(patient.run(SAY, ["x:{x}"], ["long"]))
    with pytest.raises(Unavailable):
        await store.run(SAY, ["x:{x}"], ["short"])
    proxy.passing.set()
    assert await long == [b"x:{x}", b"long"]
    async with asyncio.timeout(10):
        while proxy.open:
            await asyncio.sleep(0.005)


async def test_a_master_that_was_demoted_is_left(own_valkey: Server, open_store: OpenStore, tmp_path: Path) -> None:
    """Its name, or its sentinels, lead to another one by now; on the old connection nobody would ever find out."""
    assert isinstance(own_valkey.address, Path)
    async with proxying(own_valkey.address, tmp_path / "p") as proxy:
        store = open_store(f"unix://{proxy.path}")
        await store.run(SET, ["x:{x}"], [""])
        own_valkey.ask("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(Unavailable, match="READONLY"):
            await store.run(SET, ["x:{x}"], [""])
        own_valkey.ask("REPLICAOF", "NO", "ONE")
        await store.run(SET, ["x:{x}"], [""])
        assert proxy.connections == 2


def test_a_busy_event_loop_is_not_held_against_the_server(valkey: Server) -> None:
    """With the event loop of production: between what it reads and what comes meanwhile it looks at its timers."""

    async def busy() -> int:
        store = Store(parse_redis_url(valkey.url), connect_timeout_ms=5000, command_timeout_ms=50)
        await store.run(SAY, ["x:{x}"], [""])
        near, far = socket.socketpair()
        near.setblocking(False)

        def stall() -> None:
            near.recv(1)
            time.sleep(0.1)

        asyncio.get_running_loop().add_reader(near, stall)
        for number in range(5):
            task = asyncio.create_task(store.run(SAY, ["x:{x}"], [str(number)]))
            await asyncio.sleep(0)
            far.send(b"x")
            assert await task == [b"x:{x}", str(number).encode()]
        failed = store.health.failed
        asyncio.get_running_loop().remove_reader(near)
        near.close()
        far.close()
        await store.aclose()
        return failed

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(busy()) == 0


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "not connected"])
@pytest.mark.parametrize(("busy_s", "times"), [(0.3, 1), (0.055, 12)], ids=["once", "again and again"])
@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_flood_of_requests_does_not_lift_the_limits(
    valkey: Server, make_loop: Callable[[], asyncio.AbstractEventLoop], busy_s: float, times: int, connected: bool
) -> None:
    """It puts the event loop behind by more than a command may take: not for long, or each time that it goes round."""

    async def flooded() -> Health:
        store = Store(parse_redis_url(valkey.url), connect_timeout_ms=50, command_timeout_ms=50)
        if connected:
            await store.run(SAY, ["x:{x}"], [""])

        async def flood() -> None:
            for _ in range(times):
                time.sleep(busy_s)
                await asyncio.sleep(0)

        flooding = asyncio.create_task(flood())
        commands = [store.run(SAY, ["x:{x}"], [str(number)]) for number in range(8)]
        await asyncio.gather(*commands, return_exceptions=True)
        await flooding
        await store.aclose()
        return store.health

    with asyncio.Runner(loop_factory=make_loop) as runner:
        assert runner.run(flooded()) == Health(state="closed", reason="", openings=0, failed=0)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_connection_that_is_broken_off_as_it_begins_does_not_hold_up_the_end(
    valkey: Server, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def broken_off(turns: int) -> None:
        store = Store(parse_redis_url(valkey.url))
        asking = asyncio.create_task(store.run(SAY, ["x:{x}"], [""]))
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(store.aclose(), 10)
        await asyncio.wait({asking})
        asking.cancelled() or asking.exception()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        for turns in range(8):
            runner.run(broken_off(turns))


async def test_an_answered_command_has_no_deadline_any_more(proxy: Proxy, open_store: OpenStore) -> None:
    store = open_store(f"unix://{proxy.path}", command_timeout_ms=50)
    for _ in range(3):
        await store.run(SAY, ["x:{x}"], [""])
        await asyncio.sleep(0.08)
    assert proxy.connections == 1


async def test_commands_that_wait_are_bounded(
    proxy: Proxy, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose callers have left: a server that is silent must not fill our memory."""
    monkeypatch.setattr("cache.link.COMMANDS_MAX", 8)
    store = open_store(f"unix://{proxy.path}")
    await store.run(SAY, ["x:{x}"], [""])
    proxy.passing.clear()
    tasks = [asyncio.create_task(store.run(SAY, ["x:{x}"], [str(number)])) for number in range(8)]
    await asyncio.sleep(0)
    for task in tasks[:4]:
        task.cancel()
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="8 commands are waiting already"):
        await store.run(SAY, ["x:{x}"], [""])
    proxy.passing.set()
    assert [reply[1] for reply in await asyncio.gather(*tasks[4:])] == [b"4", b"5", b"6", b"7"]
    await store.run(SAY, ["x:{x}"], [""])


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK\r\n+OK\r\n", b"\x00" * 100, b"$5\r\nab"])
async def test_what_is_no_redis_is_unavailable_and_harms_nobody(
    tmp_path: Path, open_store: OpenStore, says: bytes
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(says)
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "s")
    store = open_store(f"unix://{tmp_path}/s", command_timeout_ms=100)
    for _ in range(3):
        with pytest.raises(Unavailable) as caught:
            await store.run(SAY, ["x:{x}"], [""])
        assert caught.value.maybe_ran
    await store.aclose()
    server.close()
