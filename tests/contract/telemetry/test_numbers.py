"""
The numbers of several workers as one: sums of what each has alone, and never more steps than there were.
"""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.catalogue import CATALOGUE
from telemetry.metrics import Metrics
from telemetry.numbers import Numbers, exposition, join
from telemetry.records import KvBook, MemoryReading, RequestRecord, StepRecord
from telemetry.vocabulary import LimitsView, Metric, ReplicaView, UpstreamView, View
from tests.contract.telemetry.records_strategy import MODEL, UPSTREAM, request_records, step_records
from tests.contract.telemetry.test_metrics import Series, read, total

WORKERS = 3
COUNTED = {metric.name for metric in CATALOGUE if metric.kind != "gauge"}


class Worker:
    """One that writes down what it shows, before it shows it, and begins its next life with that."""

    def __init__(self, saved: bytes = b"") -> None:
        self.metrics = Metrics(models=[MODEL])
        self.saved = saved
        self.drops = 0
        if saved:
            self.metrics.resume(self.file)

    @property
    def file(self) -> Numbers:
        return msgspec.msgpack.decode(self.saved, type=Numbers).counted()

    def numbers(self) -> Numbers:
        numbers = self.metrics.numbers(View(drops={"sink_full": self.drops}))
        self.saved = msgspec.msgpack.encode(numbers)
        return msgspec.msgpack.decode(self.saved, type=Numbers)


class Fleet:
    """Workers that come and go."""

    def __init__(self) -> None:
        self.workers = [Worker() for _ in range(WORKERS)]
        self.away: set[int] = set()

    def scrape(self, asked: int) -> Series:
        others = [
            worker.file if number in self.away else worker.numbers()
            for number, worker in enumerate(self.workers)
            if number != asked and (number not in self.away or worker.saved)
        ]
        return read(exposition(join([self.workers[asked].numbers(), *others]))[0])


class Request(msgspec.Struct):
    worker: int
    record: RequestRecord


class Step(msgspec.Struct):
    heard_by: set[int]
    record: StepRecord


class Scrape(msgspec.Struct):
    worker: int


class Crash(msgspec.Struct):
    worker: int


class Return(msgspec.Struct):
    worker: int


numbers = st.integers(0, WORKERS - 1)
events = st.one_of(
    st.builds(Request, numbers, request_records()),
    st.builds(Step, st.sets(numbers), step_records()),
    st.builds(Scrape, numbers),
    st.builds(Crash, numbers),
    st.builds(Return, numbers),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(events, max_size=25))
def test_counters_never_fall_and_tell_the_truth_whoever_is_asked_and_whoever_dies(happened: list[object]) -> None:
    fleet = Fleet()
    last: Series = {}
    requests = steps = lost = 0
    unsaved = [0] * WORKERS
    for event in [*happened, *(Return(number) for number in range(WORKERS)), Scrape(0)]:
        match event:
            case Request(worker, record) if worker not in fleet.away:
                fleet.workers[worker].metrics.request(record)
                fleet.workers[worker].drops += 1
                requests += 1
                unsaved[worker] += 1
            case Step(heard_by, record):
                steps += 1
                for number in heard_by - fleet.away:
                    fleet.workers[number].metrics.step(record)
            case Crash(worker):
                fleet.away.add(worker)
                lost += unsaved[worker]
                unsaved[worker] = 0
            case Return(worker) if worker in fleet.away:
                fleet.away.discard(worker)
                fleet.workers[worker] = Worker(fleet.workers[worker].saved)
            case Scrape(worker) if worker not in fleet.away:
                series = fleet.scrape(worker)
                unsaved = [0 if number not in fleet.away else count for number, count in enumerate(unsaved)]
                for key, value in last.items():
                    if any(key[0].startswith(name) for name in COUNTED):
                        assert series[key] >= value, key
                last = series
    assert total(last, "pellucid_requests_total") == requests - lost
    assert total(last, "pellucid_request_duration_seconds_count") == requests - lost
    assert total(last, "pellucid_telemetry_drops_total") == requests - lost
    assert total(last, "pellucid_engine_steps_total") <= steps
    assert total(last, "pellucid_engine_step_busy_seconds_count") <= steps


@settings(max_examples=30, deadline=None)
@given(st.lists(step_records(), max_size=8))
def test_steps_that_all_have_heard_of_count_once(steps: list[StepRecord]) -> None:
    fleet = Fleet()
    alone = Metrics()
    for record in steps:
        for metrics in (alone, *(worker.metrics for worker in fleet.workers)):
            metrics.step(record)
    expected = {key: value for key, value in read(alone.text(View())[0]).items() if "_engine_" in key[0]}
    found = {key: value for key, value in fleet.scrape(1).items() if "_engine_" in key[0]}
    assert found == expected


