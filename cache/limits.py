"""
Admission: reserve before a request runs, renew while it runs, settle when it has ended, exactly once.

    reserve --> Refusal                                      nothing is written anywhere
            --> Reservation --renew, every RENEW_S--> ... --settle or refund--> gone

On the server (limits.lua) a reservation is a key that settling deletes.  What cannot be settled because the server is
away is owed (cache.debts).  A reservation whose caller was cancelled, or whose reply never came, is declared void: its
command may still be under way on another connection, and must find that nobody wants it any more.

While the server is away each gateway process grants its share (cache.local).  How many of them there are they tell each
other, every RENEW_S, through the server.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cache.accounts import LIMIT_MAX, Account, Level
from cache.connection import Script, Store
from cache.debts import Debts, End, Settlement
from cache.errors import Unavailable
from cache.local import LocalLimits
from telemetry import clock
from telemetry.logs import get_logger

SCRIPT = Script(Path(__file__).with_name("limits.lua").read_text(encoding="utf-8"))
WORKERS_SCRIPT = Script(Path(__file__).with_name("workers.lua").read_text(encoding="utf-8"))
WORKERS_KEY = "pellucid:{workers}"
LEASE_S = 30.0
RENEW_S = 10.0
Kind = Literal["requests", "tokens", "concurrent", "spend"]
Source = Literal["server", "local", "open", "unlimited"]
_log = get_logger("pellucid.cache")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The tightest of the levels, for the `x-ratelimit-*` headers; None where nothing is limited."""

    requests_limit: int | None = None
    requests_remaining: int | None = None
    requests_reset_ms: int | None = None
    """Until all are there again."""
    tokens_limit: int | None = None
    tokens_remaining: int | None = None
    tokens_reset_ms: int | None = None


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Not now, or never."""

    level: Level
    limit: Kind
    retry_after_ms: int
    """When it would be admitted if nobody else came; 0 if never."""
    can_succeed: bool
    """Whether the same request may ever be admitted."""
    figures: Figures
    source: Source


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """A request that may run."""

    id: str
    account: Account
    tokens: int
    micros: int
    figures: Figures
    source: Source
    """Whose word it is: anything but `server` and `unlimited` is degraded."""


class Limiter:
    """One worker's way to the limit book."""

    def __init__(
        self,
        store: Store,
        *,
        workers: int = 1,
        worker: int = 0,
        lease_s: float = LEASE_S,
        renew_s: float = RENEW_S,
        script: Script = SCRIPT,
        now_ns: Callable[[], int] = clock.now_ns,
        new_id: Callable[[], str] = lambda: secrets.token_hex(12),
    ) -> None:
        """`workers` and `worker`: how many share the limits, until the server has said."""
        self.unknown = 0
        """Settlements of reservations that the server had lost by then."""
        self._store = store
        self._script = script
        self._lease_us = str(round(lease_s * 1e6))
        self._renew_s = renew_s
        self._now_ns = now_ns
        self._new_id = new_id
        self._local = LocalLimits(workers=workers, worker=worker)
        self._name = self._new_id()
        self._held: dict[str, Reservation] = {}  # all but unlimited ones, which nobody counts
        self._debts = Debts(self._pay, store.up)
        self._renewing: asyncio.Task[None] | None = None

    @property
    def held(self) -> int:
        """Reservations that are not settled."""
        return len(self._held)

    @property
    def workers(self) -> int:
        """Gateway processes that share the limits, as far as is known."""
        return self._local.workers

    @property
    def owed(self) -> int:
        """Settlements that wait for the server."""
        return len(self._debts)

    @property
    def forgotten(self) -> int:
        """Settlements lost to a bound."""
        return self._debts.forgotten

    async def start(self) -> None:
        """Tell the others that we are here, and from now on renew what is held."""
        await self._tell()
        self._renewing = asyncio.create_task(self._renew_for_ever(), name="renew leases")

    async def reserve(self, account: Account, *, tokens: int, micros: int = 0) -> Reservation | Refusal:
        """
        Admit one request that will use about `tokens`, and cost about `micros`, or say why not.

        Raises Unavailable: the server is away, and the account's policy is `closed`.
        """
        assert tokens >= 0 and micros >= 0
        wanted = Reservation(
            id=self._new_id(), account=account, tokens=tokens, micros=micros, figures=Figures(), source="unlimited"
        )
        if not account.limited:
            return wanted
        # Beyond every limit is beyond every limit: the script need not count so far.
        args = self._args("reserve", account, min(tokens, LIMIT_MAX + 1), min(micros, LIMIT_MAX + 1))
        try:
            reply = await self._store.run(self._script, _keys(account, wanted.id), args)
        except asyncio.CancelledError:
            self.give_back(wanted)
            raise
        except Unavailable as error:
            if error.maybe_ran:
                self.give_back(wanted)
            return self._hold(self._reserve_without_server(wanted, error))
        if len(reply) < 5:
            raise Unavailable("this reservation is void")  # we said so, and nobody can be waiting for it
        figures = _figures(account.limited, [int(number) for level in reply[5:] for number in level.split()])
        if reply[0] == b"1":
            return self._hold(msgspec.structs.replace(wanted, figures=figures, source="server"))
        level = account.limited[int(reply[2]) - 1]
        return _refusal(level, reply[3].decode(), int(reply[4]), figures, "server")

    async def renew(self, reservation: Reservation) -> bool:
        """Keep its slots for another while.  False: nobody knows it any more, which ends nothing."""
        if reservation.source != "server":
            return True
        account = reservation.account
        try:
            reply = await self._store.run(self._script, _keys(account, reservation.id), self._args("renew", account))
        except Unavailable:
            return False
        return reply[0] == b"1"

    async def settle(self, reservation: Reservation, *, tokens: int, micros: int = 0) -> bool:
        """
        Charge what was used in place of what was reserved, and free the slots.

        May be cancelled and may be called again: it happens once.  Returns whether it has happened now; False is also
        the answer when it must wait for the server.
        """
        return await self._settle(reservation, "settle", tokens=tokens, micros=micros)

    async def refund(self, reservation: Reservation) -> bool:
        """Give all of it back, the request too: it failed before its first token."""
        return await self._settle(reservation, "refund")

    def give_back(self, wanted: Reservation) -> None:
        """Nobody knows whether the server has, or will have, reserved this: in the end it has not."""
        self._debts.owe(Settlement(id=wanted.id, account=wanted.account, end="void"))

    async def aclose(self) -> None:
        """Pay what is owed, within a bound, and tell the others that we leave.  The store is closed after this."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
            await self._tell(leaving=True)
        await self._debts.aclose()

    def _hold(self, answer: Reservation | Refusal) -> Reservation | Refusal:
        if isinstance(answer, Reservation):
            self._held[answer.id] = answer
        return answer

    # ---- with the server

    async def _settle(self, reservation: Reservation, end: End, *, tokens: int = 0, micros: int = 0) -> bool:
        assert tokens >= 0 and micros >= 0
        if reservation.source != "server":
            return self._settle_here(reservation, end, tokens, micros)
        self._held.pop(reservation.id, None)
        settlement = Settlement(
            id=reservation.id,
            account=reservation.account,
            end=end,
            tokens=min(tokens, LIMIT_MAX),
            micros=min(micros, LIMIT_MAX),
        )
        try:
            done = await self._pay(settlement)
        except asyncio.CancelledError:
            self._debts.owe(settlement)
            raise
        except Unavailable:
            self._debts.owe(settlement)
            return False
        self.unknown += not done
        return done

    async def _pay(self, settlement: Settlement) -> bool:
        account = settlement.account
        args = self._args(settlement.end, account, settlement.tokens, settlement.micros)
        reply = await self._store.run(self._script, _keys(account, settlement.id), args)
        return reply[0] == b"1"

    async def _renew_for_ever(self) -> None:
        """Here and not in the streams: in the queue and in a long prefill those have nothing to do."""
        while True:
            await asyncio.sleep(self._renew_s)
            await self._tell()
            for reservation in list(self._held.values()):
                if reservation.id in self._held:
                    await self.renew(reservation)

    async def _tell(self, *, leaving: bool = False) -> None:
        """That we are here, and learn who else is; while the server is away, what was known last holds."""
        args = [self._name, "0" if leaving else self._lease_us]
        try:
            workers, worker = map(int, await self._store.run(WORKERS_SCRIPT, [WORKERS_KEY], args))
        except Unavailable:
            return
        if not leaving:
            self._local.share_with(workers=workers, worker=worker)

    def _args(self, operation: End | Literal["reserve", "renew"], account: Account, *amounts: int) -> list[str]:
        tokens, micros = amounts or (0, 0)
        return [operation, self._lease_us, str(tokens), str(micros), *account.limit_words]

    # ---- without it

    def _reserve_without_server(self, wanted: Reservation, error: Unavailable) -> Reservation | Refusal:
        account = wanted.account
        if account.policy == "closed":
            raise error
        if account.policy == "open":
            return msgspec.structs.replace(wanted, source="open")
        verdict, left = self._local.reserve(
            account.organisation,
            account.limited,
            tokens=wanted.tokens,
            micros=wanted.micros,
            now_us=self._now_ns() // 1000,
        )
        numbers = [number for requests, tokens in left for number in (requests, -1, tokens, -1)]
        figures = _figures(account.limited, numbers)
        if not verdict.admitted:
            return _refusal(account.limited[verdict.level], verdict.limit, verdict.wait_us, figures, "local")
        return msgspec.structs.replace(wanted, figures=figures, source="local")

    def _settle_here(self, reservation: Reservation, end: End, tokens: int, micros: int) -> bool:
        if reservation.source == "unlimited":
            return True
        if self._held.pop(reservation.id, None) is None:
            return False
        if reservation.source == "open":
            return True
        self._local.settle(
            reservation.account.organisation,
            reservation.account.limited,
            requests=-1 if end == "refund" else 0,
            tokens=tokens - reservation.tokens,
            micros=micros - reservation.micros,
        )
        return True


def _keys(account: Account, reservation_id: str) -> list[str]:
    return [*account.limit_keys, f"{account.prefix}:reservation:{reservation_id}"]


def _refusal(level: Level, limit: str, wait_us: int, figures: Figures, source: Source) -> Refusal:
    return Refusal(
        level=level,
        limit=msgspec.convert(limit, Kind),
        retry_after_ms=max(0, -(-wait_us // 1000)),
        can_succeed=wait_us >= 0,
        figures=figures,
        source=source,
    )


def _figures(levels: Sequence[Level], numbers: Sequence[int]) -> Figures:
    """For each level `numbers` has: requests left, us until full, tokens left, us until full; -1: none, or unknown."""
    requests, tokens = [], []
    for index, level in enumerate(levels):
        requests_left, requests_us, tokens_left, tokens_us = numbers[4 * index : 4 * index + 4]
        if level.limits.requests_per_minute is not None:
            requests.append((requests_left, -requests_us, level.limits.requests_per_minute))
        if level.limits.tokens_per_minute is not None:
            tokens.append((tokens_left, -tokens_us, level.limits.tokens_per_minute))
    figures = Figures()
    if requests:  # the least left, and of equals the one that is full last
        left, us, limit = min(requests)
        figures = msgspec.structs.replace(
            figures, requests_limit=limit, requests_remaining=left, requests_reset_ms=_reset_ms(-us)
        )
    if tokens:
        left, us, limit = min(tokens)
        figures = msgspec.structs.replace(
            figures, tokens_limit=limit, tokens_remaining=left, tokens_reset_ms=_reset_ms(-us)
        )
    return figures


def _reset_ms(us: int) -> int | None:
    return None if us < 0 else -(-us // 1000)
