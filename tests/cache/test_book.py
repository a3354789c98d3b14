"""
The script against the model, over random interleavings, with a clock that the test sets.

One call of the script is exchanged for the test, `TIME`, for one with a reply of the same form.  Nothing of the
arithmetic is, and production has no way to pass a time.  `test_limits` runs the unchanged script on the server's own
clock against the same model.
"""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from cache.accounts import LIMIT_MAX, Account, Level, LevelName, Limits
from cache.connection import Script, Store
from cache.errors import Unavailable
from cache.limits import SCRIPT, Figures, Limiter, Refusal, Reservation
from cache.redis_url import parse_redis_url
from tests.cache.book import DAY_US, MINUTE_US, NEVER, Auditor, Book, charges, limit_of, wait_us
from tests.cache.book import Level as BookLevel
from tests.cache.conftest import OpenStore
from tests.cache.servers import Server

TIME = "redis.call('TIME')"
assert SCRIPT.source.count(TIME) == 1
CLOCK = "pellucid:test:clock"
CLOCKED = Script(SCRIPT.source.replace(TIME, f"redis.call('HMGET', '{CLOCK}', 's', 'us')"))
SET_CLOCK = Script(
    "redis.call('HSET', KEYS[1], 's', ARGV[1], 'us', ARGV[2]) return {}".replace("KEYS[1]", f"'{CLOCK}'")
)
WORKERS = 3
LEASE_US = 30_000_000
NAMES: tuple[LevelName, ...] = ("organisation", "tenant", "key")
FAR = LIMIT_MAX * 10

few = st.integers(1, 40)
special = st.sampled_from((0, 60, 5_000, 59_999_999, 60_000_001, 150_000_001, 10**9, LIMIT_MAX - 1, LIMIT_MAX))
amounts = st.integers(0, 50) | st.sampled_from((5_000, 10**9, LIMIT_MAX - 1, LIMIT_MAX, FAR))


def mostly(usual: st.SearchStrategy[int], rare: st.SearchStrategy[int | None]) -> st.SearchStrategy[int | None]:
    """Of ten, eight are usual: a book in which nothing is ever admitted shows nothing."""
    return st.integers(0, 9).flatmap(lambda roll: usual if roll < 8 else rare)


limits = st.builds(
    Limits,
    requests_per_minute=mostly(few, st.none() | special),
    tokens_per_minute=mostly(st.integers(10, 200), st.none() | special),
    concurrent=mostly(st.integers(1, 6), st.none() | st.just(0)),
    spend_micros_per_day=mostly(st.integers(50, 300), st.none() | st.sampled_from((0, LIMIT_MAX))),
)
steps_us = (
    st.integers(0, 100)
    | st.integers(0, 5_000_000)
    | st.integers(0, 5_000_000)
    | st.sampled_from((1, 59_999_999, 60_000_000, 29_999_999, 30_000_000, 3_600_000_000, 86_400_000_000))
    | st.integers(-5_000_000, -1)
    | st.just(-3_600_000_000)
)


