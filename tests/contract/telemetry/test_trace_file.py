"""
Spans in a file: whole lines that others can read, from several processes, on a disk that is full.
"""

import asyncio
import fcntl
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from telemetry import clock, export, trace_file
from telemetry.export import ExportConfigError
from telemetry.hub import Hub
from telemetry.live import accept_trace
from telemetry.otlp_json import otlp_line
from telemetry.records import RequestRecord
from telemetry.spans import Link, request_spans
from telemetry.trace_file import TraceFile
from telemetry.vocabulary import OBSERVING_ROUTES
from tests.contract.telemetry.otlp_file import read_trace_file
from tests.contract.telemetry.otlp_sink import attributes
from tests.contract.telemetry.records_strategy import request_records
from tests.contract.telemetry.test_export import CALLER, serve_one
from tests.contract.telemetry.test_metrics import read, total
from tests.contract.telemetry.test_spans import OFFSET_NS, a_live, a_record

RESOURCE = {"service.name": "pellucid", "service.instance.id": "one"}


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No collector of this machine."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(record=request_records().filter(lambda record: record.route not in OBSERVING_ROUTES))
def test_any_tree_is_the_same_on_the_other_side(record: RequestRecord, tmp_path: Path) -> None:
    spans = request_spans(record, a_live(trace=accept_trace(CALLER, "a=b")), offset_ns=OFFSET_NS, because="share")
    path = tmp_path / "one.jsonl"
    path.write_bytes(otlp_line(spans, resource=RESOURCE, version="1"))
    there = read_trace_file(path)
    assert there.resource == RESOURCE and there.scopes == {"pellucid"}
    for ours, theirs in zip(spans, there.spans, strict=True):
        assert (ours.trace_id, ours.span_id) == (theirs.trace_id.hex(), theirs.span_id.hex())
        assert (ours.parent_id, ours.name, ours.trace_state) == (
            theirs.parent_span_id.hex(),
            theirs.name,
            theirs.trace_state,
        )
        assert (ours.started_ns, ours.ended_ns) == (theirs.start_time_unix_nano, theirs.end_time_unix_nano)
        expected = {key: list(value) if isinstance(value, tuple) else value for key, value in ours.attributes.items()}
        assert attributes(theirs.attributes) == expected
        assert theirs.kind == (Span.SPAN_KIND_SERVER if ours.is_server else Span.SPAN_KIND_INTERNAL)
        assert theirs.status.code == (2 if ours.failed else 0)
        assert bool(theirs.flags & 0x200) == ours.is_server, "the parent of the root alone is elsewhere"


def test_the_encoding_is_that_of_the_specification() -> None:
    """What protobuf's own parser would also let through otherwise: names, numbers as text, enums as numbers."""
    root, *_ = request_spans(a_record(status=500), a_live(trace=accept_trace(CALLER)), offset_ns=OFFSET_NS)
    linked = msgspec.json.decode(
        otlp_line([replace(root, links=(Link("a" * 32, "b" * 16),))], resource=RESOURCE, version="1")
    )
    [of_resource] = linked["resourceSpans"]
    [span] = of_resource["scopeSpans"][0]["spans"]
    assert span["traceId"] == "4bf92f3577b34da6a3ce929d0e0e4736" and span["parentSpanId"] == "00f067aa0ba902b7"
    assert span["startTimeUnixNano"] == str(root.started_ns) and span["kind"] == 2 and span["status"] == {"code": 2}
    values = {pair["key"]: pair["value"] for pair in span["attributes"]}
    assert values["http.response.status_code"] == {"intValue": "500"}
    assert span["links"] == [{"traceId": "a" * 32, "spanId": "b" * 16, "flags": 0x101}]


