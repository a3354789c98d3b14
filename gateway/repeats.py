"""
What prompts have in common with those before them: what a prefix cache of any size could have found.

Of each prompt its beginnings are remembered by name, as the prefix index has them (engine.prefix), the least recently
used forgotten first.  So it can be said whether a cache would pay that is off, and what one loses that is too small.
"""

from collections import OrderedDict
from collections.abc import Sequence

from engine.api import indexed_names, indexed_tokens
from gateway.planning import Plan
from telemetry.live import LiveRequest

NAMES_MAX = 50_000
"""Beginnings that are remembered: of 16 bytes each."""
TOKENS_MAX = 8192
"""Of a prompt, so many are looked at."""


class Repeats:
    """The beginnings of prompts."""

    def __init__(self, *, names_max: int = NAMES_MAX) -> None:
        self._names_max = names_max
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def note(self, live: LiveRequest, planned: Plan, block_slots: int) -> None:
        """What this request repeats; to be called at its end, when nobody waits for it."""
        firsts = planned.messages[:: planned.choices]
        live.repeated_tokens = sum(self.seen(one.tenant, one.prompt, block_slots) for one in firsts)

    def seen(self, tenant: str, prompt: Sequence[int], block_slots: int) -> int:
        """How many tokens of it a prompt of the same tenant began with before; from now on this one counts, too."""
        names = indexed_names(tenant, prompt[:TOKENS_MAX], block_slots)
        known = next((index for index, name in enumerate(names) if name not in self._names), len(names))
        for name in names:
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._names_max:
            self._names.popitem(last=False)
        return known * indexed_tokens(block_slots)