class Limiting(RuleBasedStateMachine):
    """Three workers, one clock, one account, whose limits change while requests run."""

    runner: asyncio.Runner  # these two are set by the test
    store: Store
    live = Bundle("live")
    ended = Bundle("ended")

    @initialize(chosen=st.lists(limits, min_size=3, max_size=3))
    def begin(self, chosen: list[Limits]) -> None:
        self.now_us = 1_800_000_000_000_000
        self.organisation = f"o-{secrets.token_hex(8)}"
        self.book = Book(len(NAMES), LEASE_US)
        self.auditors = [(Auditor(one.requests_per_minute), Auditor(one.tokens_per_minute)) for one in chosen]
        self._choose(chosen)
        self.workers = [Limiter(self.store, script=CLOCKED, workers=WORKERS, worker=n) for n in range(WORKERS)]
        self._set_clock()

    def _choose(self, chosen: Sequence[Limits]) -> None:
        levels = tuple(Level(name, "one", one) for name, one in zip(NAMES, chosen, strict=True))
        self.account = Account(organisation=self.organisation, levels=levels)
        for one, (of_requests, of_tokens) in zip(chosen, self.auditors, strict=True):
            of_requests.allow(one.requests_per_minute)
            of_tokens.allow(one.tokens_per_minute)

    @rule(which=st.integers(0, 2), one=limits)
    def limits_change(self, which: int, one: Limits) -> None:
        """Those that are running were charged under the old ones."""
        chosen = [level.limits for level in self.account.levels]
        chosen[which] = one
        self._choose(chosen)

    def _set_clock(self) -> None:
        words = [str(self.now_us // 10**6), str(self.now_us % 10**6)]
        self.runner.run(self.store.run(SET_CLOCK, ["{x}"], words))

    @rule(us=steps_us)
    def time_passes(self, us: int) -> None:
        self._pass_time(us)

    @rule(early_us=st.integers(0, 1))
    def time_passes_until_a_lease_ends(self, early_us: int) -> None:
        ends_us = [end for level in self.book.levels for end in level.leases.values() if end > self.now_us]
        if ends_us:
            self._pass_time(max(0, min(ends_us) - self.now_us - early_us))

    @rule(early_us=st.integers(0, 1))
    def time_passes_until_midnight(self, early_us: int) -> None:
        self._pass_time(DAY_US - self.now_us % DAY_US - early_us)

    def _pass_time(self, us: int) -> None:
        self.now_us += us
        self._set_clock()
        for auditor in (auditor for pair in self.auditors for auditor in pair):
            auditor.pass_time(max(0, us))

    @rule(target=live, worker=st.integers(0, WORKERS - 1), tokens=amounts, micros=amounts)
    def reserve_anything(self, worker: int, tokens: int, micros: int) -> object:
        return self._reserve(worker, tokens, micros)

    @rule(target=live, worker=st.integers(0, WORKERS - 1), tokens=st.integers(0, 12), micros=st.integers(0, 9))
    def reserve(self, worker: int, tokens: int, micros: int) -> object:
        return self._reserve(worker, tokens, micros)

    @rule(target=live, us=st.integers(1, 3_000_000), tokens=st.integers(0, 12))
    def reserve_a_little_later(self, us: int, tokens: int) -> object:
        self._pass_time(us)
        return self._reserve(0, tokens, 1)

    def _reserve(self, worker: int, tokens: int, micros: int) -> object:
        before = self._dump()
        answer = self.runner.run(self.workers[worker].reserve(self.account, tokens=tokens, micros=micros))
        name = answer.id if isinstance(answer, Reservation) else "refused"
        if not self.account.limited:
            assert isinstance(answer, Reservation) and answer.source == "unlimited"
            return multiple()
        cut = min(tokens, LIMIT_MAX + 1), min(micros, LIMIT_MAX + 1)
        ways = self.book.reserve(name, self.now_us, *cut, [level.limits for level in self.account.levels])
        note(f"{answer} {ways}")
        if isinstance(answer, Refusal):
            self._check_refusal(answer, ways)
            assert self._dump() == before, "a refusal has written something"
            return multiple()
        assert answer.source == "server" and ways == []
        self._audit(1, cut[0], self.account, admitted=True)
        self._check_figures(answer)
        return answer

    def _check_refusal(self, answer: Refusal, ways: list[tuple[int, str, int]]) -> None:
        waits = {(NAMES[level], limit): us for level, limit, us in ways}
        told = waits[answer.level.name, answer.limit]
        assert answer.can_succeed == (told != NEVER)
        if told == NEVER:
            assert answer.retry_after_ms == 0
            return
        assert NEVER not in waits.values() and told == max(waits.values())
        slack_us = told // 2**51  # of a wait beyond 285 years, a double keeps 52 bits
        assert -(-(told - slack_us) // 1000) <= answer.retry_after_ms <= -(-(told + slack_us + 1) // 1000)

    def _check_figures(self, answer: Reservation) -> None:
        figures = answer.figures
        limited = self._limited_levels()
        requests = [held // 1 for one in limited if (held := one.held["requests"]) is not None]
        tokens = [max(0, held // 1) for one in limited if (held := one.held["tokens"]) is not None]
        assert figures.requests_remaining == min(requests, default=None)
        assert figures.tokens_remaining == min(tokens, default=None)
        for level in limited:
            held, limit = level.held["tokens"], level.limits.tokens_per_minute
            if held is not None and limit is not None and max(0, held // 1) == figures.tokens_remaining:
                full_us = wait_us(held, limit, limit)
                assert figures.tokens_reset_ms is not None
                assert full_us == NEVER or figures.tokens_reset_ms >= (full_us - full_us // 2**51) // 1000

    def _limited_levels(self) -> list[BookLevel]:
        """Of the model, those that the account limits now."""
        return [
            mine for mine, level in zip(self.book.levels, self.account.levels, strict=True) if charges(level.limits)
        ]

    @rule(
        target=ended,
        reservation=consumes(live),
        worker=st.integers(0, WORKERS - 1),
        tokens=amounts,
        micros=st.integers(0, 60),
        whole=st.booleans(),
    )
    def settle(self, reservation: Reservation, worker: int, tokens: int, micros: int, whole: bool) -> Reservation:
        limiter = self.workers[worker]
        if whole:
            done = self.runner.run(limiter.refund(reservation))
            tokens = micros = 0
        else:
            done = self.runner.run(limiter.settle(reservation, tokens=tokens, micros=micros))
        tokens = min(tokens, LIMIT_MAX)
        reserved = self.book.reserved[reservation.id][0]
        assert done and self.book.settle(reservation.id, self.now_us, tokens, micros, whole=whole)
        self._audit(-1 if whole else 0, tokens - reserved, reservation.account)
        return reservation

    @rule(target=ended, reservation=consumes(live))
    def a_late_answer_is_void(self, reservation: Reservation) -> Reservation:
        self._void(reservation)
        self._audit(-1, -reservation.tokens, reservation.account)
        return reservation

    @rule(reservation=ended)
    def void_again(self, reservation: Reservation) -> None:
        self._void(reservation)

    def _void(self, reservation: Reservation) -> None:
        before = self._dump() if reservation.id not in self.book.reserved else None
        self.runner.run(self._give_back(reservation))
        self.book.void(reservation.id, self.now_us)
        assert before is None or self._dump() == before

    async def _give_back(self, reservation: Reservation) -> None:
        self.workers[0].give_back(reservation)
        async with asyncio.timeout(20):
            while self.workers[0].owed:
                await asyncio.sleep(0)

    @rule(target=ended, tokens=st.integers(0, 12))
    def void_before_it_arrives(self, tokens: int) -> object:
        """The command was held up on its way, and what gives it back was not."""
        name = secrets.token_hex(12)
        worker = Limiter(self.store, script=CLOCKED, new_id=lambda: name)
        late = Reservation(id=name, account=self.account, tokens=tokens, micros=0, figures=Figures(), source="server")
        self._void(late)
        before = self._dump()
        try:
            assert isinstance(self.runner.run(worker.reserve(self.account, tokens=tokens)), Refusal)
        except Unavailable as error:
            assert "void" in str(error)
        assert self._dump() == before
        return late

    @rule(reservation=ended, tokens=amounts)
    def settle_again(self, reservation: Reservation, tokens: int) -> None:
        before = self._dump()
        assert not self.runner.run(self.workers[0].settle(reservation, tokens=tokens))
        assert not self.runner.run(self.workers[1].refund(reservation))
        assert not self.runner.run(self.workers[2].renew(reservation))
        assert self._dump() == before

    @rule(reservation=live)
    def renew(self, reservation: Reservation) -> None:
        assert self.runner.run(self.workers[0].renew(reservation)) == self.book.renew(reservation.id, self.now_us)

    @rule(reservation=consumes(live))
    def crash(self, reservation: Reservation) -> None:
        """Its worker will never settle it."""

    def _audit(self, requests: int, tokens: int, account: Account, *, admitted: bool = False) -> None:
        for level, (of_requests, of_tokens) in zip(account.levels, self.auditors, strict=True):
            if level.limits.requests_per_minute is not None:
                of_requests.charge(requests)
            if level.limits.tokens_per_minute is not None:
                of_tokens.charge(tokens)
            if admitted:
                of_requests.check()
                of_tokens.check()

    def _dump(self) -> list[bytes]:
        """All that the server holds of the account."""
        return self.runner.run(self.store.run(DUMP, self._keys(), []))

    def _keys(self) -> list[str]:
        prefix = f"pellucid:{{{self.organisation}}}"
        return [f"{prefix}:{kind}:{name}:one" for name in NAMES for kind in ("limits", "leases")]

    @invariant()
    def the_servers_leases_are_the_models(self) -> None:
        if not hasattr(self, "account"):
            return
        counted = self.runner.run(self.store.run(COUNT, self._keys()[1::2], [f"({self.now_us}"]))
        assert [int(number) for number in counted] == [level.running(self.now_us) for level in self.book.levels]

    @invariant()
    def the_servers_buckets_are_the_models(self) -> None:
        """To the last part of a token: a rounding that adds up over a day would not show in one answer."""
        if not hasattr(self, "account"):
            return
        held = self.runner.run(self.store.run(GET, self._keys()[0::2], []))
        for words, level in zip(held, self.book.levels, strict=True):
            if level.touched_us is None:
                assert not words
                continue
            numbers = list(map(int, words.split()))
            assert numbers[0] == level.touched_us
            for place, kind in ((1, "requests"), (3, "tokens")):
                shown = numbers[place] + Fraction(numbers[place + 1], MINUTE_US)
                assert level.held[kind] is None or shown == level.held[kind]
            assert numbers[5:7] == [level.day, level.spent]
            for shown_limit, kind in zip(numbers[7:], ("requests", "tokens"), strict=True):
                limit = limit_of(level.limits, kind)
                assert shown_limit == (-1 if limit is None else limit)

    def teardown(self) -> None:
        if not hasattr(self, "account"):
            return
        expiries = [expiry for level in self.book.levels for expiry in level.leases.values()]
        self.now_us = max([self.now_us, *expiries])  # whatever has crashed: all leases end by themselves
        self.the_servers_leases_are_the_models()
        assert not any(level.running(self.now_us) for level in self.book.levels)


SETTINGS = settings(
    max_examples=70,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking takes minutes; what fails is printed step by step
)
GET = Script("local all = {} for i, key in ipairs(KEYS) do all[i] = redis.call('GET', key) or '' end return all")
DUMP = Script("local all = {} for i, key in ipairs(KEYS) do all[i] = redis.call('DUMP', key) or '' end return all")
COUNT = Script(
    "local all = {} for i, key in ipairs(KEYS) do "
    "all[i] = tostring(redis.call('ZCOUNT', key, ARGV[1], '+inf')) end return all"
)


@pytest.fixture(params=["valkey", "debian_redis"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    yield request.getfixturevalue(request.param)


def test_the_script_does_what_the_model_does(server: Server) -> None:
    async def open_store() -> Store:
        return Store(parse_redis_url(server.url), connect_timeout_ms=30_000, command_timeout_ms=30_000)

    class Here(Limiting):
        pass

    with asyncio.Runner() as Here.runner:
        Here.store = Here.runner.run(open_store())
        run_state_machine_as_test(Here, settings=SETTINGS)
        Here.runner.run(Here.store.aclose())


async def test_a_lease_ends_at_its_end_and_not_a_microsecond_later(valkey: Server, open_store: OpenStore) -> None:
    store = open_store(valkey.url)
    limiter = Limiter(store, script=CLOCKED)
    account = Account(organisation=f"o-{secrets.token_hex(8)}", levels=(Level("key", "one", Limits(concurrent=1)),))
    for us, admitted in ((0, True), (LEASE_US - 1, False), (LEASE_US, True)):
        await store.run(SET_CLOCK, ["{x}"], [str(1_900_000_000 + us // 10**6), str(us % 10**6)])
        answer = await limiter.reserve(account, tokens=1)
        assert isinstance(answer, Reservation) == admitted, answer
