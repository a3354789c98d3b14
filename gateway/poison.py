"""
Requests that kill engines: known by what they ask, and refused for a while.

A request is suspected of an engine's death when it had been sent there and nothing had come of it yet; one that has
made progress is not.  Of KILLS_MAX deaths it is taken to be the reason.  While suspects are sent again one by one
(gateway.rescue), the second death has one suspect, so their neighbours are not mistaken for them.

All gateways that share a server know of each other's suspects within PERIOD_S; without a server each knows its own.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from hashlib import blake2b

import msgspec

from cache.errors import Unavailable
from cache.suspects import NAMES_MAX, TTL_MS, Suspects
from engine.api import GenerateRequest

KILLS_MAX = 2
FORGET_S = TTL_MS // 1000
SUSPECTS_MAX = NAMES_MAX
"""The oldest are forgotten."""
PERIOD_S = 0.5
UNTOLD_MAX = 1024
"""What the server has not been told yet; the oldest is dropped."""

_encode = msgspec.msgpack.Encoder().encode


def fingerprint(message: GenerateRequest) -> bytes:
    """What a request asks of an engine: its prompt and how to go on, whoever asks and with whichever seed."""
    sampling = msgspec.structs.replace(message.sampling, seed=0)
    return blake2b(_encode((message.prompt, sampling, message.tokens_min)), digest_size=16).digest()


class Poison:
    """Who is suspected of how many deaths.  Time is an argument."""

    def __init__(self, shared: Suspects | None = None) -> None:
        self._deaths: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # (how many, when it is forgotten)
        self._shared = shared
        self._others: dict[bytes, int] = {}  # as the server has them
        self._untold: deque[Callable[[Suspects], Awaitable[None]]] = deque(maxlen=UNTOLD_MAX)
        self._news = asyncio.Event()

    def suspect(self, messages: Iterable[GenerateRequest], now_ns: int) -> None:
        """An engine has died, perhaps of one of these; those that ask the same count as one."""
        names = list(dict.fromkeys(fingerprint(message) for message in messages))
        for name in names:
            self._set(name, self._count(name, now_ns) + 1, now_ns)
        if names:
            self._tell(lambda shared: shared.suspect(names))

    def convict(self, message: GenerateRequest, now_ns: int) -> None:
        """It was there too often to be innocent."""
        name = fingerprint(message)
        self._set(name, KILLS_MAX, now_ns)
        self._tell(lambda shared: shared.convict([name], KILLS_MAX))

    def acquit(self, message: GenerateRequest) -> None:
        """An engine has lived with it."""
        name = fingerprint(message)
        self._deaths.pop(name, None)
        self._others.pop(name, None)
        self._tell(lambda shared: shared.acquit([name]))

    def deaths(self, message: GenerateRequest, now_ns: int) -> int:
        """Of how many it is suspected."""
        return self._count(fingerprint(message), now_ns) if self._deaths or self._others else 0

    def refuses(self, message: GenerateRequest, now_ns: int) -> bool:
        """Whether it is to be kept from the engines."""
        return self.deaths(message, now_ns) >= KILLS_MAX

    async def run(self) -> None:
        """Tell the server, and hear of what others have told it, until cancelled."""
        while self._shared is not None:
            try:
                while self._untold:
                    await self._untold[0](self._shared)
                    self._untold.popleft()
                self._others = await self._shared.known()
            except Unavailable:
                self._others = {}  # Nobody can say what has become of them.
            self._news.clear()
            try:
                async with asyncio.timeout(PERIOD_S):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _tell(self, what: Callable[[Suspects], Awaitable[None]]) -> None:
        if self._shared is not None:
            self._untold.append(what)
            self._news.set()

    def _set(self, name: bytes, deaths: int, now_ns: int) -> None:
        self._deaths[name] = (deaths, now_ns + FORGET_S * 1_000_000_000)
        self._deaths.move_to_end(name)
        if len(self._deaths) > SUSPECTS_MAX:
            self._deaths.popitem(last=False)

    def _count(self, name: bytes, now_ns: int) -> int:
        count, until_ns = self._deaths.get(name, (0, 0))
        return max(count if now_ns < until_ns else 0, self._others.get(name, 0))
