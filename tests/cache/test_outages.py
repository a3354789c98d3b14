"""The limiter while its server is slow, frozen, away, flushed, read-only or full; and what is owed by then."""

import asyncio
import re
import time
from pathlib import Path

import pytest

from cache.accounts import Limits
from cache.debts import OWED_MAX
from cache.errors import Unavailable
from cache.limits import WORKERS_KEY, Limiter, Refusal, Reservation
from tests.cache.conftest import OpenStore
from tests.cache.proxy import proxying
from tests.cache.servers import Server
from tests.cache.test_limits import account, admitted, paid, refused, soon_admitted


async def test_a_cancelled_reservation_is_given_back(valkey: Server, open_store: OpenStore, tmp_path: Path) -> None:
    assert isinstance(valkey.address, Path)
    of = account(Limits(concurrent=1, requests_per_minute=100, tokens_per_minute=100))
    async with proxying(valkey.address, tmp_path / "p") as proxy:
        limiter = Limiter(open_store(f"unix://{proxy.path}"))
        proxy.delay_s = 0.005
        for step in range(20):
            task = asyncio.create_task(limiter.reserve(of, tokens=100))
            await asyncio.sleep(step * 0.0005)
            if task.done() and isinstance(answer := task.result(), Reservation):
                await limiter.refund(answer)
            task.cancel()
            await asyncio.wait({task})
            reservation = await soon_admitted(limiter, of, tokens=100)
            assert reservation.figures.requests_remaining == 99
            await limiter.refund(reservation)
        settling = asyncio.create_task(limiter.settle(await admitted(limiter, of, tokens=100), tokens=0))
        await asyncio.sleep(0.001)
        settling.cancel()
        await asyncio.wait({settling})
        await soon_admitted(limiter, of, tokens=100)
        await limiter.aclose()


def scripts_run(server: Server) -> int:
    stats = server.ask("INFO", "commandstats").decode()
    return sum(int(found[1]) for found in re.finditer(r"cmdstat_eval(?:sha)?:calls=(\d+)", stats))


async def test_a_reservation_that_arrives_after_it_was_given_back(
    own_valkey: Server, open_store: OpenStore, tmp_path: Path
) -> None:
    """It came on another connection, and nobody waits for it any more: it must not take a slot, or a token."""
    assert isinstance(own_valkey.address, Path)
    of = account(Limits(concurrent=1, tokens_per_minute=100, requests_per_minute=2))
    async with proxying(own_valkey.address, tmp_path / "p") as proxy:
        limiter = Limiter(open_store(f"unix://{proxy.path}", command_timeout_ms=100))
        await limiter.refund(await admitted(limiter, of))
        detained = proxy.detain()
        here = await admitted(limiter, of, tokens=100)
        assert here.source == "local" and await limiter.settle(here, tokens=100)
        await paid(limiter)
        before = scripts_run(own_valkey)
        detained.set()
        async with asyncio.timeout(20):
            while scripts_run(own_valkey) == before:
                await asyncio.sleep(0.005)
        figures = (await admitted(limiter, of, tokens=100)).figures
        assert (figures.requests_remaining, figures.tokens_remaining) == (1, 0)
        await limiter.aclose()


async def test_a_frozen_server_means_local_shares_soon_and_everything_is_settled_after_it(
    own_valkey: Server, open_store: OpenStore
) -> None:
    store = open_store(own_valkey.url, command_timeout_ms=100, probe_interval_ms=20)
    limiter = Limiter(store, workers=2, worker=0)
    of = account(Limits(concurrent=4, tokens_per_minute=1_000))
    before = [await admitted(limiter, of, tokens=100) for _ in range(2)]
    own_valkey.freeze()
    during = []
    for _ in range(6):
        began_s = time.monotonic()
        during.append(await limiter.reserve(of, tokens=100))
        assert time.monotonic() - began_s < 1
    assert [isinstance(answer, Reservation) and answer.source == "local" for answer in during] == [True] * 2 + [
        False
    ] * 4
    for answer in during:
        if isinstance(answer, Reservation):
            assert await limiter.renew(answer) and await limiter.settle(answer, tokens=50)
            assert not await limiter.settle(answer, tokens=50)
    for reservation in before:
        assert not await limiter.settle(reservation, tokens=100)
    assert limiter.owed >= 2
    own_valkey.thaw()
    await paid(limiter)
    after = [await admitted(limiter, of, tokens=100) for _ in range(4)]  # no slot is held by those that were in doubt
    assert after[0].source == "server" and after[0].figures.tokens_remaining is not None
    assert after[0].figures.tokens_remaining >= 700, "200 were used, 100 reserved"
    await limiter.aclose()