def seen(silent_ns: int, *, up: bool = True, restarts: int = 0, free: int = 16) -> Numbers:
    step = StepRecord(step_id=1, ended_ns=0, step_ns=0, parts={}, kv=KvBook(total=16, free=free, filled=16 - free))
    replica = ReplicaView(replica=0, up=up, restarts=restarts, silent_ns=silent_ns, step=step if up else None)
    return Metrics().numbers(View(replicas=(replica,), live={"/v1/completions": 2}, resident_bytes=100, loop_tasks=7))


def test_what_is_true_now_is_joined_as_it_makes_sense() -> None:
    one, other = seen(5_000_000_000, free=9), seen(1_000_000_000, restarts=2, free=16)
    series = read(exposition(join([one, other]))[0])
    assert total(series, "pellucid_requests_live") == 4
    assert total(series, "pellucid_process_resident_memory_bytes") == 200
    assert total(series, "pellucid_event_loop_tasks") == 14
    assert total(series, "pellucid_engine_silent_seconds") == 1
    assert total(series, "pellucid_engine_restarts_total") == 2
    assert total(series, "pellucid_engine_up") == 1
    assert total(series, "pellucid_kv_slots") == 16, "one book: parts of two would not sum to the pool"
    assert total(series, "pellucid_kv_slots", place="free") == 9
    cut_off = read(exposition(join([seen(9, up=False), one]))[0])
    assert total(cut_off, "pellucid_engine_up") == 0
    assert total(cut_off, "pellucid_kv_slots", place="free") == 9, "whoever can see it"


OWN = {
    "pellucid_event_loop_tasks",
    "pellucid_limit_reservations_held",
    "pellucid_limit_settlements_owed",
    "pellucid_process_resident_memory_bytes",
    "pellucid_requests_live",
    "pellucid_telemetry_pending_records",
    "pellucid_telemetry_pending_spans",
    "pellucid_upstream_requests_live",
}
"""Gauges of which each worker has a part of its own."""
STEP = StepRecord(step_id=1, ended_ns=0, step_ns=0, parts={}, running=2, waiting=1, kv=KvBook(768, 256, 0, 280, 232))


def everything(*, up: bool = True) -> View:
    return View(
        replicas=(
            ReplicaView(0, up=up, restarts=1, silent_ns=250_000_000, step=STEP, memory=MemoryReading(5, 4, 3, 2)),
        ),
        upstreams=(UpstreamView(name=UPSTREAM, up=up, in_flight=1, results={}),),
        live={"/v1/completions": 2},
        pending_records=3,
        pending_spans=4,
        resident_bytes=5,
        loop_tasks=6,
        workers=2,
        workers_silent=1,
        build=(("0.1.0", MODEL),),
        limits=LimitsView(
            up=up, openings=0, commands_failed=0, workers=4, held=2, owed=3, forgotten=0, unknown=0, refusals={}
        ),
    )


def shown(*views: View) -> dict[str, dict[tuple[str, ...], int | float]]:
    metrics = Metrics(models=[MODEL])
    metrics.upstreams = frozenset({UPSTREAM})
    return join([metrics.numbers(view) for view in views]).sums


@pytest.mark.parametrize("metric", [metric for metric in CATALOGUE if metric.kind == "gauge"], ids=lambda row: row.name)
def test_what_two_workers_see_alike_is_said_once(metric: Metric) -> None:
    """A new gauge is in the list, or says in the catalogue how it is joined."""
    alone, two = (shown(*[everything()] * workers)[metric.name] for workers in (1, 2))
    assert alone, "nothing is compared"
    assert two == {labels: amount * (2 if metric.name in OWN else 1) for labels, amount in alone.items()}
    assert (metric.join == "sum") == (metric.name in OWN), "also where all that was seen is zero"


def test_what_one_worker_cannot_reach_is_not_up() -> None:
    ups = {metric.name for metric in CATALOGUE if metric.name.endswith("_up")}
    assert len(ups) == 3
    for views in ((everything(), everything(up=False)), (everything(up=False), everything())):
        assert {name: list(shown(*views)[name].values()) for name in ups} == {name: [0] for name in ups}


def test_what_the_machine_counts_is_not_counted_again_by_the_next_life_of_a_worker() -> None:
    name = "pellucid_host_pressure_seconds_total"
    worker = Metrics()
    for waited_ns in (500, 700, 900):
        view = View(pressure_ns={"cpu": waited_ns}, starved_ns=10)
        numbers = worker.numbers(view)
        assert numbers.sums[name] == {("cpu",): waited_ns}
        assert join([worker.numbers(view), numbers.counted()]).sums[name] == {("cpu",): waited_ns}
        worker = Metrics()
        worker.resume(numbers)
    assert worker.numbers(View()).sums["pellucid_gateway_starved_seconds_total"] == {(): 30}, "that is its own"


def test_the_dead_see_nothing() -> None:
    assert not {metric.name for metric in CATALOGUE if metric.kind == "gauge"} & seen(1).counted().sums.keys()
