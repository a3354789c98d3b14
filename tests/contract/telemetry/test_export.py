"""
Spans on the wire: a strict collector gets the whole tree, and a bad one hurts nobody.
"""

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from telemetry import clock, hub, otlp
from telemetry.export import ExportConfigError, Target, target
from telemetry.hub import Hub, LiveRequest, accept_trace
from telemetry.ledger import Ledger
from telemetry.records import RequestRecord
from telemetry.spans import request_spans
from tests.contract.telemetry.otlp_sink import Collector, Mood, attributes, grpc_collector, http_collector
from tests.contract.telemetry.test_metrics import read, total

pytestmark = pytest.mark.usefixtures("quick_export")
ROOT = Path(__file__).resolve().parents[3]
CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
Opener = Callable[[Mood], AbstractContextManager[Collector]]
both_protocols = pytest.mark.parametrize("opened", [http_collector, grpc_collector], ids=["http", "grpc"])


def serve_one(to: Hub, request_id: str = "r1", **changes: object) -> RequestRecord:
    """A request's whole life, as the gateway tells it."""
    ledger = Ledger("parse", clock.now_ns())
    live = LiveRequest(request_id=request_id, ledger=ledger, route="/v1/chat/completions", trace=accept_trace(CALLER))
    to.request_opened(live)
    start_ns = ledger.opened_ns
    for step, state in enumerate(("tokenize", "dispatch", "decode", "send"), 1):
        ledger.enter(state, start_ns + step * 1_000_000)
    end_ns = start_ns + 5_000_000
    record = RequestRecord(
        request_id=request_id,
        outcome="stop",
        accepted_ns=start_ns,
        finished_ns=end_ns,
        states=ledger.spent(end_ns),
        model="tiny",
        route=live.route,
        status=200,
        trace_id=live.trace.trace_id,
    )
    to.request(record)
    return record


@both_protocols
async def test_a_collector_gets_the_whole_tree(opened: Opener) -> None:
    with opened("good") as collector:
        export = Hub(model="tiny", version="0.1.0", otlp_endpoint=collector.url)
        await export.start()
        record = serve_one(export)
        await export.stop()
        spans = collector.wait_for(7)
    assert len(spans) == 7
    by_name = {span.name: span for span in spans}
    root, chat = by_name["POST /v1/chat/completions"], by_name["chat tiny"]
    phases = sorted((span for span in spans if span not in (root, chat)), key=lambda span: span.start_time_unix_nano)
    assert [phase.name for phase in phases] == ["parse", "tokenize", "dispatch", "decode", "send"]
    assert root.kind == Span.SPAN_KIND_SERVER
    assert {span.kind for span in (chat, *phases)} == {Span.SPAN_KIND_INTERNAL}
    assert root.parent_span_id.hex() == "00f067aa0ba902b7"
    assert {span.trace_id.hex() for span in spans} == {"4bf92f3577b34da6a3ce929d0e0e4736"}
    assert chat.parent_span_id == root.span_id
    at_ns = root.start_time_unix_nano
    for phase in phases:
        assert phase.parent_span_id == chat.span_id
        assert phase.start_time_unix_nano == at_ns
        at_ns = phase.end_time_unix_nano
    assert at_ns == root.end_time_unix_nano
    assert root.end_time_unix_nano - root.start_time_unix_nano == record.finished_ns - record.accepted_ns
    assert {span.status.code for span in spans} == {Status.STATUS_CODE_UNSET}
    assert attributes(root.attributes)["http.response.status_code"] == 200
    assert attributes(chat.attributes)["gen_ai.operation.name"] == "chat"
    assert attributes(chat.attributes)["gen_ai.response.finish_reasons"] == ["stop"]
    assert not any(key.startswith("gen_ai.") for phase in phases for key in attributes(phase.attributes))
    assert collector.resource["service.name"] == "pellucid"
    assert collector.resource["service.version"] == "0.1.0"
    assert collector.scopes == {"pellucid"}


async def test_the_operators_name_of_the_service_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "their-name")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    with http_collector() as collector:
        export = Hub(otlp_endpoint=collector.url)
        await export.start()
        serve_one(export)
        await export.stop()
        collector.wait_for(7)
    assert collector.resource["service.name"] == "their-name"
    assert collector.resource["deployment.environment.name"] == "lab"


@both_protocols
async def test_a_frozen_collector_holds_up_nobody(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "FLUSH_S", 0.3)
    with opened("frozen") as collector:
        export = Hub(otlp_endpoint=collector.url)
        await export.start()
        serve_one(export)
        export.metrics_text()
        assert await asyncio.to_thread(collector.asked.wait, 20), "the exporter never tried"
        started_ns = clock.now_ns()
        for number in range(100):
            serve_one(export, f"r{number}")
        assert len(export.debug_requests(200)["requests"]) == 100  # type: ignore[arg-type]
        series = read(export.metrics_text()[0])
        assert clock.now_ns() - started_ns < 2_000_000_000
        assert total(series, "pellucid_telemetry_pending_spans") == 7 * 101
        assert not collector.spans
        started_ns = clock.now_ns()
        await export.stop()
        assert clock.now_ns() - started_ns < 2_000_000_000, "stop waits for FLUSH_S, not for the collector"