async def test_what_an_outage_gets_is_the_tenants_policy(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(f"unix://{tmp_path}/nobody")
    await store.start()
    limiter, limits = Limiter(store, workers=4, worker=3), Limits(requests_per_minute=10, tokens_per_minute=400)
    with pytest.raises(Unavailable):
        await limiter.reserve(account(limits, policy="closed"), tokens=1)
    opened, local = account(limits, policy="open"), account(limits)
    for _ in range(50):
        assert (await admitted(limiter, opened, tokens=10**6)).source == "open"
    answers = [await limiter.reserve(local, tokens=10) for _ in range(5)]
    assert [isinstance(answer, Reservation) for answer in answers] == [True, True, False, False, False]
    refusal = answers[-1]
    assert isinstance(refusal, Refusal) and (refusal.source, refusal.limit) == ("local", "requests")
    whole = await refused(limiter, account(limits), tokens=300)
    assert whole.can_succeed and whole.retry_after_ms > 0, "too much for a share, not for the server that will be back"
    assert not (await refused(limiter, account(limits), tokens=401)).can_succeed
    assert (await admitted(limiter, account(Limits()))).source == "unlimited"


async def test_flushed_scripts_and_flushed_data(own_valkey: Server, open_store: OpenStore) -> None:
    limiter, of = Limiter(open_store(own_valkey.url)), account(Limits(concurrent=1))
    reservation = await admitted(limiter, of)
    own_valkey.ask("SCRIPT", "FLUSH")
    assert await limiter.renew(reservation)
    own_valkey.ask("FLUSHALL")
    assert not await limiter.renew(reservation) and not await limiter.settle(reservation, tokens=1)
    assert (limiter.owed, limiter.unknown) == (0, 1)
    await admitted(limiter, of)


async def test_a_read_only_server_is_as_good_as_none(own_valkey: Server, open_store: OpenStore) -> None:
    limiter, of = Limiter(open_store(own_valkey.url, probe_interval_ms=20)), account(Limits(requests_per_minute=100))
    await admitted(limiter, of)
    own_valkey.ask("REPLICAOF", "127.0.0.1", "1")
    assert (await admitted(limiter, of)).source == "local"
    own_valkey.ask("REPLICAOF", "NO", "ONE")
    await paid(limiter)
    assert (await admitted(limiter, of)).source == "server"
    await limiter.aclose()


async def test_a_full_server_is_as_good_as_none(own_valkey: Server, open_store: OpenStore) -> None:
    limiter, of = Limiter(open_store(own_valkey.url, probe_interval_ms=20)), account(Limits(requests_per_minute=100))
    own_valkey.ask("CONFIG", "SET", "maxmemory", "1")
    assert (await admitted(limiter, of)).source == "local"
    own_valkey.ask("CONFIG", "SET", "maxmemory", "100mb")
    await paid(limiter)
    answer = await admitted(limiter, of)
    assert (answer.source, answer.figures.requests_remaining) == ("server", 99)
    await limiter.aclose()


async def test_what_is_owed_is_bounded(tmp_path: Path, open_store: OpenStore, valkey: Server) -> None:
    limiter, of = Limiter(open_store(valkey.url)), account(Limits(concurrent=1))
    reservation = await admitted(limiter, of)
    away = Limiter(open_store(f"unix://{tmp_path}/nobody"))
    for _ in range(OWED_MAX + 5):
        await away.settle(reservation, tokens=1)
    assert (away.owed, away.forgotten) == (OWED_MAX, 5)
    await away.aclose()


async def test_gateways_learn_from_each_other_how_many_share_a_limit(own_valkey: Server, open_store: OpenStore) -> None:
    """Nobody tells them, and there may be more of them on other machines: one more, one crashed, one that left."""
    stores = [open_store(own_valkey.url, command_timeout_ms=100) for _ in range(4)]
    first, second, leaving = (Limiter(store, renew_s=0.05) for store in stores[:3])
    crashed = Limiter(stores[3], renew_s=3600, lease_s=0.2)  # it says nothing any more
    for limiter in (first, second, crashed, leaving):
        await limiter.start()
    await leaving.aclose()
    async with asyncio.timeout(20):
        while own_valkey.ask("ZCARD", WORKERS_KEY) != b":2\r\n":
            await asyncio.sleep(0.01)
    before = scripts_run(own_valkey)
    async with asyncio.timeout(20):
        while scripts_run(own_valkey) < before + 6:  # each has looked again by then
            await asyncio.sleep(0.01)
    own_valkey.kill()
    of = account(Limits(requests_per_minute=9))
    granted = [0, 0]
    for number, limiter in enumerate((first, second)):
        while isinstance(await limiter.reserve(of, tokens=0), Reservation):
            granted[number] += 1
    assert sorted(granted) == [4, 5]
    for limiter in (first, second, crashed):
        await limiter.aclose()


async def test_settlements_that_are_owed_at_the_end_get_a_little_time(
    own_valkey: Server, open_store: OpenStore
) -> None:
    store = open_store(own_valkey.url, command_timeout_ms=100, probe_interval_ms=20)
    limiter, of = Limiter(store), account(Limits(concurrent=1))
    held = await admitted(limiter, of)
    own_valkey.freeze()
    assert not await limiter.settle(held, tokens=1)
    asyncio.get_running_loop().call_later(0.3, own_valkey.thaw)
    await limiter.aclose()
    assert (limiter.owed, limiter.forgotten) == (0, 0)
    await admitted(Limiter(store), of)


async def test_what_cannot_be_paid_at_the_end_is_counted_and_said(
    own_valkey: Server, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cache.debts.CLOSE_S_MAX", 0.2)
    limiter, of = Limiter(open_store(own_valkey.url, command_timeout_ms=100)), account(Limits(concurrent=1))
    held = await admitted(limiter, of)
    own_valkey.kill()
    await limiter.settle(held, tokens=1)
    await limiter.aclose()
    assert (limiter.owed, limiter.forgotten) == (0, 1)
    limiter.give_back(held)
    assert (limiter.owed, limiter.forgotten) == (0, 2), "after the end nothing is begun"
