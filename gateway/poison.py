"""
Requests that kill engines: known by what they ask, and refused for a while.

A request is suspected of an engine's death when it had been sent there and nothing had come of it yet; one that has
made progress is not.  Of KILLS_MAX deaths it is taken to be the reason.  While suspects are sent again one by one
(gateway.rescue), the second death has one suspect, so their neighbours are not mistaken for them.
"""

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from engine.api import GenerateRequest

KILLS_MAX = 2
FORGET_S = 600
SUSPECTS_MAX = 4096
"""The oldest are forgotten."""

_encode = msgspec.msgpack.Encoder().encode


def fingerprint(message: GenerateRequest) -> bytes:
    """What a request asks of an engine: its prompt and how to go on, whoever asks and with whichever seed."""
    sampling = msgspec.structs.replace(message.sampling, seed=0)
    return blake2b(_encode((message.prompt, sampling, message.tokens_min)), digest_size=16).digest()


class Poison:
    """Who is suspected of how many deaths.  Time is an argument."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # (how many, when it is forgotten)

    def suspect(self, messages: Iterable[GenerateRequest], now_ns: int) -> None:
        """An engine has died, perhaps of one of these; those that ask the same count as one."""
        for name in dict.fromkeys(fingerprint(message) for message in messages):
            self._set(name, self._count(name, now_ns) + 1, now_ns)

    def convict(self, message: GenerateRequest, now_ns: int) -> None:
        """It was there too often to be innocent."""
        self._set(fingerprint(message), KILLS_MAX, now_ns)

    def acquit(self, message: GenerateRequest) -> None:
        """An engine has lived with it."""
        self._deaths.pop(fingerprint(message), None)

    def deaths(self, message: GenerateRequest, now_ns: int) -> int:
        """Of how many it is suspected."""
        return self._count(fingerprint(message), now_ns) if self._deaths else 0

    def refuses(self, message: GenerateRequest, now_ns: int) -> bool:
        """Whether it is to be kept from the engines."""
        return self.deaths(message, now_ns) >= KILLS_MAX

    def _set(self, name: bytes, deaths: int, now_ns: int) -> None:
        self._deaths[name] = (deaths, now_ns + FORGET_S * 1_000_000_000)
        self._deaths.move_to_end(name)
        if len(self._deaths) > SUSPECTS_MAX:
            self._deaths.popitem(last=False)

    def _count(self, name: bytes, now_ns: int) -> int:
        count, until_ns = self._deaths.get(name, (0, 0))
        return count if now_ns < until_ns else 0
