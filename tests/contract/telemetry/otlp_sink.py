"""
An OpenTelemetry collector for tests, over HTTP or gRPC: strict where real ones are lenient, and able to misbehave.

It knows nothing of the exporter but the wire: opentelemetry-proto decodes what arrives.
"""

import gzip
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Mood = Literal["good", "refusing", "frozen"]
Value = str | bool | int | float | list["Value"]


class Collector:
    """What has arrived, and whether it was as the protocol wants it."""

    def __init__(self, mood: Mood = "good") -> None:
        self.mood = mood
        self.url = ""
        self.spans: list[Span] = []
        self.metrics: dict[str, Metric] = {}
        """What came last, by name."""
        self.pushes = 0
        self.resource: dict[str, Value] = {}
        self.scopes: set[str] = set()
        self.faults: list[str] = []
        self.asked = threading.Event()
        """Somebody has begun to send."""
        self.thaw = threading.Event()
        self._arrived = threading.Condition()

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        """Keep the spans of one request, and note what is wrong with them."""
        with self._arrived:
            for resource_spans in request.resource_spans:
                self.resource = attributes(resource_spans.resource.attributes)
                for scope_spans in resource_spans.scope_spans:
                    self.scopes.add(scope_spans.scope.name)
                    for span in scope_spans.spans:
                        self.faults += _faults(span, {other.span_id for other in self.spans})
                        self.spans.append(span)
            self._arrived.notify_all()

    def take_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        """Keep the metrics of one push, and note what is wrong with them."""
        with self._arrived:
            for resource_metrics in request.resource_metrics:
                self.resource = attributes(resource_metrics.resource.attributes)
                for scope_metrics in resource_metrics.scope_metrics:
                    self.scopes.add(scope_metrics.scope.name)
                    names = [metric.name for metric in scope_metrics.metrics]
                    if len(set(names)) < len(names):
                        self.faults.append("a metric comes twice in one push")
                    for metric in scope_metrics.metrics:
                        self.faults += _metric_faults(metric)
                        self.metrics[metric.name] = metric
            self.pushes += 1
            self._arrived.notify_all()

    def wait_for_push(self, count: int, timeout_s: float = 20.0) -> dict[str, Metric]:
        """The metrics, once they have come `count` times and all were well formed."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.pushes >= count, timeout_s), "no metrics came"
            assert not self.faults, self.faults
            return dict(self.metrics)

    def wait_for(self, count: int, timeout_s: float = 20.0) -> list[Span]:
        """The spans, once there are `count` of them and all were well formed."""
        return self.wait_until(lambda spans: len(spans) >= count, timeout_s)

    def wait_until(self, enough: Callable[[list[Span]], bool], timeout_s: float = 20.0) -> list[Span]:
        """The spans, once they are what the test waits for and all were well formed; a batch comes whole."""
        with self._arrived:
            arrived = self._arrived.wait_for(lambda: enough(self.spans), timeout_s)
            assert arrived, f"there are {len(self.spans)} spans after {timeout_s} s, not what the test waits for"
            assert not self.faults, self.faults
            return list(self.spans)


def attributes(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    """Attributes as a dict; a key that is there twice is an error."""
    found: dict[str, Value] = {}
    for pair in pairs:
        assert pair.key not in found, f"attribute {pair.key} is there twice"
        found[pair.key] = _value(pair.value)
    return found


def _value(value: AnyValue) -> Value:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "array_value":
            return [_value(inner) for inner in value.array_value.values]
    raise AssertionError(f"an attribute of no known kind: {value}")


def _faults(span: Span, seen: set[bytes]) -> list[str]:
    checks = {
        "a trace id has 16 bytes, not all zero": len(span.trace_id) == 16 and any(span.trace_id),
        "a span id has 8 bytes, not all zero": len(span.span_id) == 8 and any(span.span_id),
        "a parent id has 8 bytes or none": len(span.parent_span_id) in (0, 8),
        "a span id comes once": span.span_id not in seen,
        "a span has a name": bool(span.name),
        "a span ends no earlier than it starts": 0 < span.start_time_unix_nano <= span.end_time_unix_nano,
        "a span has a kind": span.kind != Span.SPAN_KIND_UNSPECIFIED,
        "nothing was dropped": span.dropped_attributes_count == 0,
    }
    attributes(span.attributes)
    for link in span.links:
        checks["a link leads to a span"] = len(link.trace_id) == 16 and len(link.span_id) == 8 and any(link.span_id)
    return [f"{span.name}: {rule}" for rule, kept in checks.items() if not kept]


def _metric_faults(metric: Metric) -> list[str]:
    checks = {"a metric has a name and a unit": bool(metric.name and metric.unit)}
    match metric.WhichOneof("data"):
        case "gauge":
            points: Iterable[NumberDataPoint | HistogramDataPoint] = metric.gauge.data_points
        case "sum":
            points = metric.sum.data_points
            cumulative = metric.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
            checks["a sum is cumulative and only grows"] = cumulative and metric.sum.is_monotonic
        case "histogram":
            points = metric.histogram.data_points
            temporality = metric.histogram.aggregation_temporality
            checks["a histogram is cumulative"] = temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
            for point in metric.histogram.data_points:
                checks |= _histogram_checks(point)
        case other:
            raise AssertionError(f"{metric.name} is of no known kind: {other}")
    series = [tuple(sorted(attributes(point.attributes).items(), key=str)) for point in points]
    checks["a metric has points, each series once"] = len(set(series)) == len(series) > 0
    checks["a point has a time behind its start"] = all(
        0 < point.start_time_unix_nano <= point.time_unix_nano or metric.HasField("gauge") for point in points
    )
    return [f"{metric.name}: {rule}" for rule, kept in checks.items() if not kept]


def _histogram_checks(point: HistogramDataPoint) -> dict[str, bool]:
    bounds = [-math.inf, *point.explicit_bounds, math.inf]
    return {
        "there is one bucket more than bounds": len(point.bucket_counts) == len(point.explicit_bounds) + 1,
        "bounds ascend": bounds == sorted(set(bounds)),
        "buckets sum to the count": sum(point.bucket_counts) == point.count,
        "exemplars have a trace": all(len(one.trace_id) == 16 and len(one.span_id) == 8 for one in point.exemplars),
    }


@contextmanager
def http_collector(mood: Mood = "good") -> Iterator[Collector]:
    """A collector for OTLP over HTTP."""
    collector = Collector(mood)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.asked.set()
            if collector.mood == "frozen":
                collector.thaw.wait(60)
            self.send_response(self._status(body))
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def _status(self, body: bytes) -> int:
            if collector.mood == "refusing":
                return 400
            if self.path not in ("/v1/traces", "/v1/metrics"):
                collector.faults.append(f"path {self.path}")
                return 404
            if self.headers["content-type"] != "application/x-protobuf":
                collector.faults.append(f"content type {self.headers['content-type']}")
                return 415
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            try:
                if self.path == "/v1/traces":
                    collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
                else:
                    collector.take_metrics(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
            except DecodeError as error:
                collector.faults.append(f"not protobuf: {error}")
                return 400
            return 200

        def log_message(self, format: str, *args: object) -> None:
            """Silence: pytest shows failures."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        collector.thaw.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


@contextmanager
def grpc_collector(mood: Mood = "good") -> Iterator[Collector]:
    """A collector for OTLP over gRPC."""
    collector = Collector(mood)

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(
            self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
        ) -> trace_service_pb2.ExportTraceServiceResponse:
            _behave(collector, context)
            collector.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    class MetricsServicer(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(
            self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
        ) -> metrics_service_pb2.ExportMetricsServiceResponse:
            _behave(collector, context)
            collector.take_metrics(request)
            return metrics_service_pb2.ExportMetricsServiceResponse()

    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(MetricsServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        collector.url = f"grpc://127.0.0.1:{port}"
        try:
            yield collector
        finally:
            collector.thaw.set()
            server.stop(0).wait(5)


def _behave(collector: Collector, context: grpc.ServicerContext) -> None:
    collector.asked.set()
    if collector.mood == "frozen":
        collector.thaw.wait(60)
    if collector.mood == "refusing":
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