async def test_the_hub_writes_each_tree_as_a_line(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    hub = Hub(model="tiny", version="0.1.0", trace_file=str(path))
    await hub.start()
    for number in range(5):
        serve_one(hub, f"r{number}")
    await hub.stop()
    there = read_trace_file(path)
    assert len(lines(path)) == 5 and len(there.spans) == 5 * 7
    assert there.resource["service.version"] == "0.1.0"
    roots = [attributes(span.attributes) for span in there.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert [root["pellucid.sampled_because"] for root in roots] == ["caller"] * 5
    assert path.stat().st_mode & 0o777 == 0o600, "tenants are named in it"


async def test_only_what_is_sampled_is_written(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    hub = Hub(model="tiny", trace_file=str(path), trace_sample=0)
    await hub.start()
    for number in range(20):
        hub.request(
            a_record(request_id=f"r{number}", trace_id=f"{number + 1:032x}", outcome="stop" if number else "failed")
        )
    await hub.stop()
    [root] = [span for span in read_trace_file(path).spans if span.kind == Span.SPAN_KIND_SERVER]
    assert attributes(root.attributes)["pellucid.sampled_because"] == "fault"


def _write_many(path: str, number: int) -> None:
    async def write() -> None:
        out = TraceFile(path, resource=RESOURCE, version="1")
        for tree in range(200):
            record = a_record(request_id=f"{number}-{tree}", trace_id=f"{tree + 1:032x}")
            assert out.submit(request_spans(record, None, offset_ns=OFFSET_NS))
        await out.stop(30)

    asyncio.run(write())


def test_several_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    processes = [
        multiprocessing.get_context("spawn").Process(target=_write_many, args=(str(path), number))
        for number in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    there = read_trace_file(path)
    ids = {attributes(span.attributes)["pellucid.request_id"] for span in there.spans if span.kind == 2}
    assert len(lines(path)) == 600 and len(ids) == 600


@contextmanager
def disk_with(bytes_max: int) -> Iterator[None]:
    """No file may grow further: a write ends short and the next one fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_loses_whole_lines_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "traces.jsonl"
    tree = request_spans(a_record(), None, offset_ns=OFFSET_NS)
    size = len(otlp_line(tree, resource=RESOURCE, version="1"))
    out = TraceFile(str(path), resource=RESOURCE, version="1")
    with disk_with(3 * size + size // 2):
        for _ in range(10):
            assert out.submit(tree)
        _until(lambda: out.pending_spans() == 0)
    kept = len(lines(path))
    assert kept == 3, "what had room in part is taken back"
    assert out.drops() == {"spans_file_queue_full": 0, "spans_file_failed": 7 * len(tree)}
    assert out.submit(tree)  # there is room again
    await out.stop(10)
    assert len(lines(path)) == 4
    said = [record.levelname for record in caplog.records if str(path) in record.getMessage()]
    assert said == ["ERROR", "WARNING"]


async def test_a_file_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "FILE_BYTES_MAX", 8000)
    path = tmp_path / "traces.jsonl"
    out = TraceFile(str(path), resource=RESOURCE, version="1")
    tree = request_spans(a_record(), None, offset_ns=OFFSET_NS)
    for _ in range(10):
        out.submit(tree)
    await out.stop(10)
    assert 0 < path.stat().st_size <= 8000
    assert out.drops()["spans_file_failed"] == (10 - len(lines(path))) * len(tree)


async def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.hub.FLUSH_S", 0.2)
    monkeypatch.setattr(trace_file, "QUEUE_SPANS_MAX", 70)
    path = tmp_path / "traces.jsonl"
    hub = Hub(trace_file=str(path))
    await hub.start()
    lock = os.open(path, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # As long as somebody else holds it, no line can be written.
    try:
        started_ns = clock.now_ns()
        for number in range(100):
            serve_one(hub, f"r{number}")
        series = read(hub.metrics_text()[0])
        assert clock.now_ns() - started_ns < 2_000_000_000
        assert total(series, "pellucid_telemetry_drops_total", reason="spans_file_queue_full") == 90 * 7
        assert total(series, "pellucid_telemetry_pending_spans") == 10 * 7
        started_ns = clock.now_ns()
        await hub.stop()
        assert clock.now_ns() - started_ns < 2_000_000_000
    finally:
        os.close(lock)


@pytest.mark.parametrize("make", ["directory", "pipe", "missing"])
def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, make: str) -> None:
    path = {"directory": tmp_path, "pipe": tmp_path / "pipe", "missing": tmp_path / "no" / "such"}[make]
    if make == "pipe":
        os.mkfifo(path)
    with pytest.raises(ExportConfigError, match=str(path)):
        Hub(trace_file=str(path))


def test_a_device_is_no_file() -> None:
    with pytest.raises(ExportConfigError, match="no regular file"):
        export.check_trace_file("/dev/null")


def _until(condition: Callable[[], bool]) -> None:
    deadline_ns = clock.now_ns() + 10_000_000_000
    while not condition():
        assert clock.now_ns() < deadline_ns
        time.sleep(0.005)  # A thread of the product's own: it has no event for tests.
