"""
What the runtime does to everybody, and the sink in which measurements and records wait.
"""

import asyncio
import gc
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry import clock, hub
from telemetry.hub import Hub
from telemetry.records import RequestRecord
from telemetry.runtime import GC_PAUSE, LAG_PERIOD_S, LOOP_LAG, RuntimeSampler
from telemetry.sink import Sink
from tests.contract.telemetry.test_metrics import read, total


@pytest.fixture(autouse=True)
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")


async def test_the_runtime_is_measured() -> None:
    class Notes:
        def __init__(self) -> None:
            self.taken: list[tuple[str, tuple[str, ...]]] = []
            self.lagged = asyncio.Event()

        def observe(self, metric: str, amount: int, labels: tuple[str, ...] = ()) -> None:
            assert amount >= 0
            self.taken.append((metric, labels))
            if metric == LOOP_LAG:
                self.lagged.set()

    notes = Notes()
    sampler = RuntimeSampler(notes)
    sampler.start()
    try:
        gc.collect()
        await asyncio.wait_for(notes.lagged.wait(), 100 * LAG_PERIOD_S)
    finally:
        await sampler.stop()
    assert (GC_PAUSE, ("2",)) in notes.taken
    count = len(notes.taken)
    gc.collect()
    assert len(notes.taken) == count, "nothing is measured after the end"


async def test_what_the_loop_is_late_by_just_now_is_known() -> None:
    running = Hub()
    await running.start()
    try:
        await asyncio.sleep(0)  # The sampler begins.
        before = running.disturbed()
        time.sleep(2 * LAG_PERIOD_S)  # What holds the loop up.
        held_up, held_ns = running.disturbed(), clock.now_ns()
        assert before.late_ns == 0 and held_up.late_ns >= 0.9e9 * LAG_PERIOD_S
        assert held_up.loop_lag_ns - before.loop_lag_ns == held_up.late_ns
        gc_ns = 0
        while gc_ns < 2e9 * LAG_PERIOD_S:
            gc.collect()
            gc_ns = running.disturbed().gc_pause_ns - held_up.gc_pause_ns
        collecting = running.disturbed()
        assert collecting.loop_lag_ns - held_up.loop_lag_ns <= clock.now_ns() - held_ns - gc_ns, "not all was lag"
    finally:
        await running.stop()


async def test_a_late_event_loop_shows_up_in_the_metrics() -> None:
    running = Hub()
    running.observe(LOOP_LAG, 300_000_000)
    series = read(running.metrics_text()[0])
    assert total(series, "pellucid_event_loop_lag_seconds_sum") >= 0.3


def test_measurements_give_way_to_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "RECORDS_MAX", 10)
    monkeypatch.setattr(hub, "dropped_lines", lambda: 0)  # log lines of other tests
    listening = Hub()
    for _ in range(50):
        listening.observe(LOOP_LAG, 1)
    for number in range(5):
        listening.request(RequestRecord(request_id=str(number), accepted_ns=0, finished_ns=1, states={"parse": 1}))
    series = read(listening.metrics_text()[0])
    assert total(series, "pellucid_requests_total") == 5
    assert total(series, "pellucid_telemetry_drops_total") == 0


@given(puts=st.lists(st.booleans(), max_size=60), items_max=st.integers(1, 8))
def test_a_sink_is_a_bounded_queue(puts: list[bool], items_max: int) -> None:
    sink: Sink[int] = Sink(items_max=items_max)
    model: list[int] = []
    dropped = 0
    for number, put in enumerate(puts):
        if not put:
            assert list(sink.drain()) == model
            model = []
        elif sink.put(number):
            model.append(number)
        else:
            dropped += 1
            assert len(model) == items_max
        assert (len(sink), sink.dropped) == (len(model), dropped)
