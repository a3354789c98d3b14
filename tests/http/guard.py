"""
A gateway with keys and limits, on a real embedded Valkey, and the book as the server has it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai

from cache.accounts import Limits
from cache.connection import Store
from cache.key_records import AuditLine, Issued
from cache.keys import Keys
from cache.pepper import make_pepper
from cache.redis_url import parse_redis_url
from tests.cache.book import MINUTE_US
from tests.cache.servers import Server
from tests.http import asking
from tests.http.asking import COMPLETIONS_URL, Pair, prompt

WAIT_S = 20.0
_Result = TypeVar("_Result")


class Guard:
    """The server, and the pepper beside it."""

    def __init__(self, server: Server, home: Path) -> None:
        self.server = server
        self.pepper_file = home / "pepper"

    @property
    def options(self) -> dict[str, object]:
        """For a gateway."""
        return {"redis_url": self.server.url, "pepper_file": str(self.pepper_file)}

    def create(
        self,
        *,
        tenant: str = "blue",
        limits: Limits = Limits(),  # noqa: B008 - frozen
        ago_s: int = 0,
        **more: Any,
    ) -> Issued:
        """A new key, made `ago_s` ago."""
        return self._ask(lambda keys: keys.create(tenant=tenant, actor="test", limits=limits, **more), ago_s)

    def revoke(self, key_id: str) -> None:
        """End a key."""
        self._ask(lambda keys: keys.revoke(key_id, actor="test"))

    def change_tenant(self, name: str, **more: Any) -> None:
        """Make it, or change it."""
        self._ask(lambda keys: keys.change_tenant(name, actor="test", **more))

    def change_organisation(self, name: str, limits: Limits) -> None:
        """Make it, or change it."""
        self._ask(lambda keys: keys.change_organisation(name, actor="test", limits=limits))

    def audit(self) -> list[AuditLine]:
        """What was changed."""
        return self._ask(lambda keys: keys.audit())

    def _ask(self, do: Callable[[Keys], Awaitable[_Result]], ago_s: int = 0) -> _Result:
        async def asking() -> _Result:
            store = Store(parse_redis_url(self.server.url), connect_timeout_ms=5000, command_timeout_ms=5000)
            try:
                pepper = make_pepper(self.pepper_file, {})
                return await do(Keys(store, pepper, time_s=lambda: time.time() - ago_s))
            finally:
                await store.aclose()

        return asyncio.run(asyncio.wait_for(asking(), WAIT_S))

    # ---- the book

    def left(self, key_id: str) -> tuple[Fraction, Fraction]:
        """Requests and tokens in the buckets of a key, as they were written last."""
        _, requests, requests_part, tokens, tokens_part, *_ = self.bucket(key_id)
        return requests + Fraction(requests_part, MINUTE_US), tokens + Fraction(tokens_part, MINUTE_US)

    def bucket(self, key_id: str) -> list[int]:
        """The state of a key as limits.lua has it: at (us), requests, part, tokens, part, day, spent; its limits."""
        reply = self.server.ask("GET", f"pellucid:{{default}}:limits:key:{key_id}")
        return [int(word) for word in reply.split(b"\r\n")[1].split()]

    def running(self, key_id: str) -> int:
        """Slots of a key that are taken."""
        return int(self.server.ask("ZCARD", f"pellucid:{{default}}:leases:key:{key_id}")[1:])

    def reservations(self) -> int:
        """What is not settled, and not void."""
        names = self.server.ask("KEYS", "pellucid:*:reservation:*").decode().split("\r\n")[2::2]
        return sum(b"void" not in self.server.ask("GET", name) for name in names)


def bearer(key: str) -> dict[str, str]:
    """Its header."""
    return {"authorization": f"Bearer {key}"}


def ask(pair: Pair, key: str, **fields: object) -> httpx.Response:
    """A completion."""
    return pair[0].client.post(COMPLETIONS_URL, json=prompt(**fields), headers=bearer(key))


def sdk(pair: Pair, key: str) -> openai.OpenAI:
    """The official client, which asks once."""
    return asking.sdk(pair[0], key)


def until(true: Callable[[], bool], what: str) -> None:
    """Wait for something that another process or thread does."""
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)
