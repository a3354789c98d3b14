"""
The hub: what producers may rely on (never slow, never raising) and what readers may (everything put before is seen).
"""

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry import clock, hub
from telemetry.hub import Hub, LiveRequest
from telemetry.ledger import Ledger
from telemetry.recent import REPLICAS_MAX
from telemetry.records import KvBook, RequestRecord, StepRecord
from telemetry.views import Json, JsonObject
from telemetry.vocabulary import OBSERVING_ROUTES
from tests.contract.telemetry.records_strategy import MODEL, interconnect_json, request_records, step_records
from tests.contract.telemetry.test_metrics import read, total

CHAT = "/v1/chat/completions"
BOOK = KvBook(total=768, free=256, filled=280, tail=232)


@pytest.fixture(autouse=True)
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")


@pytest.fixture
async def running() -> AsyncIterator[Hub]:
    started = Hub(model=MODEL, version="0.1.0")
    await started.start()
    yield started
    await started.stop()


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000_000

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(clock, "now_ns", moved)
    return moved


def a_step(**changes: object) -> StepRecord:
    step = StepRecord(step_id=1, ended_ns=10, step_ns=10, parts={"plan": 1, "compute": 9}, running=2, kv=BOOK)
    return msgspec.structs.replace(step, **changes)


def a_record(**changes: object) -> RequestRecord:
    record = RequestRecord(
        request_id="r1", outcome="stop", accepted_ns=0, finished_ns=9, states={"decode": 9}, route=CHAT, model=MODEL
    )
    return msgspec.structs.replace(record, **changes)


def rows(answer: JsonObject, name: str) -> list[JsonObject]:
    """The list under that name, its rows as objects."""
    found = answer[name]
    assert isinstance(found, list)
    return [_object(row) for row in found]


def _object(value: Json) -> JsonObject:
    assert isinstance(value, dict)
    return value


def test_a_reader_sees_all_that_was_put_before_without_any_task_running() -> None:
    quiet = Hub(model=MODEL)
    quiet.request(a_record())
    quiet.step(a_step())
    assert len(rows(quiet.debug_requests(), "requests")) == 1
    assert len(rows(quiet.debug_steps(), "steps")) == 1
    assert total(read(quiet.metrics_text()[0]), "pellucid_requests_total") == 1


async def test_a_request_in_flight_is_listed_with_its_states_so_far(at: Clock) -> None:
    listening = Hub(model=MODEL)
    ledger = Ledger("parse", at.ns)
    live = LiveRequest(request_id="r1", ledger=ledger, tenant="blue", model=MODEL, route=CHAT, stream=True)
    listening.request_opened(live)
    ledger.enter("dispatch", at.ns + 5)
    live.output_tokens = 3
    at.ns += 12
    [shown] = listening.debug_request("r1")
    assert shown["outcome"] is None
    assert shown["states"] == {"parse": 5, "dispatch": 7}
    assert (shown["e2e_ns"], shown["state"], shown["output_tokens"]) == (12, "dispatch", 3)
    assert total(read(listening.metrics_text()[0]), "pellucid_requests_live", route=CHAT) == 1
    listening.request(
        a_record(accepted_ns=ledger.opened_ns, finished_ns=at.ns, states=ledger.spent(at.ns), outcome="client_gone")
    )
    [closed] = listening.debug_request("r1")
    assert (closed["outcome"], closed["e2e_ns"]) == ("client_gone", 12)
    assert len(rows(listening.debug_requests(), "requests")) == 1
    assert total(read(listening.metrics_text()[0]), "pellucid_requests_live") == 0


def test_requests_come_newest_first_and_no_more_than_asked_for(at: Clock) -> None:
    listening = Hub()
    for number in range(5):
        listening.request(a_record(request_id=f"r{number}", accepted_ns=number * 10, finished_ns=number * 10 + 9))
    listening.request_opened(LiveRequest(request_id="live", ledger=Ledger("parse", 25)))
    shown = [row["request_id"] for row in rows(listening.debug_requests(4), "requests")]
    assert shown == ["r4", "r3", "live", "r2"]
    assert rows(listening.debug_requests(-1), "requests") == []
    assert listening.debug_request("nobody") == []


