"""
Requests that are suspected of the deaths of engines, for all gateways that share a server.

A name says what a request asks, hashed (gateway.poison).  What is here is forgotten after TTL_MS.
"""

from collections.abc import Sequence
from pathlib import Path

from cache.connection import Script, Store

SCRIPT = Script(Path(__file__).with_name("suspects.lua").read_text(encoding="utf-8"))
TTL_MS = 600_000
NAMES_MAX = 4096
"""The oldest are forgotten."""
_KEYS = ("pellucid:{suspects}:deaths", "pellucid:{suspects}:until")


class Suspects:
    """One gateway's way to them.  Every call raises Unavailable."""

    def __init__(
        self, store: Store, *, ttl_ms: int = TTL_MS, names_max: int = NAMES_MAX, script: Script = SCRIPT
    ) -> None:
        self._store = store
        self._bounds = (str(ttl_ms), str(names_max))
        self._script = script

    async def suspect(self, names: Sequence[bytes]) -> None:
        """One more death for each of these."""
        await self._run("suspect", names)

    async def convict(self, names: Sequence[bytes], deaths: int) -> None:
        """So many deaths for each of these, whatever was known of them."""
        await self._run("convict", names, str(deaths))

    async def acquit(self, names: Sequence[bytes]) -> None:
        """None of these has done it."""
        await self._run("acquit", names)

    async def known(self) -> dict[bytes, int]:
        """Deaths by name."""
        reply = await self._run("known", ())
        return {bytes.fromhex(name.decode()): int(deaths) for name, deaths in zip(reply[::2], reply[1::2], strict=True)}

    async def _run(self, operation: str, names: Sequence[bytes], *more: str) -> list[bytes]:
        arguments = (operation, *self._bounds, *(name.hex() for name in names), *more)
        return await self._store.run(self._script, _KEYS, arguments)
