"""
The limit book as a plain Python model: exact fractions, one thing after the other.

It is written from notes and not from limits.lua: a bucket is a fraction that grows with time, and nothing else.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from cache.accounts import LIMIT_MAX, Limits

MINUTE_US = 60_000_000
DAY_US = 86_400_000_000
NEVER = -1
KINDS = ("requests", "tokens")


def limit_of(limits: Limits, kind: str) -> int | None:
    return limits.requests_per_minute if kind == "requests" else limits.tokens_per_minute


def wait_us(held: Fraction, limit: int, wanted: int) -> int:
    """Until a bucket holds `wanted`.  Whole ones are given out: a fraction of one is no one."""
    if held >= wanted:
        return 0
    if wanted > limit or not limit:
        return NEVER
    return ceil((wanted - held) * MINUTE_US / limit)


class Level:
    """What it holds, under the limits of who charged it last."""

    def __init__(self) -> None:
        self.touched_us: int | None = None
        self.limits = Limits()
        self.held: dict[str, Fraction | None] = dict.fromkeys(KINDS)
        """None: not limited."""
        self.leases: dict[str, int] = {}
        self.day = 0
        self.spent = 0

    def at(self, now_us: int, limits: Limits) -> dict[str, Fraction | None]:
        """What it would hold if these limits held."""
        found: dict[str, Fraction | None] = {}
        for kind in KINDS:
            limit, held = limit_of(limits, kind), self.held[kind]
            if limit is None:
                found[kind] = None
            elif held is None or self.touched_us is None:
                found[kind] = Fraction(limit)
            else:
                passed_us = max(0, now_us - self.touched_us)
                found[kind] = min(Fraction(limit), held + Fraction(passed_us * limit, MINUTE_US))
        return found

    def write(self, now_us: int, limits: Limits, held: dict[str, Fraction | None]) -> None:
        self.touched_us, self.limits, self.held = now_us, limits, held

    def give(self, kind: str, amount: int) -> None:
        limit, held = limit_of(self.limits, kind), self.held[kind]
        if limit is not None and held is not None:
            self.held[kind] = min(Fraction(limit), max(Fraction(-LIMIT_MAX), held + amount))

    def spent_on(self, day: int) -> int:
        return self.spent if day == self.day else 0

    def running(self, now_us: int) -> int:
        return sum(expiry_us > now_us for expiry_us in self.leases.values())

    def lease(self, name: str, now_us: int, lease_us: int) -> None:
        self.leases = {one: expiry for one, expiry in self.leases.items() if expiry > now_us}
        self.leases[name] = now_us + lease_us

    def waits(self, now_us: int, limits: Limits, tokens: int, micros: int) -> list[tuple[str, int]]:
        found = []
        for kind, held in self.at(now_us, limits).items():
            limit = limit_of(limits, kind)
            if held is not None and limit is not None:
                found.append((kind, wait_us(held, limit, 1 if kind == "requests" else tokens)))
        slots = limits.concurrent
        if slots is not None and self.running(now_us) >= slots:
            first_us = min((e for e in self.leases.values() if e > now_us), default=now_us)
            found.append(("concurrent", min(1_000_000, first_us - now_us) if slots else NEVER))
        micros_limit, day = limits.spend_micros_per_day, now_us // DAY_US
        if micros_limit is not None and self.spent_on(day) + micros > micros_limit:
            found.append(("spend", NEVER if micros > micros_limit else (day + 1) * DAY_US - now_us))
        return [(name, us) for name, us in found if us]


def charges(limits: Limits) -> bool:
    """Whether anything but slots is counted."""
    return any(
        limit is not None
        for limit in (limits.requests_per_minute, limits.tokens_per_minute, limits.spend_micros_per_day)
    )


class Book:
    """All levels of one account, whose limits may change."""

    def __init__(self, levels: int, lease_us: int) -> None:
        self.levels = [Level() for _ in range(levels)]
        self.reserved: dict[str, tuple[int, int, int, tuple[Limits, ...]]] = {}
        self._void: set[str] = set()
        self._lease_us = lease_us

    def reserve(
        self, name: str, now_us: int, tokens: int, micros: int, limits: Sequence[Limits]
    ) -> list[tuple[int, str, int]]:
        """(level, limit, us) of each limit in the way; nothing: admitted."""
        ways = [
            (number, limit, us)
            for number, (level, one) in enumerate(zip(self.levels, limits, strict=True))
            for limit, us in level.waits(now_us, one, tokens, micros)
        ]
        if ways or name in self._void:
            return ways
        day = now_us // DAY_US
        for level, one in zip(self.levels, limits, strict=True):
            if charges(one):
                level.write(now_us, one, level.at(now_us, one))
                level.give("requests", -1)
                level.give("tokens", -tokens)
                level.spent, level.day = level.spent_on(day) + micros, day
            if one.concurrent is not None:
                level.lease(name, now_us, self._lease_us)
        self.reserved[name] = (tokens, micros, day, tuple(limits))
        return []

    def settle(self, name: str, now_us: int, tokens: int, micros: int, *, whole: bool) -> bool:
        held = self.reserved.pop(name, None)
        if held is None:
            return False
        tokens_held, micros_held, reserved_on, limits = held
        day = now_us // DAY_US
        for level, own in zip(self.levels, limits, strict=True):
            level.leases.pop(name, None)
            if not charges(own):
                continue
            # Who charged last says under which limits time passes; what one's own never charged is not given back.
            in_force = level.limits
            level.write(now_us, in_force, level.at(now_us, in_force))
            if own.requests_per_minute is not None:
                level.give("requests", 1 if whole else 0)
            if own.tokens_per_minute is not None:
                level.give("tokens", tokens_held - tokens)
            spent = level.spent_on(day)
            level.spent, level.day = spent, day
            if reserved_on == day:
                level.spent = max(0, spent + micros - micros_held)
        return True

    def void(self, name: str, now_us: int) -> None:
        self.settle(name, now_us, 0, 0, whole=True)
        self._void.add(name)

    def renew(self, name: str, now_us: int) -> bool:
        if name not in self.reserved:
            return False
        for level, own in zip(self.levels, self.reserved[name][3], strict=True):
            if own.concurrent is not None:
                level.lease(name, now_us, self._lease_us)
        return True


class Auditor:
    """
    Over any interval, admitted <= capacity + rate * time: looked at from outside, knowing nothing but what happened.

    `excess` is the most that was charged, less what time has given, over all intervals that end now.  Of limits that
    have changed it is the largest.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.excess = Fraction(0)

    def allow(self, limit: int | None) -> None:
        self.limit = None if limit is None or self.limit is None else max(limit, self.limit)

    def pass_time(self, us: int) -> None:
        if self.limit is not None:
            self.excess = max(Fraction(0), self.excess - Fraction(us * self.limit, MINUTE_US))

    def charge(self, amount: int) -> None:
        self.excess = max(Fraction(0), self.excess) + amount

    def check(self) -> None:
        assert self.limit is None or self.excess <= self.limit, "more was admitted than the limit allows"
