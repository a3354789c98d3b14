"""
Spans of a live gateway in front of the real engine shell, as a strict collector receives them.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from telemetry.spans import phases
from tests.contract.telemetry.otlp_sink import Collector, attributes, grpc_collector, http_collector
from tests.http.conftest import options_for
from tests.http.harness import MODEL, WEIGHTS, LiveGateway, ShellEngine

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


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
