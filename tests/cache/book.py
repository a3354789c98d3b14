"""
The limit book as a plain Python model: exact fractions, one thing after the other.

It is written from notes and not from limits.lua: a bucket is a fraction that grows with time, and nothing else.
"""

from fractions import Fraction
from math import ceil

from cache.accounts import Limits

MINUTE_US = 60_000_000
DAY_US = 86_400_000_000
NEVER = -1


class Bucket:
    """Holds at most `limit`, gains `limit` a minute; below zero is a debt."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = Fraction(limit)

    def pass_time(self, us: int) -> None:
        self.held = min(Fraction(self.limit), self.held + Fraction(us * self.limit, MINUTE_US))

    def give(self, amount: int) -> None:
        self.held = min(Fraction(self.limit), max(Fraction(-(10**15)), self.held + amount))

    def wait_us(self, wanted: int) -> int:
        # Whole ones are given out: a fraction of one is no one.
        if self.held >= wanted:
            return 0
        if wanted > self.limit or not self.limit:
            return NEVER
        return ceil((wanted - self.held) * MINUTE_US / self.limit)


class Level:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        rpm, tpm = limits.requests_per_minute, limits.tokens_per_minute
        self.requests = None if rpm is None else Bucket(rpm)
        self.tokens = None if tpm is None else Bucket(tpm)
        self.touched_us: int | None = None
        self.leases: dict[str, int] = {}
        self.day = 0
        self.spent = 0

    def touch(self, now_us: int) -> None:
        """What a call of the script does to a level when it loads it: no more than let time pass."""
        if self.touched_us is not None and now_us > self.touched_us:
            for bucket in (self.requests, self.tokens):
                if bucket is not None:
                    bucket.pass_time(now_us - self.touched_us)

    def spent_on(self, day: int) -> int:
        return self.spent if day == self.day else 0

    def running(self, now_us: int) -> int:
        return sum(expiry_us > now_us for expiry_us in self.leases.values())

    def waits(self, now_us: int, tokens: int, micros: int) -> list[tuple[str, int]]:
        found = []
        if self.requests is not None:
            found.append(("requests", self.requests.wait_us(1)))
        if self.tokens is not None:
            found.append(("tokens", self.tokens.wait_us(tokens)))
        slots = self.limits.concurrent
        if slots is not None and self.running(now_us) >= slots:
            first_us = min((e for e in self.leases.values() if e > now_us), default=now_us)
            found.append(("concurrent", min(1_000_000, first_us - now_us) if slots else NEVER))
        micros_limit, day = self.limits.spend_micros_per_day, now_us // DAY_US
        if micros_limit is not None and self.spent_on(day) + micros > micros_limit:
            found.append(("spend", NEVER if micros > micros_limit else (day + 1) * DAY_US - now_us))
        return [(name, wait_us) for name, wait_us in found if wait_us]


class Book:
    """All levels of one account."""

    def __init__(self, limits: list[Limits], lease_us: int) -> None:
        self.levels = [Level(one) for one in limits]
        self.reserved: dict[str, tuple[int, int, int]] = {}
        self._lease_us = lease_us

    def _touch(self, now_us: int, *, write: bool) -> None:
        for level in self.levels:
            level.touch(now_us)
            if write:
                level.touched_us = now_us

    def reserve(self, name: str, now_us: int, tokens: int, micros: int) -> list[tuple[int, str, int]]:
        """(level, limit, us) of each limit in the way; nothing: admitted."""
        buckets = [bucket for level in self.levels for bucket in (level.requests, level.tokens) if bucket is not None]
        before = [(bucket, bucket.held) for bucket in buckets]
        self._touch(now_us, write=False)
        day = now_us // DAY_US
        ways = [
            (number, limit, wait_us)
            for number, level in enumerate(self.levels)
            for limit, wait_us in level.waits(now_us, tokens, micros)
        ]
        if ways:
            for bucket, held in before:  # as if it had never been asked
                bucket.held = held
            return ways
        self._touch_done(now_us)
        for level in self.levels:
            if level.requests is not None:
                level.requests.give(-1)
            if level.tokens is not None:
                level.tokens.give(-tokens)
            level.spent, level.day = level.spent_on(day) + micros, day
            if level.limits.concurrent is not None:
                level.leases = {one: expiry for one, expiry in level.leases.items() if expiry > now_us}
                level.leases[name] = now_us + self._lease_us
        self.reserved[name] = (tokens, micros, day)
        return []

    def _touch_done(self, now_us: int) -> None:
        for level in self.levels:
            level.touched_us = now_us

    def settle(self, name: str, now_us: int, tokens: int, micros: int, *, whole: bool) -> bool:
        held = self.reserved.pop(name, None)
        if held is None:
            return False
        tokens_held, micros_held, reserved_on = held
        self._touch(now_us, write=True)
        day = now_us // DAY_US
        for level in self.levels:
            if level.requests is not None:
                level.requests.give(1 if whole else 0)
            if level.tokens is not None:
                level.tokens.give(tokens_held - tokens)
            spent = level.spent_on(day)
            level.spent, level.day = spent, day
            if reserved_on == day:
                level.spent = max(0, spent + micros - micros_held)
            level.leases.pop(name, None)
        return True

    def renew(self, name: str, now_us: int) -> bool:
        if name not in self.reserved:
            return False
        for level in self.levels:
            if level.limits.concurrent is not None:
                level.leases = {one: expiry for one, expiry in level.leases.items() if expiry > now_us}
                level.leases[name] = now_us + self._lease_us
        return True


class Auditor:
    """
    Over any interval, admitted <= capacity + rate * time: looked at from outside, knowing nothing but what happened.

    `excess` is the most that was charged, less what time has given, over all intervals that end now.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.excess = Fraction(0)

    def pass_time(self, us: int) -> None:
        self.excess = max(Fraction(0), self.excess - Fraction(us * self.limit, MINUTE_US))

    def charge(self, amount: int) -> None:
        self.excess = max(Fraction(0), self.excess) + amount

    def check(self) -> None:
        assert self.excess <= self.limit, "more was admitted than the limit allows"