@both_protocols
async def test_what_a_refusing_collector_loses_is_counted(opened: Opener) -> None:
    with opened("refusing") as collector:
        export = Hub(otlp_endpoint=collector.url)
        await export.start()
        serve_one(export)
        await export.stop()
        series = read(export.metrics_text()[0])
        assert total(series, "pellucid_telemetry_drops_total", reason="spans_export_failed") == 7
        assert total(series, "pellucid_telemetry_pending_spans") == 0
        assert total(series, "pellucid_requests_total", outcome="stop") == 1


async def test_a_dead_address_delays_the_end_by_no_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "FLUSH_S", 0.2)
    export = Hub(otlp_endpoint="http://127.0.0.1:9")
    await export.start()
    serve_one(export)
    started_ns = clock.now_ns()
    await export.stop()
    assert clock.now_ns() - started_ns < 2_000_000_000


class Moody(SpanExporter):
    """Does what it is told; `batches` counts the calls."""

    def __init__(self) -> None:
        self.working = True
        self.raising = False
        self.batches = 0
        self.arrived = threading.Condition()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self.arrived:
            self.batches += 1
            self.arrived.notify_all()
        if self.raising:
            raise OSError("no route")
        return SpanExportResult.SUCCESS if self.working else SpanExportResult.FAILURE


async def test_failure_is_logged_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    inner = Moody()
    counted = otlp._Counted(inner, "http://there")
    with caplog.at_level(logging.INFO, "pellucid.telemetry"):
        for working, raising in [(True, False), (False, False), (False, True), (False, False), (True, False)]:
            inner.working, inner.raising = working, raising
            counted.export([])
    said = [record.levelname for record in caplog.records if "http://there" in record.getMessage()]
    assert said == ["ERROR", "WARNING"]
    assert inner.batches == 5


async def test_a_full_queue_loses_whole_trees_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "QUEUE_SPANS_MAX", 20)
    monkeypatch.setattr(otlp, "BATCH_SPANS_MAX", 20)
    monkeypatch.setattr(otlp, "BATCH_PERIOD_S", 60)
    kept: list[str] = []

    class Keeping(Moody):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            kept.extend(f"{span.context.trace_id:032x}" for span in spans if span.context)
            return super().export(spans)

    export = otlp.OtlpExport(Target("http/protobuf", "http://nowhere"), resource={}, version="0", exporter=Keeping())
    trees = [request_spans(_plain(f"{number:032x}"), None, offset_ns=10**18) for number in range(1, 6)]
    for tree in trees:
        assert len(tree) == 7
        export.submit(tree)
    await export.stop(10)
    assert export.drops() == {"spans_queue_full": 21, "spans_export_failed": 0}
    assert sorted(kept) == sorted([f"{1:032x}"] * 7 + [f"{2:032x}"] * 7)
    export.submit(trees[0])
    assert export.drops()["spans_queue_full"] == 28, "after the end everything is lost, and counted"


@pytest.mark.parametrize(
    ("option", "environ", "expected"),
    [
        ("", {}, None),
        ("http://c:4318", {}, Target("http/protobuf", "http://c:4318/v1/traces")),
        ("http://c:4318/", {}, Target("http/protobuf", "http://c:4318/v1/traces")),
        ("http://c:4317", {}, Target("grpc", "http://c:4317")),
        ("grpc://c:99", {}, Target("grpc", "http://c:99")),
        ("grpcs://c:99", {}, Target("grpc", "https://c:99")),
        ("http://c:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, Target("grpc", "http://c:4318")),
        (
            "http://c:4317",
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            Target("http/protobuf", "http://c:4317/v1/traces"),
        ),
        (
            "",
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c/base"},
            Target("http/protobuf", "https://c/base/v1/traces"),
        ),
        (
            "",
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/t"},
            Target("http/protobuf", "http://b/t"),
        ),
        ("http://a", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b"}, Target("http/protobuf", "http://a/v1/traces")),
        ("http://a", {"OTEL_SDK_DISABLED": "true"}, None),
        ("http://a", {"OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_where_spans_go(option: str, environ: dict[str, str], expected: Target | None) -> None:
    assert target(option, environ) == expected


@pytest.mark.parametrize(
    ("option", "environ"),
    [("c:4318", {}), ("ftp://c", {}), ("http://", {}), ("http://c", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})],
)
def test_settings_that_make_no_sense_are_refused_at_the_start(option: str, environ: dict[str, str]) -> None:
    with pytest.raises(ExportConfigError):
        target(option, environ)


def test_a_password_in_the_url_is_not_shown() -> None:
    assert Target("http/protobuf", "http://user:pass@c:1/v1/traces").shown == "http://c:1/v1/traces"


def test_opentelemetry_is_not_imported_while_it_is_off() -> None:
    code = (
        "import asyncio, sys\n"
        "from telemetry.hub import Hub\n"
        "async def life():\n"
        "    hub = Hub(model='m'); await hub.start(); hub.metrics_text(); await hub.stop()\n"
        "asyncio.run(life())\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in ('opentelemetry', 'grpc')))"
    )
    environ = {"OTEL_SDK_DISABLED": "true", "PATH": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def _plain(trace_id: str) -> RequestRecord:
    return RequestRecord(
        request_id="r",
        outcome="stop",
        accepted_ns=0,
        finished_ns=15,
        states={"parse": 1, "tokenize": 2, "dispatch": 3, "decode": 4, "send": 5},
        model="tiny",
        route="/v1/chat/completions",
        status=200,
        trace_id=trace_id,
    )
