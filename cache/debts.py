"""
What could not be settled: kept within a bound, and paid when the server is back.

Paying twice does no harm, so whatever is in doubt is owed.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Literal

import msgspec

from cache.accounts import Account
from cache.errors import Unavailable
from telemetry.logs import get_logger

OWED_MAX = 10_000
PAY_RETRY_S = 1.0
CLOSE_S_MAX = 2.0
"""How long a process that ends goes on paying."""
End = Literal["settle", "refund", "void"]
_log = get_logger("pellucid.cache")


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """How a reservation ends: charged with this, given back, or never made."""

    id: str
    account: Account
    end: End
    tokens: int = 0
    micros: int = 0


class Debts:
    """Of one limiter, oldest first."""

    def __init__(self, pay: Callable[[Settlement], Awaitable[bool]], up: asyncio.Event) -> None:
        """`pay` raises Unavailable; `up` is set while it is worth a try."""
        self.forgotten = 0
        """Lost to a bound; their leases end by themselves, and their estimates stay charged."""
        self._pay = pay
        self._up = up
        self._owed: deque[Settlement] = deque()
        self._paying: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        """How many wait for the server."""
        return len(self._owed)

    def owe(self, settlement: Settlement) -> None:
        """Pay it as soon as possible."""
        if self._closed:
            self.forgotten += 1
            return
        if len(self._owed) >= OWED_MAX:
            self._owed.popleft()
            self.forgotten += 1
        self._owed.append(settlement)
        if self._paying is None or self._paying.done():
            # In no request's context: it may pay for many.
            self._paying = asyncio.create_task(self._pay_all(), name="pay what is owed", context=Context())

    async def aclose(self) -> None:
        """Pay for CLOSE_S_MAX more; the rest is forgotten, and said so."""
        self._closed = True
        if self._paying is not None:
            await asyncio.wait({self._paying}, timeout=CLOSE_S_MAX)
            self._paying.cancel()
            await asyncio.wait({self._paying})
        if self._owed:
            _log.warning("settlements are forgotten: what they would give back stays charged", count=len(self._owed))
            self.forgotten += len(self._owed)
            self._owed.clear()

    async def _pay_all(self) -> None:
        while self._owed:
            await self._up.wait()
            settlement = self._owed[0]
            try:
                await self._pay(settlement)
            except Unavailable:
                self._owed.rotate(-1)  # it may be this one alone that cannot be paid, and others wait behind it
                await asyncio.sleep(PAY_RETRY_S)
                continue
            if self._owed and self._owed[0] is settlement:  # else the bound has dropped it meanwhile
                self._owed.popleft()
