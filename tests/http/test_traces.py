"""
Spans of a live gateway in front of the real engine shell, as a strict collector receives them.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from telemetry import step_traces
from telemetry.spans import Link, phases
from tests.contract.telemetry.otlp_sink import Collector, attributes, grpc_collector, http_collector
from tests.contract.telemetry.test_metrics import read, total
from tests.contract.telemetry.trees import received, roots
from tests.http.conftest import options_for
from tests.http.harness import MODEL, WEIGHTS, LiveGateway, ShellEngine

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

SPANS_LOST = ("spans_queue_full", "spans_export_failed")
"""Others count what other tests have lost in this process."""


@pytest.fixture(params=["http", "grpc"])
def traced(
    request: pytest.FixtureRequest, model_dir: Path, vocab_size: int, socket_path: str
) -> Iterator[tuple[LiveGateway, Collector]]:
    """A gateway whose spans are collected."""
    collector = http_collector if request.param == "http" else grpc_collector
    with collector() as sink:
        engine = ShellEngine(socket_path, vocab_size=vocab_size)
        engine.start()
        endpoint = sink.url if request.param == "http" else sink.url.replace("http://", "grpc://")
        gateway = LiveGateway(msgspec.structs.replace(options_for(model_dir, socket_path), otlp_endpoint=endpoint))
        gateway.start()
        yield gateway, sink
        gateway.stop()
        engine.stop()


def test_one_request_is_one_whole_tree_under_its_caller(traced: tuple[LiveGateway, Collector]) -> None:
    gateway, sink = traced
    body = {"model": MODEL, "messages": [{"role": "user", "content": "secret words"}], "max_tokens": 5}
    answer = gateway.client.post("/v1/chat/completions", json=body, headers={"traceparent": CALLER})
    assert answer.status_code == 200
    record = gateway.record(answer.json()["id"])
    spans = sink.wait_for(2 + len(record.states))
    assert {span.trace_id.hex() for span in spans} == {"0af7651916cd43dd8448eb211c80319c"}
    server = next(span for span in spans if span.kind == Span.SPAN_KIND_SERVER)
    assert server.parent_span_id.hex() == "b7ad6b7169203331"
    chat = next(span for span in spans if span.parent_span_id == server.span_id and span.name.startswith("chat "))
    phases = [span for span in spans if span.span_id not in (server.span_id, chat.span_id)]
    assert sum(span.end_time_unix_nano - span.start_time_unix_nano for span in phases) == record.finished_ns - (
        record.accepted_ns
    )
    assert attributes(chat.attributes)["gen_ai.usage.output_tokens"] == record.output_tokens
    weights = {name: value for name, value in attributes(chat.attributes).items() if "quantization" in name}
    assert weights == {
        "pellucid.quantization.scheme": "gptq-4bit-g64",
        "pellucid.quantization.bits": 4,
        "pellucid.quantization.group_size": 64,
    }
    assert attributes(chat.attributes)["pellucid.model.origin"] == WEIGHTS.origin
    assert "secret" not in "".join(str(span) for span in spans)


def test_a_span_has_the_method_and_path_of_its_request(traced: tuple[LiveGateway, Collector]) -> None:
    gateway, sink = traced
    answers = [gateway.client.get(path) for path in ("/v1/models", f"/v1/models/{MODEL}", "/v1/chat/completions")]
    assert [answer.status_code for answer in answers] == [200, 200, 405]
    records = [gateway.record(answer.headers["x-request-id"]) for answer in answers]
    spans = sink.wait_for(sum(1 + len(phases(record)) for record in records) + len(["chat"]))
    servers = {span.name: attributes(span.attributes) for span in spans if span.kind == Span.SPAN_KIND_SERVER}
    assert {name: (named["http.request.method"], named["url.path"]) for name, named in servers.items()} == {
        "GET /v1/models": ("GET", "/v1/models"),
        "GET /v1/models/{id}": ("GET", f"/v1/models/{MODEL}"),
        "GET /v1/chat/completions": ("GET", "/v1/chat/completions"),
    }


def test_steps_and_requests_lead_to_each_other(
    traced: tuple[LiveGateway, Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_traces, "STEPS_PER_SHARE", 1)  # each step has a trace, as far as BURST_MAX
    gateway, sink = traced
    body = {"model": MODEL, "prompt": "some words", "max_tokens": 4, "ignore_eos": True}
    answer = gateway.client.post("/v1/completions", json=body)
    record = gateway.record(answer.json()["id"])
    assert record.kv_worst is not None
    pieces = [
        received(span)
        for span in sink.wait_until(lambda spans: any(span.kind == Span.SPAN_KIND_SERVER for span in spans))
    ]
    root = roots(pieces)[record.request_id]
    steps = {piece.span_id: piece for piece in pieces if piece.name == "engine step"}
    assert len(steps) == record.steps == 4
    assert {step.links for step in steps.values()} == {(Link(root.trace_id, root.span_id),)}
    [chat] = [piece for piece in pieces if piece.parent_id == root.span_id]
    assert len(chat.links) == step_traces.SLOWEST_MAX
    slowest = [steps[link.span_id] for link in chat.links]
    lasted = [step.ended_ns - step.started_ns for step in slowest]
    assert lasted == sorted(lasted, reverse=True) and chat.attributes["pellucid.steps.slowest_ns"] == lasted[0]
    assert chat.attributes["pellucid.steps.slowest"] == [f"0/{step.attributes['pellucid.step.id']}" for step in slowest]
    assert {step.attributes["pellucid.step.tokens"] for step in steps.values()} == {1, record.prompt_tokens}
    last = max(steps.values(), key=lambda step: step.ended_ns)
    used = {step is last: step.attributes["pellucid.kv.utilization"] for step in steps.values()}
    assert used == {True: 0.0, False: record.kv_worst.utilization}, "its blocks are free again after the last"


def test_how_full_the_pool_was_is_told(traced: tuple[LiveGateway, Collector]) -> None:
    gateway, sink = traced
    answer = gateway.client.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 4})
    record = gateway.record(answer.json()["id"])
    assert record.kv_at_admission is not None and record.kv_worst is not None and record.kv_at_end is not None
    spans = sink.wait_for(2 + len(phases(record)))
    [chat] = [span for span in spans if span.name.startswith("text_completion")]
    told = attributes(chat.attributes)
    readings = {"at_admission": record.kv_at_admission, "worst": record.kv_worst, "at_end": record.kv_at_end}
    for when, reading in readings.items():
        assert told[f"pellucid.kv.{when}.utilization"] == reading.utilization
        assert told[f"pellucid.kv.{when}.token_occupancy"] == reading.token_occupancy
        assert told[f"pellucid.kv.{when}.internal_fragmentation"] == reading.internal_fragmentation
    assert told["pellucid.interconnect.wait_max_ns"] == 0


@pytest.mark.parametrize("place", ["frozen", "gone", "refusing"])
def test_a_bad_collector_costs_no_request_and_what_it_loses_is_counted(
    model_dir: Path, vocab_size: int, socket_path: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.hub.FLUSH_S", 0.2)
    monkeypatch.setattr("telemetry.otlp.QUEUE_SPANS_MAX", 100)
    monkeypatch.setattr("telemetry.otlp.BATCH_SPANS_MAX", 50)
    monkeypatch.setattr("telemetry.otlp.BATCH_PERIOD_S", 0.02)
    with http_collector("refusing" if place == "refusing" else "frozen") as sink:
        endpoint = "http://127.0.0.1:9" if place == "gone" else sink.url
        engine = ShellEngine(socket_path, vocab_size=vocab_size)
        engine.start()
        gateway = LiveGateway(msgspec.structs.replace(options_for(model_dir, socket_path), otlp_endpoint=endpoint))
        gateway.start()
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
        for _ in range(60):
            assert gateway.client.post("/v1/completions", json=body).status_code == 200
        series = read(gateway.client.get("/metrics").content)
        lost = sum(total(series, "pellucid_telemetry_drops_total", reason=reason) for reason in SPANS_LOST)
        pending = total(series, "pellucid_telemetry_pending_spans")
        assert lost + pending == gateway.hub.trees.spans > 60 * 4
        assert lost > 0 and pending <= 100 + 50, "a full queue, and what is being sent"
        gateway.stop()
        engine.stop()
