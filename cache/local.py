"""
Limits while the server is away: each worker grants its share of every limit, from buckets of its own.

They begin full, so one outage may admit a bucket's worth beyond the book; over it, admitted <= capacity + rate * time
holds here too, summed over the workers.  What was admitted here is settled here and never on the server.
"""

from collections import OrderedDict

import msgspec

from cache.accounts import Level, Limits

MINUTE_US = 60_000_000
DAY_US = 86_400_000_000
ENTRIES_MAX = 10_000
RETRY_US = 1_000_000
"""When something may be free that no clock frees."""
NEVER = -1


class Bucket:
    """Holds `limit`, gains `limit` in each period, in units of 1/period_us: exact."""

    def __init__(self, limit: int, period_us: int, now_us: int) -> None:
        self.limit = limit
        self._period_us = period_us
        self._units = limit * period_us
        self._at_us = now_us

    def refill(self, now_us: int) -> None:
        """To `now_us`."""
        self._units = min(self.limit * self._period_us, self._units + max(0, now_us - self._at_us) * self.limit)
        self._at_us = now_us

    def resize(self, limit: int, now_us: int) -> None:
        """Another limit from now on; it holds no more for that."""
        self.refill(now_us)
        self.limit = limit

    def wait_us(self, wanted: int) -> int:
        """Until it holds `wanted`; NEVER."""
        missing = wanted * self._period_us - self._units
        if missing <= 0:
            return 0
        return -(-missing // self.limit) if wanted <= self.limit else NEVER

    def take(self, amount: int) -> None:
        """Less by `amount`; a negative one gives back, up to full."""
        self._units = min(self.limit * self._period_us, self._units - amount * self._period_us)

    @property
    def left(self) -> int:
        """Whole ones, at least 0."""
        return max(0, self._units // self._period_us)


class Verdict(msgspec.Struct, frozen=True):
    """Why not, and for how long; all zero when admitted."""

    level: int = -1
    limit: str = ""
    wait_us: int = 0

    @property
    def admitted(self) -> bool:
        """Whether nothing was in the way."""
        return self.level < 0


class _Shares:
    """One worker's share of one level."""

    def __init__(self) -> None:
        self.limits = Limits()
        self.concurrent: int | None = None
        self.running = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.micros: Bucket | None = None
        self._share: Share | None = None

    def limit(self, limits: Limits, share: "Share", now_us: int) -> None:
        """From now on it is this share of these limits; what is used already stays used."""
        if (limits, share) == (self.limits, self._share):
            return
        self.limits, self._share = limits, share
        self.concurrent = share.of(limits.concurrent)
        self.requests = _resized(self.requests, share.of(limits.requests_per_minute), MINUTE_US, now_us)
        self.tokens = _resized(self.tokens, share.of(limits.tokens_per_minute), MINUTE_US, now_us)
        self.micros = _resized(self.micros, share.of(limits.spend_micros_per_day), DAY_US, now_us)

    def waits(self, tokens: int, micros: int, now_us: int) -> list[tuple[str, int]]:
        """(limit, us) for each that is in the way."""
        limits = self.limits
        wanted = (
            ("requests", self.requests, 1, limits.requests_per_minute),
            ("tokens", self.tokens, tokens, limits.tokens_per_minute),
            ("spend", self.micros, micros, limits.spend_micros_per_day),
        )
        found = []
        for name, bucket, amount, limit in wanted:
            if bucket is None or limit is None:
                continue
            bucket.refill(now_us)
            wait_us = bucket.wait_us(amount)
            if wait_us == NEVER and amount <= limit:
                wait_us = RETRY_US  # too much for this share, and not for the server that will be back
            if wait_us:
                found.append((name, wait_us))
        if self.concurrent is not None and self.running >= self.concurrent:
            found.append(("concurrent", RETRY_US if limits.concurrent else NEVER))
        return found

    def charge(self, requests: int, tokens: int, micros: int) -> None:
        for bucket, amount in ((self.requests, requests), (self.tokens, tokens), (self.micros, micros)):
            if bucket is not None:
                bucket.take(amount)


class Share(msgspec.Struct, frozen=True):
    """One worker of several; the shares of all of them add up to the whole."""

    workers: int
    worker: int

    def of(self, limit: int | None) -> int | None:
        """This worker's part."""
        if limit is None:
            return None
        return limit // self.workers + (self.worker < limit % self.workers)


def _resized(bucket: Bucket | None, limit: int | None, period_us: int, now_us: int) -> Bucket | None:
    if limit is None:
        return None
    if bucket is None:
        return Bucket(limit, period_us, now_us)
    bucket.resize(limit, now_us)
    return bucket


class LocalLimits:
    """The levels that were asked for lately, `entries_max` of them and those in use."""

    def __init__(self, *, workers: int, worker: int, entries_max: int = ENTRIES_MAX) -> None:
        assert 0 <= worker < workers
        self._share = Share(workers, worker)
        self._entries_max = entries_max
        self._levels: OrderedDict[tuple[str, str, str], _Shares] = OrderedDict()

    @property
    def workers(self) -> int:
        """Among how many each limit is divided."""
        return self._share.workers

    def share_with(self, *, workers: int, worker: int) -> None:
        """From now on we are number `worker` of so many."""
        self._share = Share(workers, worker)

    def reserve(
        self, organisation: str, levels: tuple[Level, ...], *, tokens: int, micros: int, now_us: int
    ) -> tuple[Verdict, list[tuple[int, int]]]:
        """
        Charge all levels, or none.

        Returns: the verdict, and for each level what is left of requests and tokens, -1 without a limit.
        """
        shares = [self._find(organisation, level, now_us) for level in levels]
        worst = Verdict()
        for number, share in enumerate(shares):
            for limit, wait_us in share.waits(tokens, micros, now_us):
                if worst.wait_us != NEVER and (wait_us == NEVER or wait_us > worst.wait_us):
                    worst = Verdict(number, limit, wait_us)
        if worst.admitted:
            for share in shares:
                share.charge(1, tokens, micros)
                share.running += 1
        self._forget_idle()
        return worst, [(_left(share.requests), _left(share.tokens)) for share in shares]

    def settle(self, organisation: str, levels: tuple[Level, ...], *, requests: int, tokens: int, micros: int) -> None:
        """The reservation's end: charge what was used beyond it, which may be negative, and free its slots."""
        for level in levels:
            share = self._levels[organisation, level.name, level.id]  # it runs something, so it is there
            assert share.running > 0, "what was not admitted here does not end here"
            share.charge(requests, tokens, micros)
            share.running -= 1

    def _find(self, organisation: str, level: Level, now_us: int) -> _Shares:
        name = (organisation, level.name, level.id)
        share = self._levels.setdefault(name, _Shares())
        share.limit(level.limits, self._share, now_us)
        self._levels.move_to_end(name)
        return share

    def _forget_idle(self) -> None:
        """Those that were asked for longest ago; what is left beyond the bound runs, which the gateway bounds."""
        while len(self._levels) > self._entries_max:
            idle = next((name for name, share in self._levels.items() if not share.running), None)
            if idle is None:
                return
            del self._levels[idle]


def _left(bucket: Bucket | None) -> int:
    return -1 if bucket is None else bucket.left
