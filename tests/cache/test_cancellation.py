"""A command whose caller has gone leaves no reply for the next user of its connection, and no connection behind."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from cache.connection import Script
from cache.errors import Unavailable
from tests.cache.conftest import OpenStore
from tests.cache.proxy import Proxy, proxying
from tests.cache.servers import Server

SAY = Script("return {KEYS[1], ARGV[1]}")


@pytest.fixture
async def proxy(valkey: Server, tmp_path: Path) -> AsyncIterator[Proxy]:
    assert isinstance(valkey.address, Path)
    async with proxying(valkey.address, tmp_path / "p") as proxy:
        yield proxy


async def test_a_storm_of_cancels_mixes_up_no_replies(proxy: Proxy, open_store: OpenStore) -> None:
    store = open_store(f"unix://{proxy.path}", connections_max=4)
    proxy.delay_s = 0.001
    choose = random.Random(1)
    left = 0

    def leave() -> None:
        nonlocal left
        left += 1

    async def one(number: int) -> bool:
        reply = await store.run(SAY, [f"storm:{{{number}}}"], [str(number)], left=leave)
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
    await store.aclose()
    assert right > 100 and cancelled > 100
    assert left == cancelled, "who leaves is told, once"
    assert proxy.connections <= 4, "a cancelled caller costs no connection"


async def test_a_storm_of_deadlines_mixes_up_no_replies(proxy: Proxy, open_store: OpenStore) -> None:
    store = open_store(f"unix://{proxy.path}", connections_max=4, command_timeout_ms=12, probe_interval_ms=1)
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


async def test_redis_py_drops_the_connection_of_a_cancelled_command(proxy: Proxy) -> None:
    """What the deadline relies on, in the installed version, at every point in time."""
    client = Redis(unix_socket_path=str(proxy.path), protocol=2, max_connections=1)
    async with client:
        proxy.delay_s = 0.002
        for step in range(60):
            task = asyncio.create_task(client.execute_command("ECHO", "gone"))
            await asyncio.sleep(step * 0.0001)
            task.cancel()
            await asyncio.wait({task})
            assert await client.execute_command("ECHO", f"mine {step}") == f"mine {step}".encode()


async def test_held_back_replies_are_dropped_and_not_delivered_later(proxy: Proxy, open_store: OpenStore) -> None:
    store = open_store(f"unix://{proxy.path}", connections_max=1, probe_interval_ms=5, command_timeout_ms=100)
    await store.run(SAY, ["x:{x}"], ["warm"])
    proxy.passing.clear()
    for number in range(3):
        with pytest.raises(Unavailable) as caught:
            await store.run(SAY, ["x:{x}"], [f"lost {number}"])
        assert caught.value.maybe_ran
    proxy.passing.set()
    for number in range(10):
        assert await store.run(SAY, ["x:{x}"], [f"found {number}"]) == [b"x:{x}", f"found {number}".encode()]


async def test_leaving_a_command_that_fails_is_told_as_well(proxy: Proxy, open_store: OpenStore) -> None:
    store = open_store(f"unix://{proxy.path}", command_timeout_ms=50)
    proxy.passing.clear()
    told = asyncio.Event()
    task = asyncio.create_task(store.run(SAY, ["x:{x}"], [""], left=told.set))
    await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait_for(told.wait(), 5)
    assert task.cancelled()
