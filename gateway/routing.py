"""
Where a request goes: what is known of the replicas, and what the prefix index says, put to the policy.

What the engines report of their prefix caches goes the other way: from a replica's frames through here into the index.
"""

import asyncio
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple, Protocol

from cache.errors import Unavailable
from cache.prefix_index import PrefixIndex
from engine.api import GenerateRequest, Hello, Load, PrefixNews, indexed_names, indexed_tokens
from gateway.balance import Ask, Candidate, Reason, choose
from gateway.config import Policy
from gateway.replica import Replica
from telemetry import clock

HASHED_INLINE_TOKENS_MAX = 4096
"""Names of longer prompts are made on a thread: hashing takes about a microsecond for 16 tokens."""
NEWS_LOST = "pellucid_prefix_index_news_lost_total"

Connected = Sequence[tuple[Replica, Hello]]
Matched = Mapping[str, int]
"""Tokens of a prompt in the cache of an engine, by its epoch; those that have none may be left out."""


class Observer(Protocol):
    """Who counts: the telemetry hub."""

    def observe(self, metric: str, amount: int) -> None:
        """Add to a metric of the catalogue."""


class Placement(NamedTuple):
    """The replica for a request, and why it is that one."""

    replica: Replica
    hello: Hello
    reason: Reason
    promised_tokens: int | None
    """Of its prompt, those that the index says are in that replica's cache.  None: it did not say."""


class Router:
    """Chooses replicas, and keeps the index."""

    def __init__(
        self, policy: Policy, index: PrefixIndex | None, observer: Observer, *, rng: Random | None = None
    ) -> None:
        """Without an `index` nothing is known of caches, and `prefix` does what it does when the index is away."""
        self._policy = policy
        self._index = index
        self._observer = observer
        self._rng = rng or Random()
        self._turn = 0
        self._dropped = 0

    async def look_up(self, connected: Connected, messages: Sequence[GenerateRequest]) -> Matched | None:
        """What of their longest prompt is where.  None: it does not matter, or nobody could be asked."""
        if self._index is None or not self.wants(connected):
            return None
        longest = _longest(messages)
        hellos = [hello for _, hello in connected]
        sizes = sorted({hello.block_slots for hello in hellos})  # nearly always one: a name is of blocks of one size
        try:
            found = [await self._of_size(self._index, size, longest, hellos) for size in sizes]
        except Unavailable:
            return None
        return {epoch: tokens for part in found for epoch, tokens in part.items()}

    def wants(self, connected: Connected) -> bool:
        """Whether the choice depends on what they have in their caches."""
        return self._policy == "prefix" and len(connected) > 1

    def place(
        self, connected: Connected, messages: Sequence[GenerateRequest], matched: Matched | None, key: str = ""
    ) -> Placement:
        """
        A replica for one request.

        Args:
            connected: who could have it, at least one.
            messages: its sequences; they stay together.
            matched: what `look_up` has found.
            key: what requests of its tenant have in common that should meet again; empty: nothing is known of that.
        """
        longest = _longest(messages)
        now_ns = clock.now_ns()
        candidates = [candidate(one, hello, (matched or {}).get(hello.epoch, 0), now_ns) for one, hello in connected]
        unknown = matched is None and self.wants(connected)
        ask = Ask(
            prompt_tokens=len(longest.prompt),
            key=f"{longest.tenant}\0{key}".encode("utf-8", "surrogatepass") if key else b"",
            first_block=_first_block(longest, connected[0][1].block_slots) if unknown else b"",
        )
        chosen, reason = choose(self._policy, candidates, ask, turn=self._turn, rng=self._rng)
        self._turn += 1
        same = all(message.prompt == longest.prompt for message in messages)
        promised = candidates[chosen].matched_tokens if matched is not None and same else None
        return Placement(*connected[chosen], reason, promised)

    async def _of_size(
        self, index: PrefixIndex, size: int, message: GenerateRequest, hellos: Sequence[Hello]
    ) -> Matched:
        epochs = [hello.epoch for hello in hellos if hello.block_slots == size]
        if len(message.prompt) <= HASHED_INLINE_TOKENS_MAX:
            names = indexed_names(message.tenant, message.prompt, size)
        else:
            names = await asyncio.to_thread(indexed_names, message.tenant, message.prompt, size)
        counts = await index.matched(names, epochs)
        return {epoch: count * indexed_tokens(size) for epoch, count in zip(epochs, counts, strict=True)}

    # ---- what engines report

    def heard(self, epoch: str, news: PrefixNews) -> None:
        """What has changed in the prefix cache of the engine that calls this life of itself `epoch`."""
        lost = news.lost
        if self._index is not None:
            self._index.seen(epoch, news.here)
            self._index.gone(epoch, news.gone)
            lost += self._index.dropped - self._dropped
            self._dropped = self._index.dropped
        if lost:
            self._observer.observe(NEWS_LOST, lost)

    def ended(self, epoch: str) -> None:
        """That life is over, or tells us nothing any more."""
        if self._index is not None:
            self._index.forget(epoch)

    async def stop(self) -> None:
        """Write no more."""
        if self._index is not None:
            await self._index.aclose()


def _longest(messages: Sequence[GenerateRequest]) -> GenerateRequest:
    return max(messages, key=lambda message: len(message.prompt))


def _first_block(message: GenerateRequest, block_slots: int) -> bytes:
    """The name of the first part that an index could know; empty where the prompt is shorter."""
    names = indexed_names(message.tenant, message.prompt[: indexed_tokens(block_slots) + 1], block_slots)
    return names[0] if names else b""


def candidate(replica: Replica, hello: Hello, matched_tokens: int, now_ns: int) -> Candidate:
    """
    What is known of a replica: what it last said of its load, and what it has been sent since and has not taken yet.

    An engine that says nothing when it should is saturated, whatever it said before.
    """
    load = replica.load or Load()
    sent = [call for call in replica.calls.values() if not call.accepted_ns and call.finish is None]
    sent_tokens = sum(max(0, len(call.message.prompt) - call.promised_tokens) for call in sent)
    sequences = load.running + load.waiting + len(sent)
    return Candidate(
        name=replica.address,
        sequences=sequences,
        tokens=load.used_slots + load.owed_tokens + sent_tokens,
        ahead_tokens=load.owed_tokens + sent_tokens,
        capacity_tokens=hello.blocks_max * hello.block_slots,
        saturated=replica.is_stale(now_ns) or sequences >= hello.sequences_max,
        matched_tokens=matched_tokens,
    )
