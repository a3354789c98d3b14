"""What is owed: paid in order as far as that is possible, bounded, and nothing is forgotten for what came meanwhile."""

import asyncio

import pytest

from cache.accounts import Account
from cache.debts import Debts, Settlement
from cache.errors import Unavailable

ACCOUNT = Account(organisation="o", levels=())


def owed(name: str) -> Settlement:
    return Settlement(id=name, account=ACCOUNT, end="refund")


class Server:
    """Takes what it is given, but for some, and not before it may."""

    def __init__(self, *refuses: str) -> None:
        self.paid: list[str] = []
        self.tries = 0
        self.may = asyncio.Event()
        self.may.set()
        self.up = asyncio.Event()
        self.up.set()
        self._refuses = refuses

    async def take(self, settlement: Settlement) -> bool:
        self.tries += 1
        await self.may.wait()
        if settlement.id in self._refuses:
            raise Unavailable("not this one")
        self.paid.append(settlement.id)
        return True


async def until(debts: Debts, count: int) -> None:
    async with asyncio.timeout(10):
        while len(debts) > count:
            await asyncio.sleep(0)


async def test_one_that_cannot_be_paid_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.debts.PAY_RETRY_S", 0.001)
    server = Server("bad")
    debts = Debts(server.take, server.up)
    for name in ("bad", "one", "two"):
        debts.owe(owed(name))
    await until(debts, 1)
    assert server.paid == ["one", "two"]
    monkeypatch.setattr("cache.debts.CLOSE_S_MAX", 0.01)
    await debts.aclose()
    assert (len(debts), debts.forgotten) == (0, 1)


async def test_nothing_is_tried_while_it_is_not_worth_it() -> None:
    server = Server()
    server.up.clear()
    debts = Debts(server.take, server.up)
    debts.owe(owed("one"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert server.tries == 0
    server.up.set()
    await until(debts, 0)
    assert server.paid == ["one"]


async def test_what_the_bound_drops_is_the_oldest_and_nothing_else_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while that one is just being paid."""
    monkeypatch.setattr("cache.debts.OWED_MAX", 3)
    server = Server()
    server.may.clear()
    debts = Debts(server.take, server.up)
    debts.owe(owed("0"))
    while not server.tries:
        await asyncio.sleep(0)
    for number in range(1, 5):
        debts.owe(owed(str(number)))
    assert (len(debts), debts.forgotten) == (3, 2)
    server.may.set()
    await until(debts, 0)
    assert server.paid == ["0", "2", "3", "4"]