@settings(max_examples=40, deadline=None)
@given(records=st.lists(request_records(), max_size=5), steps=st.lists(step_records(), max_size=5))
def test_the_debug_answers_keep_their_shape(records: list[RequestRecord], steps: list[StepRecord]) -> None:
    listening = Hub()
    for record in records:
        listening.request(record)
    for step in steps:
        listening.step(step)
    requests = rows(listening.debug_requests(), "requests")
    assert len(requests) == sum(record.route not in OBSERVING_ROUTES for record in records)
    for row in requests:
        wanted = {"request_id", "tenant", "outcome", "e2e_ns", "states"}
        assert wanted | {"prompt_tokens", "cached_tokens", "output_tokens"} <= row.keys()
        assert sum(_object(row["states"]).values()) == row["e2e_ns"]  # type: ignore[arg-type]
    shown_steps = rows(listening.debug_steps(), "steps")
    assert [row["step_id"] for row in shown_steps] == [step.step_id for step in reversed(steps)]
    for row, step in zip(shown_steps, reversed(steps), strict=True):
        assert {"step_id", "replica", "step_ns", "parts", "tokens", "sequences", "interconnect"} <= row.keys()
        assert row["interconnect"] == interconnect_json(step)
    kv = listening.debug_kv()
    latest = {step.replica: step.kv for step in steps}
    slots = _object(kv["slots"])
    assert list(slots) == ["total", "free", "cached_idle", "filled", "tail", "lookahead", "fenced"]
    assert slots["total"] == sum(book.total for book in latest.values())
    assert {"blocks", "utilization", "token_occupancy", "internal_fragmentation"} <= kv.keys()
    assert len(_object(kv.get("replicas", {}))) == (len(latest) if len(latest) > 1 else 0)
    msgspec.json.encode([requests, shown_steps, kv])


def test_the_kv_answer_of_one_replica_is_its_book() -> None:
    listening = Hub()
    listening.step(a_step())
    kv = listening.debug_kv()
    assert kv["slots"] == msgspec.structs.asdict(BOOK)
    assert kv["blocks"] == {"total": 48, "free": 16, "cached_idle": 0, "held": 32, "fenced": 0}
    assert kv["utilization"] == BOOK.utilization
    assert kv["token_occupancy"] == BOOK.token_occupancy
    assert kv["internal_fragmentation"] == BOOK.internal_fragmentation
    assert kv["imbalance_slots"] == 0


@pytest.mark.parametrize(
    ("record", "book"),
    [
        (a_record(finished_ns=10), "latency"),
        (a_record(finished_ns=8), "latency"),
        (a_record(states={"decode": 10, "send": -1}), "latency"),
        (a_record(prompt_tokens=5, computed_tokens=4, steps=1), "token"),
        (a_record(prompt_tokens=5, computed_tokens=4, cached_tokens=2, outcome="abort"), "token"),
        (a_record(prompt_tokens=5, computed_tokens=4, steps=1, choices=3), "token"),
        (a_record(prompt_tokens=5, computed_tokens=11, cached_tokens=5, choices=3), "token"),
        (a_record(prompt_tokens=5, computed_tokens=11, cached_tokens=5, choices=3, outcome="abort"), "token"),
        (a_record(prompt_tokens=5, cached_tokens=6, upstream="far"), "token"),
        (a_record(drafted_tokens=3, draft_accepted_tokens=1, draft_rejected_tokens=1), "token"),
        (a_record(prompt_tokens=5, computed_tokens=5, steps=1, reserved_tokens=9, charged_tokens=4), "limit"),
        (a_record(prompt_tokens=5, computed_tokens=5, steps=1, reserved_tokens=9, charged_tokens=6), "limit"),
        (a_record(prompt_tokens=5, computed_tokens=5, steps=1, charged_tokens=5), "limit"),
        (a_record(prompt_tokens=5, outcome="abort", reserved_tokens=9, charged_tokens=6), "limit"),
        (a_step(step_ns=11), "step"),
        (a_step(kv=KvBook(total=768, free=255, filled=280, tail=232)), "kv"),
        (a_step(drafted_tokens=1), "token"),
        (a_step(finished=(a_record(finished_ns=10),)), "latency"),
    ],
)
def test_a_book_that_does_not_close_is_counted_and_logged(
    record: RequestRecord | StepRecord, book: str, caplog: pytest.LogCaptureFixture
) -> None:
    listening = Hub()
    put = listening.step if isinstance(record, StepRecord) else listening.request
    with caplog.at_level(logging.ERROR, "pellucid.telemetry"):
        for _ in range(3):
            put(record)  # type: ignore[arg-type]
        series = read(listening.metrics_text()[0])
    assert total(series, "pellucid_book_mismatches_total", book=book) == 3
    assert total(series, "pellucid_book_mismatches_total") == 3
    assert len(caplog.records) == 1, "once a minute for each kind"


