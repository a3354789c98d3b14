"""
The prefix index: which engines have which prefix in their KV cache, for all gateways that share a server.

    matched   a prompt's names -> how many of them, from the first, each live engine has
    seen      an engine has told that these names are in its cache
    gone      ... that these are not any more

A hint, never a promise: the engine decides, and what it found is in the request's usage.  So what an engine tells may
be late, may be lost, and is forgotten after TTL_MS unless it is seen again.

Epochs are the invalidation.  An epoch is one life of one engine, which has one model, in one precision, on one KV
cache; it is random at each start.  So a name needs to say nothing of the model, and a restarted engine matches nothing
of what was told before, at once and without a search: nobody asks for the old epoch any more.

A name begins with its family (engine.prefix): the beginning of the hash of its chain's first block, which the tenant
is in.  The family is the hash tag.  A chain is then on one node of a cluster, so one call walks it; and chains that
begin differently are on different nodes, as they would not be if all of a tenant's, or all there are, had one tag.

Memory has a bound of its own, because the limits' keys are on the same server, and that must not evict: who writes for
an engine remembers what it has told of it, at most NAMES_MAX names, and takes the one longest unseen back for each one
more.  An engine tells one gateway (engine.server), so the server holds NAMES_MAX names an engine, and for up to TTL_MS
what a writer had told that was not there to take it back.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from cache.connection import Script, Store
from cache.errors import Unavailable
from telemetry import clock

SCRIPT = Script(Path(__file__).with_name("prefix.lua").read_text(encoding="utf-8"))
FAMILY_BYTES = 2
"""At the beginning of a name: engine.prefix."""
TTL_MS = 600_000
REFRESH_MS = 60_000
"""What is seen again sooner is not told again.  A server that was flushed knows all again after so long."""
NAMES_MAX = 32_768
"""Of one engine: two million tokens in its cache, and on the server less than 8 MB."""
PENDING_MAX = 16_384
BATCH_NAMES_MAX = 256
GATHER_MS = 20
"""How long the first name of a batch waits for others."""
RETRY_MS = 1000


class PrefixIndex:
    """One gateway's way to the index."""

    def __init__(
        self,
        store: Store,
        *,
        ttl_ms: int = TTL_MS,
        refresh_ms: int = REFRESH_MS,
        names_max: int = NAMES_MAX,
        pending_max: int = PENDING_MAX,
        script: Script = SCRIPT,
        now_ns: Callable[[], int] = clock.now_ns,
    ) -> None:
        assert 0 <= refresh_ms < ttl_ms
        self.dropped = 0
        """News that the bound has pushed out before the server had them."""
        self._store = store
        self._ttl_ms = str(ttl_ms)
        self._refresh_ns = refresh_ms * 1_000_000
        self._names_max = names_max
        self._pending_max = pending_max
        self._script = script
        self._now_ns = now_ns
        self._told: dict[str, OrderedDict[bytes, int]] = {}  # epoch -> name -> when it was told; longest unseen first
        self._pending: OrderedDict[tuple[str, bytes], bool] = OrderedDict()  # the newest news of each, oldest first
        self._writing: asyncio.Task[None] | None = None

    @property
    def pending(self) -> int:
        """News that the server does not have yet."""
        return len(self._pending)

    async def matched(self, names: Sequence[bytes], epochs: Sequence[str]) -> list[int]:
        """
        How many of `names`, from the first, each of `epochs` has.  Raises Unavailable.

        Args:
            names: a chain from its beginning, so of one family.
            epochs: of the engines that are there.
        """
        if not names or not epochs:
            return [0] * len(epochs)
        reply = await self._store.run(self._script, [_key(name) for name in names], ["match", self._ttl_ms, *epochs])
        return [int(count) for count in reply]

    def seen(self, epoch: str, names: Sequence[bytes]) -> None:
        """The engine has these in its cache: they have just come, or were just used."""
        told, now_ns = self._told.setdefault(epoch, OrderedDict()), self._now_ns()
        for name in names:
            told_ns = told.get(name)
            if told_ns is None or now_ns - told_ns >= self._refresh_ns:
                told[name] = now_ns
                self._tell(epoch, name, there=True)
            if name in told:  # else the bound of what is pending has pushed it out at once
                told.move_to_end(name)
            if len(told) > self._names_max:
                longest_unseen, _ = told.popitem(last=False)
                self._tell(epoch, longest_unseen, there=False)

    def gone(self, epoch: str, names: Sequence[bytes]) -> None:
        """The engine has given these up for others."""
        told = self._told.get(epoch)
        for name in names:
            if told is not None:
                told.pop(name, None)
            self._tell(epoch, name, there=False)

    def forget(self, epoch: str) -> None:
        """The engine tells us nothing any more: it has ended, or tells another gateway."""
        self._told.pop(epoch, None)

    async def aclose(self) -> None:
        """Stop writing; what is pending is lost."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait({self._writing})

    def _tell(self, epoch: str, name: bytes, *, there: bool) -> None:
        self._pending.pop((epoch, name), None)
        self._pending[epoch, name] = there
        if len(self._pending) > self._pending_max:
            (lost_epoch, lost_name), was_there = self._pending.popitem(last=False)
            self.dropped += 1
            if was_there and lost_epoch in self._told:  # so that it is told when it is seen again
                self._told[lost_epoch].pop(lost_name, None)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all(), name="write the prefix index")

    async def _write_all(self) -> None:
        while self._pending:
            await asyncio.sleep(GATHER_MS / 1000)
            try:
                for batch in _batches(self._pending):
                    await self._write(batch)
            except Unavailable:
                await self._store.up.wait()
                await asyncio.sleep(RETRY_MS / 1000)

    async def _write(self, batch: list[tuple[tuple[str, bytes], bool]]) -> None:
        words = [word for (epoch, _), there in batch for word in (epoch, "1" if there else "0")]
        await self._store.run(self._script, [_key(name) for (_, name), _ in batch], ["note", self._ttl_ms, *words])
        for news, there in batch:
            if self._pending.get(news) == there:  # else there is newer news of it
                del self._pending[news]


def _batches(pending: OrderedDict[tuple[str, bytes], bool]) -> list[list[tuple[tuple[str, bytes], bool]]]:
    """What is pending, by family, because one call must find all its keys on one node of a cluster."""
    families: dict[bytes, list[tuple[tuple[str, bytes], bool]]] = {}
    for news, there in pending.items():
        families.setdefault(news[1][:FAMILY_BYTES], []).append((news, there))
    batches = []
    for family in families.values():
        rest = iter(family)
        while batch := list(islice(rest, BATCH_NAMES_MAX)):
            batches.append(batch)
    return batches


def _key(name: bytes) -> str:
    return f"pellucid:{{{name[:FAMILY_BYTES].hex()}}}:prefix:{name[FAMILY_BYTES:].hex()}"
