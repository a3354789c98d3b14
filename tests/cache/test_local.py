"""Local shares: exact, together no more than the whole, bounded."""

from hypothesis import given
from hypothesis import strategies as st

from cache.accounts import Level, Limits
from cache.local import LocalLimits, Share
from tests.cache.book import Auditor

steps = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5_000_000), st.integers(0, 6), st.booleans()), min_size=1, max_size=60
)


@given(st.integers(1, 4), st.integers(0, 30), st.integers(0, 60), st.none() | st.integers(0, 6), steps)
def test_all_workers_together_keep_the_book(
    workers: int, requests: int, tokens: int, slots: int | None, todo: list[tuple[int, int, int, bool]]
) -> None:
    levels = (
        Level("tenant", "t", Limits(requests_per_minute=requests, tokens_per_minute=tokens)),
        Level("key", "k", Limits(concurrent=slots)),
    )
    every = [LocalLimits(workers=workers, worker=worker) for worker in range(workers)]
    of_requests, of_tokens = Auditor(requests), Auditor(tokens)
    now_us, running = 10**15, [0] * workers
    for local in every:
        local.reserve("o", levels, tokens=10**9, micros=0, now_us=now_us)  # its buckets begin here, all of them full
    for worker, us, amount, ends in todo:
        worker %= workers
        now_us += us
        of_requests.pass_time(us)
        of_tokens.pass_time(us)
        verdict, left = every[worker].reserve("o", levels, tokens=amount, micros=0, now_us=now_us)
        if not verdict.admitted:
            assert verdict.wait_us != 0 and verdict.limit in ("requests", "tokens", "concurrent")
            continue
        assert left[1] == (-1, -1)
        of_requests.charge(1)
        of_tokens.charge(amount)
        of_requests.check()
        of_tokens.check()
        running[worker] += 1
        assert slots is None or sum(running) <= slots
        if ends:
            every[worker].settle("o", levels, requests=0, tokens=0, micros=0)
            running[worker] -= 1


@given(st.integers(0, 10**15), st.integers(1, 64))
def test_the_shares_add_up(limit: int, workers: int) -> None:
    shares = [Share(workers, worker).of(limit) for worker in range(workers)]
    assert sum(share for share in shares if share is not None) == limit
    assert Share(workers, 0).of(None) is None


@given(st.integers(1, 10**15), st.integers(1, 10**15), st.integers(0, 10**9))
def test_a_wait_is_long_enough_and_no_longer(limit: int, wanted: int, spent: int) -> None:
    levels = (Level("key", "k", Limits(tokens_per_minute=limit)),)
    local = LocalLimits(workers=1, worker=0)
    local.reserve("o", levels, tokens=min(spent, limit), micros=0, now_us=0)
    verdict, _ = local.reserve("o", levels, tokens=wanted, micros=0, now_us=0)
    if wanted > limit:
        assert verdict.wait_us == -1
    elif not verdict.admitted:
        early, _ = local.reserve("o", levels, tokens=wanted, micros=0, now_us=verdict.wait_us - 1)
        assert not early.admitted
        assert local.reserve("o", levels, tokens=wanted, micros=0, now_us=verdict.wait_us)[0].admitted


def test_it_is_bounded_and_forgets_the_idle_first() -> None:
    local = LocalLimits(workers=1, worker=0, entries_max=3)
    limits = Limits(requests_per_minute=1)

    def ask(name: str) -> bool:
        return local.reserve("o", (Level("key", name, limits),), tokens=0, micros=0, now_us=0)[0].admitted

    assert [ask("busy"), ask("busy")] == [True, False]
    for number in range(10):
        assert ask(str(number))
        local.settle("o", (Level("key", str(number), limits),), requests=0, tokens=0, micros=0)
    assert not ask("busy"), "it runs, so it is kept"
    assert ask("0"), "it was forgotten: full again"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 40)), min_size=1, max_size=40),
    st.lists(st.integers(0, 50) | st.none(), min_size=4, max_size=4),
)
def test_limits_and_shares_that_change_give_nothing_for_it(
    todo: list[tuple[int, int, int]], limits: list[int | None]
) -> None:
    """Of two keys with one tenant, one may have been looked up before the tenant changed: each in turn, for hours."""
    local, running, admitted = LocalLimits(workers=1, worker=0), 0, 0
    most = max((limit for limit in limits if limit is not None), default=0)
    for which, workers, tokens in todo:
        local.share_with(workers=workers, worker=0)
        level = Level("tenant", "t", Limits(tokens_per_minute=limits[which], concurrent=1000))
        verdict, _ = local.reserve("o", (level,), tokens=tokens, micros=0, now_us=0)
        running += verdict.admitted
        if limits[which] is None:
            admitted = 0  # without a limit between, the bucket begins anew
        else:
            admitted += tokens if verdict.admitted else 0
        assert admitted <= most
    for _ in range(running):
        local.settle("o", (Level("tenant", "t", Limits()),), requests=0, tokens=0, micros=0)