@settings(max_examples=40, deadline=None)
@given(records=st.lists(request_records(), max_size=5), steps=st.lists(step_records(), max_size=5))
def test_books_that_close_count_nothing(records: list[RequestRecord], steps: list[StepRecord]) -> None:
    listening = Hub()
    for record in records:
        listening.request(record)
    for step in steps:
        listening.step(step)
    assert total(read(listening.metrics_text()[0]), "pellucid_book_mismatches_total") == 0


def test_several_choices_may_pay_for_one_prompt_several_times() -> None:
    listening = Hub()
    for computed_tokens in (3, 5, 13):
        listening.request(a_record(prompt_tokens=5, computed_tokens=computed_tokens, cached_tokens=2, choices=3))
    assert total(read(listening.metrics_text()[0]), "pellucid_book_mismatches_total") == 0


def test_a_prompt_cut_short_or_never_sent_to_the_engine_is_no_mismatch() -> None:
    listening = Hub()
    listening.request(a_record(outcome="abort", prompt_tokens=100, computed_tokens=40, steps=2))
    listening.request(a_record(outcome="length", prompt_tokens=100))  # Echo alone.
    assert total(read(listening.metrics_text()[0]), "pellucid_book_mismatches_total") == 0


def test_a_complaint_is_made_once_a_minute(at: Clock, caplog: pytest.LogCaptureFixture) -> None:
    listening = Hub()
    with caplog.at_level(logging.ERROR, "pellucid.telemetry"):
        for seconds in (0, 59, 61):
            at.ns += seconds * 1_000_000_000
            listening.step(a_step(step_ns=11))
            listening.debug_steps()
    assert len(caplog.records) == 2
    assert "(1 more held back)" in caplog.records[1].getMessage()


def test_a_full_sink_drops_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "RECORDS_MAX", 4)
    listening = Hub()
    for number in range(10):
        listening.request(a_record(request_id=str(number)))
    series = read(listening.metrics_text()[0])
    assert total(series, "pellucid_telemetry_drops_total", reason="sink_full") == 6
    assert total(series, "pellucid_requests_total") == 4


def test_a_dropped_record_does_not_leave_its_request_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "RECORDS_MAX", 1)
    listening = Hub()
    listening.step(a_step())
    listening.request_opened(LiveRequest(request_id="r1", ledger=Ledger("parse", 0)))
    listening.request(a_record())
    assert listening.debug_request("r1") == []


def test_too_many_requests_in_flight_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "LIVE_MAX", 2)
    listening = Hub()
    for number in range(5):
        listening.request_opened(LiveRequest(request_id=str(number), ledger=Ledger("parse", 0)))
    series = read(listening.metrics_text()[0])
    assert total(series, "pellucid_telemetry_drops_total", reason="live_full") == 3


def test_the_ring_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "REQUESTS_MAX", 3)
    monkeypatch.setattr(hub, "STEPS_MAX", 3)
    listening = Hub()
    for number in range(8):
        listening.request(a_record(request_id=str(number), accepted_ns=number, finished_ns=number + 9))
        listening.step(a_step(step_id=number))
    assert [row["request_id"] for row in rows(listening.debug_requests(), "requests")] == ["7", "6", "5"]
    assert [row["step_id"] for row in rows(listening.debug_steps(), "steps")] == [7, 6, 5]
    assert listening.debug_request("0") == []


