"""
The arithmetic of the records: the KV book, the step book and the latency book.
"""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from telemetry.records import ENGINE_STATES, GATEWAY_STATES, STEP_PARTS, KvBook, RequestRecord, StepRecord

BLOCK_SLOTS = 16
slots = st.integers(0, 10**9)


def test_a_gauge_of_blocks_would_hide_what_the_book_shows() -> None:
    """16 prompts of 17 tokens, half of them one token further, in a pool of 48 blocks."""
    filled = 8 * 17 + 8 * 18
    held = 16 * 2 * BLOCK_SLOTS
    book = KvBook(total=48 * BLOCK_SLOTS, free=16 * BLOCK_SLOTS, filled=filled, tail=held - filled)
    assert book.imbalance() == 0
    assert round(100 * book.utilization, 1) == 66.7
    assert round(100 * book.token_occupancy, 1) == 36.5
    assert round(100 * book.internal_fragmentation, 1) == 45.3


def test_one_prompt_of_17_tokens_leaves_15_slots_empty() -> None:
    book = KvBook(total=32, filled=17, tail=15)
    assert (book.imbalance(), book.utilization) == (0, 1.0)
    assert book.internal_fragmentation == 15 / 32


def test_an_empty_pool_has_readings_and_no_division_by_zero() -> None:
    book = KvBook()
    readings = (book.imbalance(), book.utilization, book.token_occupancy, book.internal_fragmentation)
    assert readings == (0, 0.0, 0.0, 0.0)


@given(places=st.tuples(slots, slots, slots, slots, slots, slots), lost=st.integers(-1000, 1000))
def test_the_kv_book_reports_exactly_what_it_has_lost(places: tuple[int, ...], lost: int) -> None:
    book = KvBook(sum(places) + lost, *places)
    assert book.imbalance() == lost
    if lost == 0:
        assert 0 <= book.utilization <= 1
        assert 0 <= book.token_occupancy <= 1
        assert 0 <= book.internal_fragmentation <= 1


@given(parts=st.dictionaries(st.sampled_from(STEP_PARTS), st.integers(0, 2**50)), lost=st.integers(-1000, 1000))
def test_the_step_book_reports_exactly_what_it_has_lost(parts: dict[str, int], lost: int) -> None:
    record = StepRecord(step_id=1, ended_ns=0, step_ns=sum(parts.values()) + lost, parts=parts)
    assert record.imbalance() == lost


@given(
    states=st.dictionaries(st.sampled_from(ENGINE_STATES + GATEWAY_STATES), st.integers(0, 2**50)),
    accepted_ns=st.integers(0, 2**62),
    lost=st.integers(-1000, 1000),
)
def test_the_latency_book_reports_exactly_what_it_has_lost(states: dict[str, int], accepted_ns: int, lost: int) -> None:
    finished_ns = accepted_ns + sum(states.values()) + lost
    record = RequestRecord(request_id="r", accepted_ns=accepted_ns, finished_ns=finished_ns, states=states)
    assert record.imbalance() == lost


def test_records_survive_the_line_between_processes() -> None:
    request = RequestRecord(request_id="r", accepted_ns=1, finished_ns=2**62, states={"decode": 2**62 - 1})
    step = StepRecord(
        step_id=7, ended_ns=5, step_ns=3, parts={"compute": 3}, kv=KvBook(32, 0, 0, 17, 15), finished=(request,)
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=StepRecord) == step


def test_no_state_is_both_the_engines_and_the_gateways() -> None:
    assert not set(ENGINE_STATES) & set(GATEWAY_STATES)
    assert len(set(ENGINE_STATES + GATEWAY_STATES)) == len(ENGINE_STATES) + len(GATEWAY_STATES)
