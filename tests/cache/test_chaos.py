"""
Everything at once: three gateways' limiters, clients that leave at any time, limits that change, and a server that is
frozen, killed, read-only, full, or has lost its scripts or our connections.  In the end nothing is held, nothing owed,
and the server's books of the levels agree.
"""

import asyncio
import random
import secrets
import time

from cache.accounts import Account, Level, Limits
from cache.connection import Script
from cache.limits import Limiter, Refusal, Reservation
from tests.cache.conftest import OpenStore
from tests.cache.servers import Server

RUN_S = 3.0
PAID_S = 20.0
RESERVED_MICROS, CHARGED_MICROS = 3, 2
LEFT = Script("""
    local left = { '0' }
    for _, key in ipairs(redis.call('KEYS', 'pellucid:{' .. ARGV[1] .. '}:*')) do
      if string.find(key, ':reservation:') then
        left[1] = tostring(left[1] + (redis.call('GET', key) == 'void' and 0 or 1))
      elseif string.find(key, ':leases:') then
        left[1] = tostring(left[1] + redis.call('ZCARD', key))
      elseif string.find(key, ':limits:') then
        left[#left + 1] = string.match(key, 'limits:(.*)') .. ' ' .. redis.call('GET', key)
      end
    end
    return left
""")


class Chaos:
    """The clients, and what they have done."""

    def __init__(self, limiters: list[Limiter], seed: int) -> None:
        self.organisation = f"o{secrets.token_hex(8)}"
        self.limiters = limiters
        self.choose = random.Random(seed)
        self.ends_s = time.monotonic() + RUN_S
        self.charged = self.refused = self.left = 0

    def account(self) -> Account:
        choose = self.choose
        tenant = Limits(
            requests_per_minute=choose.choice((6_000, 60_000)),
            tokens_per_minute=choose.choice((10**5, 10**6)),
            concurrent=choose.choice((20, 50, None)),
            spend_micros_per_day=10**9,
        )
        key = Limits(concurrent=15, tokens_per_minute=10**6, spend_micros_per_day=10**9)
        levels = (Level("tenant", "t", tenant), Level("key", str(choose.randrange(3)), key))
        return Account(organisation=self.organisation, levels=levels)

    async def client(self) -> None:
        while time.monotonic() < self.ends_s:
            await self._request(self.choose.choice(self.limiters))

    async def _request(self, limiter: Limiter) -> None:
        choose, answer = self.choose, None

        async def ask() -> None:
            nonlocal answer
            answer = await limiter.reserve(self.account(), tokens=choose.randrange(50), micros=RESERVED_MICROS)
            await asyncio.sleep(choose.random() * choose.choice((0.005, 0.05, 0.3)))

        await self._leaving(asyncio.create_task(ask()), 0.3, 0.02)
        if isinstance(answer, Refusal):
            self.refused += 1
        elif isinstance(answer, Reservation):
            tokens, refunded = choose.randrange(80), choose.random() < 0.2
            self.charged += answer.source == "server" and not refunded
            end = limiter.refund(answer) if refunded else limiter.settle(answer, tokens=tokens, micros=CHARGED_MICROS)
            await self._leaving(asyncio.create_task(end), 0.2, 0.003)

    async def _leaving(self, task: "asyncio.Task[object]", share: float, within_s: float) -> None:
        """Wait for it; of some the client leaves meanwhile."""
        await asyncio.sleep(0)  # it has begun: what has not is nothing to settle
        if self.choose.random() < share:
            asyncio.get_running_loop().call_later(self.choose.random() * within_s, task.cancel)
        await asyncio.wait({task})
        self.left += task.cancelled()
        if not task.cancelled():
            task.result()

    async def trouble(self, server: Server) -> None:
        choose = self.choose
        while time.monotonic() < self.ends_s - 0.5:
            await asyncio.sleep(choose.random() * 0.3)
            match choose.randrange(6):
                case 0:
                    server.freeze()
                    await asyncio.sleep(choose.choice((0.12, 0.5)))
                    server.thaw()
                case 1:
                    server.kill()
                    await asyncio.to_thread(server.restart)
                case 2:
                    server.ask("SCRIPT", "FLUSH")
                case 3:
                    server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                case 4:
                    server.ask("REPLICAOF", "127.0.0.1", "1")
                    await asyncio.sleep(choose.random() * 0.2)
                    server.ask("REPLICAOF", "NO", "ONE")
                case _:
                    server.ask("CONFIG", "SET", "maxmemory", "1")
                    await asyncio.sleep(choose.random() * 0.2)
                    server.ask("CONFIG", "SET", "maxmemory", "256mb")


async def test_chaos_leaves_nothing_behind(own_valkey: Server, open_store: OpenStore) -> None:
    before = len(asyncio.all_tasks())
    options = {"probe_interval_ms": 50, "command_timeout_ms": 100, "connect_timeout_ms": 100}
    stores = [open_store(own_valkey.url, **options) for _ in range(3)]
    chaos = Chaos([Limiter(store, renew_s=0.3) for store in stores], seed=random.getrandbits(32))
    for limiter in chaos.limiters:
        await limiter.start()
    await asyncio.gather(chaos.trouble(own_valkey), *(chaos.client() for _ in range(40)))
    async with asyncio.timeout(PAID_S):
        while any(limiter.owed for limiter in chaos.limiters):
            await asyncio.sleep(0.01)
    assert [(one.held, one.forgotten, one.unknown) for one in chaos.limiters] == [(0, 0, 0)] * 3
    held, *levels = await open_store(own_valkey.url).run(LEFT, ["x:{x}"], [chaos.organisation])
    assert held == b"0", "a reservation or a slot is left on the server"
    spent = {level.split()[0].decode(): int(level.split()[7]) for level in levels}
    assert spent.pop("tenant:t") == sum(spent.values()) == chaos.charged * CHARGED_MICROS
    assert min(chaos.charged, chaos.refused, chaos.left) > 10, "not much of a chaos"
    for limiter, store in zip(chaos.limiters, stores, strict=True):
        await limiter.aclose()
        await store.aclose()
    assert len(asyncio.all_tasks()) == before
