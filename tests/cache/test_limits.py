"""The limiter on real servers and their own clocks: many workers, cancels, outages, floods, big numbers."""

import asyncio
import random
import secrets
import time

import pytest

from cache.accounts import LIMIT_MAX, Account, Level, LevelName, Limits, Policy
from cache.limits import SCRIPT, Limiter, Refusal, Reservation
from tests.cache.book import Book
from tests.cache.conftest import OpenStore
from tests.cache.servers import Server
from tests.cache.test_book import GET

LEASE_US = 30_000_000
NAMES: tuple[LevelName, ...] = ("organisation", "tenant", "key")


def account(*limits: Limits, policy: Policy = "local") -> Account:
    """One of its own for each test."""
    levels = tuple(Level(name, "x", one) for name, one in zip(NAMES, limits, strict=False))
    return Account(organisation=f"o{secrets.token_hex(8)}", levels=levels, policy=policy)


async def admitted(limiter: Limiter, of: Account, tokens: int = 1) -> Reservation:
    answer = await limiter.reserve(of, tokens=tokens)
    assert isinstance(answer, Reservation), answer
    return answer


async def refused(limiter: Limiter, of: Account, tokens: int = 1) -> Refusal:
    answer = await limiter.reserve(of, tokens=tokens)
    assert isinstance(answer, Refusal), answer
    return answer


async def soon_admitted(limiter: Limiter, of: Account, tokens: int = 1) -> Reservation:
    """Once what is still under way has been given back."""
    async with asyncio.timeout(20):
        while isinstance(answer := await limiter.reserve(of, tokens=tokens), Refusal):
            await asyncio.sleep(0.005)
    return answer


async def paid(limiter: Limiter) -> None:
    async with asyncio.timeout(20):
        while limiter.owed:
            await asyncio.sleep(0.005)


