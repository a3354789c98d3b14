"""The breaker of an upstream: a state machine that cannot be wedged, over random histories."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.upstream_breaker import NS_PER_S, Breaker

FAILURES_MAX = 3
PAUSE_MAX_NS = 8 * NS_PER_S


def opened() -> Breaker:
    """At time 0, after as many failures as it takes."""
    breaker = Breaker(failures_max=FAILURES_MAX, pause_max_ns=PAUSE_MAX_NS)
    assert [breaker.failed(0) for _ in range(FAILURES_MAX)] == [False, False, True]
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(failures_max=FAILURES_MAX)
    for _ in range(10):
        assert not breaker.failed(0) and not breaker.failed(0)
        breaker.answered()
        breaker.completed()
    assert breaker.admits(0)


def test_one_request_tries_after_the_pause_and_the_pause_doubles() -> None:
    breaker, now_ns = opened(), 0
    for pause_s in (1, 2, 4, 8, 8):
        assert not breaker.admits(now_ns + pause_s * NS_PER_S - 1)
        now_ns += pause_s * NS_PER_S
        trial = breaker.began(now_ns)
        assert trial and not breaker.admits(now_ns)
        assert not breaker.failed(now_ns, trial)
    breaker.probed(now_ns)
    assert breaker.admits(now_ns)
    breaker.began(now_ns)
    assert breaker.answered() and breaker.admits(now_ns)


def test_a_trial_that_takes_long_does_not_hold_up_all_others() -> None:
    breaker, tried_s = opened(), []
    for now_s in range(60):
        if breaker.admits(now_s * NS_PER_S):
            breaker.began(now_s * NS_PER_S)
            tried_s.append(now_s)
    assert tried_s == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56]


def test_only_the_newest_trial_has_a_say() -> None:
    breaker = opened()
    first = breaker.began(NS_PER_S)
    second = breaker.began(2 * NS_PER_S)
    breaker.failed(3 * NS_PER_S, first)
    breaker.abandoned(first)
    assert not breaker.admits(4 * NS_PER_S - 1) and breaker.admits(4 * NS_PER_S)
    breaker.failed(3 * NS_PER_S, second)
    assert not breaker.admits(7 * NS_PER_S - 1) and breaker.admits(7 * NS_PER_S)


def test_answers_that_begin_well_and_break_off_open_it_again_at_once() -> None:
    breaker = opened()
    trial = breaker.began(NS_PER_S)
    assert breaker.answered()
    assert breaker.failed(NS_PER_S, trial)


def test_a_client_that_leaves_frees_the_place_of_the_trial() -> None:
    breaker = opened()
    trial = breaker.began(NS_PER_S)
    breaker.abandoned(trial)
    assert breaker.admits(NS_PER_S)


@pytest.mark.parametrize("late", ["failed", "abandoned"])
def test_news_of_another_request_do_not_end_a_trial(late: str) -> None:
    breaker = opened()
    breaker.began(NS_PER_S)
    if late == "failed":
        breaker.failed(NS_PER_S, 0)
    else:
        breaker.abandoned(0)
    assert not breaker.admits(NS_PER_S)


class Histories(RuleBasedStateMachine):
    """Requests begin, are answered, end in any way, late or not; probes come in between."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(failures_max=FAILURES_MAX, pause_max_ns=PAUSE_MAX_NS)
        self.now_ns = 0
        self.running: list[int] = []
        self.in_a_row = 0

    @rule(seconds=st.integers(0, 10))
    def time_passes(self, seconds: int) -> None:
        self.now_ns += seconds * NS_PER_S

    @precondition(lambda self: self.breaker.admits(self.now_ns))
    @rule()
    def a_request_begins(self) -> None:
        was_open = self.breaker.is_open
        trial = self.breaker.began(self.now_ns)
        assert bool(trial) == was_open
        self.running.append(trial)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(("answered", "completed", "failed", "abandoned")))
    def a_request_gets_on(self, data: st.DataObject, how: str) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        if how == "answered":
            self.breaker.answered()
            return
        trial = self.running.pop(index)
        if how == "completed":
            self.breaker.answered()
            self.breaker.completed()
            self.in_a_row = 0
        elif how == "failed":
            self.breaker.failed(self.now_ns, trial)
            self.in_a_row += 1
        else:
            self.breaker.abandoned(trial)

    @rule(good=st.booleans())
    def a_probe(self, good: bool) -> None:
        if good:
            self.breaker.probed(self.now_ns)
        else:
            self.breaker.failed(self.now_ns)
            self.in_a_row += 1

    @invariant()
    def it_is_open_only_after_failures(self) -> None:
        assert not self.breaker.is_open or self.in_a_row >= FAILURES_MAX

    @invariant()
    def it_heals(self) -> None:
        assert self.breaker.admits(self.now_ns + PAUSE_MAX_NS)


Histories.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestHistories = Histories.TestCase