def test_one_consumers_failure_is_its_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(record: RequestRecord) -> None:
        raise RuntimeError("a bug")

    listening = Hub()
    monkeypatch.setattr(listening._metrics, "request", fail)
    with caplog.at_level(logging.ERROR, "pellucid.telemetry"):
        for number in range(3):
            listening.request(a_record(request_id=str(number)))
        assert len(rows(listening.debug_requests(), "requests")) == 3
    series = read(listening.metrics_text()[0])
    assert total(series, "pellucid_telemetry_drops_total", reason="consumer_failed") == 3
    assert len(caplog.records) == 1


def test_a_replica_that_is_silent_with_work_stops_speaking_for_itself(at: Clock) -> None:
    listening = Hub()
    listening.engine_up(0, epoch="a", block_slots=16)
    listening.step(a_step(running=2))
    assert _running(listening) == [2]
    at.ns += hub.STALE_NS + 1
    assert _running(listening) == []
    series = read(listening.metrics_text()[0])
    assert total(series, "pellucid_engine_up", replica="0") == 1, "connected, as far as anybody knows"
    assert total(series, "pellucid_engine_silent_seconds", replica="0") > 5


def test_an_idle_replica_stays_true_while_it_is_connected(at: Clock) -> None:
    listening = Hub()
    listening.engine_up(0, epoch="a", block_slots=16)
    listening.step(a_step(running=0, waiting=0))
    at.ns += 3600 * 1_000_000_000
    assert _running(listening) == [0]
    listening.engine_down(0)
    assert _running(listening) == []
    assert total(read(listening.metrics_text()[0]), "pellucid_engine_up", replica="0") == 0


def test_without_news_of_connections_a_silent_replica_reads_as_down(at: Clock) -> None:
    listening = Hub()
    listening.step(a_step(running=0))
    assert total(read(listening.metrics_text()[0]), "pellucid_engine_up", replica="0") == 1
    at.ns += hub.STALE_NS + 1
    assert total(read(listening.metrics_text()[0]), "pellucid_engine_up", replica="0") == 0
    assert _running(listening) == []


def test_a_new_epoch_is_a_restart_and_the_old_book_is_void() -> None:
    listening = Hub()
    listening.engine_up(0, epoch="a", block_slots=16)
    listening.step(a_step())
    listening.debug_kv()
    listening.engine_down(0)
    listening.engine_up(0, epoch="a", block_slots=16)
    assert total(read(listening.metrics_text()[0]), "pellucid_engine_restarts_total") == 0, "the same process"
    listening.engine_down(0)
    listening.engine_up(0, epoch="b", block_slots=16)
    assert total(read(listening.metrics_text()[0]), "pellucid_engine_restarts_total", replica="0") == 1
    assert _object(listening.debug_kv()["slots"])["total"] == 0


def test_a_replica_beyond_the_bound_is_counted_and_not_followed() -> None:
    listening = Hub()
    for number in range(REPLICAS_MAX + 2):
        listening.step(a_step(replica=number))
    series = read(listening.metrics_text()[0])
    assert total(series, "pellucid_telemetry_drops_total", reason="consumer_failed") == 2
    assert total(series, "pellucid_engine_steps_total") == REPLICAS_MAX + 2


async def test_the_pump_runs_by_itself(running: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = asyncio.Event()
    original = running._metrics.request

    def notice(record: RequestRecord) -> None:
        original(record)
        seen.set()

    monkeypatch.setattr(running._metrics, "request", notice)
    running.request(a_record())
    await asyncio.wait_for(seen.wait(), 10)


async def test_the_pump_gives_the_event_loop_back(running: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood is worked off in turns: another task runs between them."""
    monkeypatch.setattr(hub, "PUMP_BUDGET_NS", 100_000)
    for number in range(3000):
        running.request(a_record(request_id=str(number)))
    turns = 0
    while len(running._sink):
        await asyncio.sleep(0)
        turns += 1
        assert turns < 10_000_000
    assert turns > 5


async def test_stopping_hands_on_what_is_left_and_twice_is_once() -> None:
    stopping = Hub()
    await stopping.start()
    stopping.request(a_record())
    await stopping.stop()
    await stopping.stop()
    assert len(stopping._sink) == 0
    assert total(read(stopping.metrics_text()[0]), "pellucid_requests_total") == 1


def _running(listening: Hub) -> list[float]:
    series = read(listening.metrics_text()[0])
    return [value for (name, _), value in series.items() if name == "pellucid_engine_running_sequences"]
