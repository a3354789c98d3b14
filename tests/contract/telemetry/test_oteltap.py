"""
Spans and metrics as a receiver sees them that has nothing in common with ours: oteltap, in Rust, over HTTP.
"""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

try:
    from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings
except (ImportError, OSError) as error:
    pytest.skip(f"oteltap, or its library for this machine, is not there: {error}", allow_module_level=True)

from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from telemetry import push
from telemetry.hub import Hub
from tests.contract.telemetry.otlp_sink import attributes
from tests.contract.telemetry.test_export import serve_one

pytestmark = pytest.mark.usefixtures("quick_export")
WAIT_S = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture
async def tap() -> AsyncIterator[tuple[OtelTapHttpProtobufReceiver, str]]:
    """The receiver, and its URL."""
    port = free_port()
    async with OtelTapHttpProtobufReceiver(OtelTapHttpProtobufReceiverSettings(http_port=port)) as receiver:
        yield receiver, f"http://127.0.0.1:{port}"


async def test_it_sees_the_whole_tree(tap: tuple[OtelTapHttpProtobufReceiver, str]) -> None:
    receiver, url = tap

    async def first(count: int) -> list[Span]:
        stream = receiver.stream_traces()
        return [await anext(stream) for _ in range(count)]

    seeing = asyncio.create_task(first(7))
    await asyncio.sleep(0)  # It is to listen before anything comes.
    told = Hub(model="tiny", otlp_endpoint=url)
    await told.start()
    record = serve_one(told)
    await told.stop()
    spans = await asyncio.wait_for(seeing, WAIT_S)
    root, chat, *phases = spans
    assert (root.name, chat.name) == ("POST /v1/chat/completions", "chat tiny")
    assert {span.trace_id.hex() for span in spans} == {record.trace_id}
    assert {phase.parent_span_id for phase in phases} == {chat.span_id} and chat.parent_span_id == root.span_id
    ends = [root.start_time_unix_nano, *(phase.end_time_unix_nano for phase in phases)]
    assert [phase.start_time_unix_nano for phase in phases] == ends[:-1], "phases touch"
    assert ends[-1] == root.end_time_unix_nano == root.start_time_unix_nano + record.finished_ns - record.accepted_ns
    assert attributes(root.attributes)["pellucid.sampled_because"] == "caller"


async def test_it_sees_the_metrics(
    tap: tuple[OtelTapHttpProtobufReceiver, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "PERIOD_S", 3600)
    receiver, url = tap

    def counted(metric: Metric) -> bool:
        return metric.name == "pellucid_requests_total" and any(point.as_int for point in metric.sum.data_points)

    waiting = asyncio.create_task(receiver.await_metric(counted, WAIT_S))
    await asyncio.sleep(0)  # It is to listen before anything comes.
    told = Hub(model="tiny", otlp_endpoint=url, otlp_metrics=True)
    await told.start()
    serve_one(told)
    await told.stop()
    metric = await waiting
    [point] = [point for point in metric.sum.data_points if point.as_int]
    assert point.as_int == 1 and metric.sum.is_monotonic
    assert attributes(point.attributes) == {"route": "/v1/chat/completions", "outcome": "stop", "status_class": "2xx"}