async def test_the_unchanged_script_does_what_the_model_does_on_the_servers_clock(
    every_url: str, open_store: OpenStore
) -> None:
    """At millions a minute, what time gives between two calls is many tokens: each reply says at what time it was."""
    store, choose = open_store(every_url), random.Random(3)
    limits = [
        Limits(tokens_per_minute=900_000_007, requests_per_minute=60_000_001),
        Limits(tokens_per_minute=70_000_003, concurrent=3, spend_micros_per_day=4_000),
        Limits(tokens_per_minute=59_999_999),
    ]
    of = account(*limits)
    book, waits = Book(len(limits), LEASE_US), 0
    held: list[str] = []
    prefix = f"pellucid:{{{of.organisation}}}"
    levels = [f"{prefix}:{kind}:{name}:x" for name in NAMES for kind in ("limits", "leases")]
    words = [word for one in limits for word in one.words]
    for number in range(300):
        if held and choose.random() < 0.45:
            name, tokens = held.pop(choose.randrange(len(held))), choose.choice((0, 500, 100_000))
            args = ["settle", str(LEASE_US), str(tokens), "3", *words]
            reply = await store.run(SCRIPT, [*levels, f"{prefix}:reservation:{name}"], args)
            assert reply == [b"1"]
            touched_us = [int((await store.run(GET, [key], []))[0].split()[0]) for key in levels[0::2]]
            assert book.settle(name, touched_us[0], tokens, 3, whole=False) and len(set(touched_us)) == 1
            continue
        name, tokens = str(number), choose.choice((0, 1_000, 20_000_000))
        args = ["reserve", str(LEASE_US), str(tokens), "10", *words]
        reply = await store.run(SCRIPT, [*levels, f"{prefix}:reservation:{name}"], args)
        ways = book.reserve(name, int(reply[1]), tokens, 10, limits)
        assert (reply[0] == b"1") == (not ways)
        if ways:
            waits += 1
            assert int(reply[4]) == max(wait_us for _, _, wait_us in ways)
        else:
            held.append(name)
            left = [int(level.split()[2]) for level in reply[5:]]
            assert left == [max(0, (level.held["tokens"] or 0) // 1) for level in book.levels]
    assert 20 < waits < 280


async def test_many_workers_and_leaving_clients_keep_the_book(every_url: str, open_store: OpenStore) -> None:
    limits = Limits(requests_per_minute=60, tokens_per_minute=5_000, concurrent=8)
    of = account(limits, Limits(requests_per_minute=600), limits)
    limiters = [Limiter(open_store(every_url, connections_max=4), workers=4, worker=n) for n in range(4)]
    choose = random.Random(4)
    charged: list[int] = []
    running = most = 0

    async def client(number: int) -> None:
        nonlocal running, most
        limiter = limiters[number % 4]
        answer = await limiter.reserve(of, tokens=50)
        if isinstance(answer, Refusal):
            assert answer.source == "server" and answer.can_succeed and answer.retry_after_ms > 0
            return
        running += 1
        most = max(most, running)
        tokens = 40
        try:
            await asyncio.sleep(choose.random() * 0.02)
        finally:
            charged.append(tokens)
            running -= 1
            settling = asyncio.create_task(limiter.settle(answer, tokens=tokens))
            assert await asyncio.shield(settling)

    began_s = time.monotonic()
    for _ in range(4):
        tasks = [asyncio.create_task(client(number)) for number in range(100)]
        for task in tasks:
            if choose.random() < 0.3:
                asyncio.get_running_loop().call_later(choose.random() * 0.03, task.cancel)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError)
        for limiter in limiters:
            await paid(limiter)
    elapsed_s = time.monotonic() - began_s
    assert 0 < len(charged) <= 60 + elapsed_s and most <= 8
    assert sum(charged) <= 5_000 + elapsed_s * 5_000 / 60
    # What the server says is left is what was not charged: nothing has leaked.
    answer = await limiters[0].reserve(of, tokens=0)
    left = answer.figures.requests_remaining
    own = int(isinstance(answer, Reservation))
    assert left is not None and len(charged) + left + own >= 60
    fresh = account(limits, limits)
    held = [await admitted(limiters[n % 4], fresh) for n in range(8)]
    assert (await refused(limiters[0], fresh)).limit == "concurrent"
    for reservation in held:
        assert await limiters[1].settle(reservation, tokens=1)
    await admitted(limiters[2], fresh)


async def test_a_sequential_client_at_limit_1_is_never_refused(valkey: Server, open_store: OpenStore) -> None:
    limiter, of = Limiter(open_store(valkey.url)), account(Limits(concurrent=1))
    for _ in range(100):
        assert await limiter.settle(await admitted(limiter, of), tokens=1)


async def test_what_can_never_succeed_is_said_and_charges_nothing(valkey: Server, open_store: OpenStore) -> None:
    limiter, of = Limiter(open_store(valkey.url)), account(Limits(tokens_per_minute=100, requests_per_minute=3))
    refusal = await refused(limiter, of, tokens=101)
    assert (refusal.limit, refusal.can_succeed, refusal.retry_after_ms) == ("tokens", False, 0)
    assert (refusal.figures.tokens_remaining, refusal.figures.requests_remaining) == (100, 3)
    reservation = await admitted(limiter, of, tokens=100)
    later = await refused(limiter, of, tokens=100)
    assert later.can_succeed and 59_000 < later.retry_after_ms <= 60_000
    assert (later.figures.tokens_limit, later.figures.tokens_remaining) == (100, 0)
    await limiter.refund(reservation)
    assert (await admitted(limiter, of, tokens=100)).figures.requests_remaining == 2
    for nothing in (Limits(requests_per_minute=0), Limits(concurrent=0), Limits(tokens_per_minute=0)):
        assert not (await refused(limiter, account(nothing))).can_succeed


async def test_overshoot_is_a_debt_and_no_refusal_after_the_fact(valkey: Server, open_store: OpenStore) -> None:
    limiter, of = Limiter(open_store(valkey.url)), account(Limits(tokens_per_minute=1_000))
    assert await limiter.settle(await admitted(limiter, of, tokens=10), tokens=3_000)
    refusal = await refused(limiter, of, tokens=1)
    assert 119_000 < refusal.retry_after_ms <= 120_060 and refusal.figures.tokens_remaining == 0


@pytest.mark.parametrize("tokens", [10**15 - 1, 10**15, 10**15 + 1, 2**53 + 1, 10**18, 10**30])
async def test_big_numbers(valkey: Server, open_store: OpenStore, tokens: int) -> None:
    limiter, of = Limiter(open_store(valkey.url)), account(Limits(tokens_per_minute=LIMIT_MAX, requests_per_minute=9))
    answer = await limiter.reserve(of, tokens=tokens)
    if tokens > LIMIT_MAX:
        assert isinstance(answer, Refusal) and not answer.can_succeed
        reservation = await admitted(limiter, of)
        assert await limiter.settle(reservation, tokens=tokens)
        left = (await admitted(limiter, of, tokens=0)).figures.tokens_remaining
        assert left is not None and left < LIMIT_MAX // 10, "16 millions a microsecond have come since"
    else:
        assert isinstance(answer, Reservation) and answer.figures.tokens_remaining == LIMIT_MAX - tokens
        assert await limiter.refund(answer)
        assert (await admitted(limiter, of, tokens=0)).figures.tokens_remaining == LIMIT_MAX


async def test_the_figures_are_those_of_the_tightest_level(valkey: Server, open_store: OpenStore) -> None:
    limiter = Limiter(open_store(valkey.url))
    of = account(Limits(requests_per_minute=100), Limits(tokens_per_minute=50), Limits(requests_per_minute=10))
    figures = (await admitted(limiter, of, tokens=20)).figures
    assert (figures.requests_limit, figures.requests_remaining, figures.tokens_limit, figures.tokens_remaining) == (
        10, 9, 50, 30,
    )  # fmt: skip
    assert (figures.requests_reset_ms, figures.tokens_reset_ms) == (6_000, 24_000)
    nothing = (await admitted(limiter, account(Limits(), Limits()))).figures
    assert nothing.requests_limit is None and nothing.tokens_limit is None


def test_the_estimate_is_capped_where_the_client_named_no_maximum() -> None:
    of = account(Limits(tokens_per_minute=10_000), Limits(), Limits(tokens_per_minute=100))
    assert of.estimate_tokens(prompt_tokens=30, asked_tokens=None, default_tokens=512) == 100
    assert of.estimate_tokens(prompt_tokens=130, asked_tokens=None, default_tokens=512) == 130
    assert of.estimate_tokens(prompt_tokens=30, asked_tokens=400, default_tokens=512) == 430
    assert of.estimate_tokens(prompt_tokens=30, asked_tokens=4_000, default_tokens=512) == 542
    assert account().estimate_tokens(prompt_tokens=30, asked_tokens=None, default_tokens=512) == 542


async def test_leases_end_by_themselves_and_are_renewed(valkey: Server, open_store: OpenStore) -> None:
    store = open_store(valkey.url)
    limiter, of = Limiter(store, lease_s=0.2), account(Limits(concurrent=1))
    crashed = await admitted(limiter, of)
    refusal = await refused(limiter, of)
    assert 0 < refusal.retry_after_ms <= 200
    assert await limiter.renew(crashed)
    await asyncio.sleep(0.25)
    second = await admitted(limiter, of)
    assert await limiter.settle(crashed, tokens=1), "late, and still the first time"
    assert not await limiter.renew(crashed) and not await limiter.settle(crashed, tokens=1)
    assert (await refused(limiter, of)).limit == "concurrent"
    assert await limiter.settle(second, tokens=1)


async def test_a_limit_that_is_raised_while_a_request_runs(every_url: str, open_store: OpenStore) -> None:
    """Its end corrects what it was charged, in the bucket that there is by then."""
    limiter, name = Limiter(open_store(every_url)), secrets.token_hex(8)

    def under(limits: Limits) -> Account:
        return Account(organisation=name, levels=(Level("key", "x", limits),))

    small, large = under(Limits(tokens_per_minute=100)), under(Limits(tokens_per_minute=6_000_000))
    first = await admitted(limiter, small, tokens=60)
    left = 0
    async with asyncio.timeout(20):
        while left < 1_000:  # 100 a millisecond
            figures = (await admitted(limiter, large, tokens=0)).figures
            left = figures.tokens_remaining or 0
    await limiter.settle(first, tokens=60)
    figures = (await admitted(limiter, large, tokens=0)).figures
    assert figures.tokens_remaining is not None and figures.tokens_remaining >= left, "it was cut to the old limit"
    second = await admitted(limiter, small, tokens=1)
    await limiter.settle(second, tokens=1_100)
    refusal = await refused(limiter, small, tokens=1)
    assert refusal.retry_after_ms > 500_000, "what is beyond a reservation is a debt under any limit"


async def test_what_was_never_charged_is_not_given_back(every_url: str, open_store: OpenStore) -> None:
    limiter, name = Limiter(open_store(every_url)), secrets.token_hex(8)

    def under(limits: Limits) -> Account:
        return Account(organisation=name, levels=(Level("key", "x", limits),))

    slots, both = under(Limits(concurrent=9)), under(Limits(tokens_per_minute=10, requests_per_minute=2, concurrent=9))
    tokens_alone = under(Limits(tokens_per_minute=10))
    before, between = await admitted(limiter, slots, tokens=500), await admitted(limiter, tokens_alone, tokens=1)
    await admitted(limiter, both, tokens=8)
    await limiter.refund(before)
    await limiter.refund(between)
    figures = (await admitted(limiter, both, tokens=0)).figures
    assert (figures.requests_remaining, figures.tokens_remaining) == (0, 2)


async def test_a_request_is_spent_money_too(valkey: Server, open_store: OpenStore) -> None:
    limiter, of = Limiter(open_store(valkey.url)), account(Limits(spend_micros_per_day=1_000))
    answer = await limiter.reserve(of, tokens=1, micros=900)
    assert isinstance(answer, Reservation)
    refusal = await limiter.reserve(of, tokens=1, micros=200)
    assert isinstance(refusal, Refusal) and refusal.limit == "spend" and refusal.can_succeed
    assert 0 < refusal.retry_after_ms <= 86_400_000
    assert await limiter.settle(answer, tokens=1, micros=300)
    assert isinstance(await limiter.reserve(of, tokens=1, micros=700), Reservation)
    never = await limiter.reserve(of, tokens=1, micros=1_001)
    assert isinstance(never, Refusal) and not never.can_succeed
