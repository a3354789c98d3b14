"""
What is remembered of a stretch of time.
"""

import asyncio

import msgspec
import pytest

from diagnosis.why import steps_of
from telemetry import clock, hub, recent
from telemetry.hub import Hub
from telemetry.recent import SAMPLES_MAX, Recent, Samples
from telemetry.records import MemoryReading, RequestRecord, StepRecord
from telemetry.totals import GRAIN_NS


def serving(number: int, *sequences: int, **more: object) -> StepRecord:
    """A step that served these."""
    slices = tuple((one, 1) for one in sequences)
    step = StepRecord(step_id=number, ended_ns=number, step_ns=1, parts={"plan": 1}, slices=slices)
    return msgspec.structs.replace(step, **more)


def test_steps_of_an_engine_that_is_gone_are_not_taken_for_those_of_the_next() -> None:
    """Both count their steps and sequences from the beginning."""
    listening = Hub()
    for epoch in ("a", "b"):
        listening.engine_up(0, epoch=epoch)
        for number in (1, 2):
            requests = {0: f"{epoch}#1-0"}
            listening.step(StepRecord(step_id=number, ended_ns=number, step_ns=1, parts={"plan": 1}, requests=requests))
        listening.debug_steps()
    evidence = listening.evidence(0)
    assert {spot: step.requests[0] for spot, step in evidence.steps.items()} == {(0, 1): "b#1-0", (0, 2): "b#1-0"}
    assert evidence.starts == 2
    assert evidence.names == {(0, 0): "b#1-0"}


def test_who_was_served_is_known_beyond_the_step_that_says_so() -> None:
    known = Recent(requests_max=4, steps_max=3, live_max=4)
    known.step(serving(1, 1, 2, requests={1: "mine#a-0", 2: "other#b-0"}), 1)
    for number in range(2, 10):
        known.step(serving(number, 1, 2), number)
    evidence = known.evidence(0, 10)
    assert [step.requests for step in evidence.steps.values()] == [{}, {}, {}]
    assert evidence.names == {(0, 1): "mine#a-0", (0, 2): "other#b-0"}
    record = RequestRecord(request_id="mine", accepted_ns=0, finished_ns=9, states={})
    assert [step.step_id for step in steps_of(record, evidence)] == [7, 8, 9]


def test_names_are_bounded_and_those_that_are_served_last_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "NAMES_MAX", 3)
    known = Recent(requests_max=4, steps_max=100, live_max=4)
    for number in range(50):
        known.step(serving(number, 0, number, requests={number: str(number)}), number)
    assert known.evidence(0, 50).names == {(0, 48): "48", (0, 0): "0", (0, 49): "49"}


def test_memory_of_two_lives_of_an_engine_is_not_one_series() -> None:
    known = Recent(requests_max=4, steps_max=4, live_max=4)
    for life, (epoch, kept) in enumerate((("a", 1), ("a", 2), ("b", 1))):  # at first the connection alone is lost
        known.connected(0, epoch=epoch, block_slots=16, now_ns=10 * life)
        size = {"a": 9_000, "b": 1_000}[epoch] + life
        known.step(serving(1, memory=MemoryReading(resident_bytes=size)), 10 * life + 1)
        known.sampled("gateway", 10 * life + 1, 5)
        memory = known.evidence(0, 100).memory
        assert len(memory["engine 0"]) == kept and memory["engine 0"][-1] == (10 * life + 1, size)
        assert len(memory["gateway"]) == life + 1


def test_what_was_heard_before_the_first_connection_is_of_the_same_life() -> None:
    known = Recent(requests_max=4, steps_max=4, live_max=4)
    known.step(serving(1, memory=MemoryReading(resident_bytes=7)), 1)
    known.connected(0, epoch="a", block_slots=16, now_ns=2)
    assert known.evidence(0, 10).memory == {"engine 0": [(1, 7)]}


def test_pressure_is_the_share_of_the_window() -> None:
    known = Recent(requests_max=4, steps_max=4, live_max=4)
    assert known.evidence(0, 1).pressure == {}
    for reading in range(1, 2000):
        waited_ns = max(0, reading - 1900) * GRAIN_NS
        known.pressed(reading * GRAIN_NS, {"cpu": waited_ns, "io": 7})
        known.pressed(reading * GRAIN_NS + 1, {"cpu": 0, "io": 0})  # too soon to be worth keeping
        if reading == 1:
            assert known.evidence(0, 2 * GRAIN_NS).pressure == {}, "one reading tells nothing"
    assert known.evidence(1950 * GRAIN_NS, 1999 * GRAIN_NS).pressure == {"cpu": 1.0, "io": 0.0}
    assert known.evidence(1950 * GRAIN_NS + 5, 1999 * GRAIN_NS).pressure["cpu"] == 1.0
    assert known.evidence(1801 * GRAIN_NS, 1999 * GRAIN_NS).pressure["cpu"] == pytest.approx(0.5)
    hour = known.evidence(0, 1999 * GRAIN_NS).pressure["cpu"]
    assert hour == pytest.approx(99 / (recent.PRESSURES_MAX - 1)), "no more than that is kept"


async def test_the_hub_looks_at_what_the_machine_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, looked = 1_000 * GRAIN_NS, asyncio.Event()

    def look() -> dict[str, int]:
        nonlocal now_ns
        now_ns += GRAIN_NS
        if now_ns >= 1_004 * GRAIN_NS:
            looked.set()
        return {"cpu": now_ns // 4}

    monkeypatch.setattr(clock, "now_ns", lambda: now_ns)
    monkeypatch.setattr(hub, "host_pressure_ns", look)
    looking = Hub()
    await looking.start()
    await asyncio.wait_for(looked.wait(), 10)
    evidence = looking.evidence(0)
    await looking.stop()
    assert evidence.pressure == {"cpu": 0.25}


def test_samples_are_as_dense_after_a_day_as_at_first() -> None:
    samples = Samples()
    for second in range(100_000):
        samples.add(second, second)
    assert samples.since(99_700) == [(second, second) for second in range(99_700, 100_000)]
    assert len(samples.since(0)) == SAMPLES_MAX
