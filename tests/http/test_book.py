"""
The gateway's half of the latency book closes, with any engine book and without one.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.book import Book, Told
from gateway.calls import Life
from gateway.spent import stalled_for
from telemetry.records import RequestRecord


def engine_book(accepted_ns: int, finished_ns: int, *, decode_ns: int) -> RequestRecord:
    states = {"prefill": finished_ns - accepted_ns - decode_ns, "decode": decode_ns}
    return RequestRecord(request_id="r", accepted_ns=accepted_ns, finished_ns=finished_ns, states=states)


def test_one_clock_gives_every_state_its_own_time() -> None:
    book = Book(100)
    book.enter("tokenize", 110)
    book.dispatched(130)
    book.wrote(400, 450, blocked=True)  # the engine has the request, so this does not count
    book.engine_done(520)
    book.wrote(530, 560, blocked=False)
    book.wrote(560, 660, blocked=True)
    book.enter("finalize", 660)
    states = book.close(700, Told(engine_book(160, 500, decode_ns=240), 170, True, ()))
    assert states == {
        "parse": 10,
        "tokenize": 20,
        "dispatch": 30,
        "prefill": 100,
        "decode": 240,
        "deliver": 20,
        "detokenize": 10,
        "send": 30,
        "send_blocked": 100,
        "finalize": 40,
    }
    assert sum(states.values()) == 600


def test_a_write_that_was_blocked_when_the_engine_finished_counts_from_then_on() -> None:
    book = Book(0)
    book.dispatched(0)
    book.engine_done(50)
    book.wrote(20, 90, blocked=True)
    assert book.close(90, Told(engine_book(10, 40, decode_ns=5), 12, True, ()))["send_blocked"] == 40


def test_other_clocks_lend_their_durations_only() -> None:
    book = Book(0)
    book.dispatched(10)
    book.engine_done(110)
    states = book.close(120, Told(engine_book(10_000, 10_060, decode_ns=20), 15, False, ()))
    assert states == {"parse": 10, "dispatch": 40, "prefill": 40, "decode": 20, "detokenize": 10}


def test_without_an_engine_book_the_time_is_dispatch_and_deliver() -> None:
    book = Book(0)
    book.dispatched(10)
    assert book.close(100, Told(None, 30, True, ())) == {"parse": 10, "dispatch": 20, "deliver": 70}


def test_a_request_that_never_left_has_only_gateway_states() -> None:
    book = Book(0)
    book.wrote(10, 15, blocked=False)
    book.enter("finalize", 15)
    assert book.close(20, Told(None, 0, True, ())) == {"parse": 10, "send": 5, "finalize": 5}


_gap = st.integers(0, 50)


@given(
    gaps=st.lists(_gap, min_size=8, max_size=8),
    engine=st.tuples(st.integers(0, 400), st.integers(0, 400)) | st.none(),
    done=st.booleans(),
    one_clock=st.booleans(),
    blocked=st.booleans(),
)
def test_it_always_sums(
    gaps: list[int], engine: tuple[int, int] | None, done: bool, one_clock: bool, blocked: bool
) -> None:
    times = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    book = Book(0)
    book.enter("tokenize", times[0])
    book.dispatched(times[1])
    book.guess("prefill", times[2])
    book.guess("decode", times[1])  # out of order, as with several sequences
    if done:
        book.engine_done(times[3])
    book.wrote(times[2], times[4], blocked=blocked)
    book.wrote(times[4], times[5], blocked=not blocked)
    book.enter("finalize", times[6])
    record = engine_book(min(engine), max(engine), decode_ns=0) if engine else None
    states = book.close(times[7], Told(record, times[2], one_clock, ()))
    assert sum(states.values()) == times[7]
    assert all(spent_ns >= 0 for spent_ns in states.values())


def test_an_engine_book_that_does_not_close_is_left_out() -> None:
    book = Book(0)
    book.dispatched(10)
    book.engine_done(90)
    broken = RequestRecord(request_id="r", accepted_ns=20, finished_ns=80, states={"decode": 1})
    states = book.close(100, Told(broken, 30, True, ()))
    assert sum(states.values()) == 100
    assert "decode" not in states


@pytest.mark.parametrize("accepted_ns", [0, 30, 10_000])
def test_any_stamp_of_acceptance_is_survived(accepted_ns: int) -> None:
    book = Book(0)
    book.dispatched(10)
    book.engine_done(90)
    assert sum(book.close(100, Told(None, accepted_ns, True, ())).values()) == 100


@given(
    gaps=st.lists(_gap, min_size=9, max_size=9),
    engine=st.tuples(st.integers(0, 400), st.integers(0, 400)) | st.none(),
    one_clock=st.booleans(),
    lives=st.integers(0, 2),
    first=st.integers(2, 8),
)
def test_the_way_to_the_first_token_sums_too(
    gaps: list[int], engine: tuple[int, int] | None, one_clock: bool, lives: int, first: int
) -> None:
    """In whatever life it came, and whatever is known of that life."""
    times = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    book = Book(0)
    book.enter("tokenize", times[0])
    book.dispatched(times[1])
    lost = tuple(Life(times[1 + life], times[2 + life], times[3 + life], True) for life in range(lives))
    record = engine_book(min(engine), max(engine), decode_ns=0) if engine else None
    if record is not None and record.finished_ns > record.accepted_ns:
        first_ns = record.finished_ns - record.accepted_ns
        record = msgspec.structs.replace(record, first_token_ns=first_ns, first_token_states={"prefill": first_ns})
    told = Told(record, times[6], one_clock, lost)
    states = book.until_first_token(times[first], told)
    assert sum(states.values()) == times[first]
    assert all(spent_ns >= 0 for spent_ns in states.values())
    assert sum(book.close(times[8], told).values()) == times[8]


@pytest.mark.parametrize("joined", [True, False])
def test_who_was_served_instead_is_said_of_the_book_that_counts(joined: bool) -> None:
    """Of several sequences the last one's; of one whose book was lost with its engine, or does not close, nobody's."""
    book = Book(0)
    book.dispatched(10)
    record = RequestRecord(
        request_id="r", accepted_ns=20, finished_ns=90 if joined else 91, states={"stalled": 50, "decode": 20},
        stalled_for={"a#1-0": 30, "a#1-1": 15, "": 5},
    )  # fmt: skip
    book.engine_done(100)
    states = book.close(120, Told(record, 30, True, ()))
    told = stalled_for(states, record)
    assert told == ({"a": 45, "": 5} if joined else {})
    assert sum(told.values()) == states.get("stalled", 0)
    assert stalled_for(states, None) == {}
