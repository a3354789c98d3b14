"""
Whose limits hold for a request: its key, the key's tenant, the tenant's organisation.

An organisation's name is the hash tag of all that its requests touch: one script reaches all levels on a cluster too.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import msgspec

LIMIT_MAX = 10**15
"""Beyond any real limit, and small enough for Lua's doubles to be exact."""
Limit = Annotated[int, msgspec.Meta(ge=0, le=LIMIT_MAX)] | None
POLICIES = ("local", "closed", "open")
Policy = Literal["local", "closed", "open"]
"""What a request gets while the server is away: a share of its limits in each worker, a 503, or everything."""
LevelName = Literal["organisation", "tenant", "key"]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """None: no limit; 0: nothing at all."""

    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    concurrent: Limit = None
    spend_micros_per_day: Limit = None
    """Millionths of the currency that prices are in; a day is one of UTC."""

    @property
    def any(self) -> bool:
        """Whether anything is limited."""
        return self != Limits()

    @property
    def words(self) -> tuple[str, ...]:
        """As limits.lua takes them."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.concurrent, self.spend_micros_per_day)
        return tuple("-1" if limit is None else str(limit) for limit in limits)


class Level(msgspec.Struct, frozen=True):
    """One of the three, and its limits."""

    name: LevelName
    id: str
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class Account:
    """All that a request is held against.  Many requests share one, so what follows from it is found out once."""

    organisation: str
    levels: tuple[Level, ...]
    """Widest first."""
    policy: Policy = "local"

    @cached_property
    def limited(self) -> tuple[Level, ...]:
        """The levels that limit anything."""
        return tuple(level for level in self.levels if level.limits.any)

    @cached_property
    def limit_words(self) -> tuple[str, ...]:
        """Of those, as limits.lua takes them."""
        return tuple(word for level in self.limited for word in level.limits.words)

    @cached_property
    def limit_keys(self) -> tuple[str, ...]:
        """Where their state is on the server, and their leases."""
        return tuple(
            f"{self.prefix}:{kind}:{level.name}:{level.id}" for level in self.limited for kind in ("limits", "leases")
        )

    @property
    def prefix(self) -> str:
        """Of all keys that its requests touch."""
        return f"pellucid:{{{self.organisation}}}"

    def estimate_tokens(self, *, prompt_tokens: int, asked_tokens: int | None, default_tokens: int) -> int:
        """
        What to reserve for a request.

        Without a maximum of the client's own it is capped at the smallest bucket: else a small key could never ask.
        """
        if asked_tokens is not None:
            return prompt_tokens + min(asked_tokens, default_tokens)
        buckets = [level.limits.tokens_per_minute for level in self.levels]
        smallest = min((bucket for bucket in buckets if bucket is not None), default=prompt_tokens + default_tokens)
        return min(prompt_tokens + default_tokens, max(prompt_tokens, smallest))

    def estimate_micros(self, *, prompt_micros: int, micros: int, named: bool) -> int:
        """The same in money: `micros` in all; `named`: the client named a maximum of its own."""
        days = [level.limits.spend_micros_per_day for level in self.levels]
        smallest = min((day for day in days if day is not None), default=micros)
        return micros if named else min(micros, max(prompt_micros, smallest))
