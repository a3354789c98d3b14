"""
Metrics on the wire: the whole catalogue, with the numbers of `/metrics`, and a bad collector hurts nobody.
"""

import asyncio
from collections.abc import Iterable, Mapping

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint, Metric, NumberDataPoint

from telemetry import clock, hub, push
from telemetry.catalogue import CATALOGUE
from telemetry.export import ExportConfigError, Exports, Target, exports
from telemetry.hub import Hub
from telemetry.names import OTLP_LABELS, OTLP_METRICS
from telemetry.numbers import Numbers, exposition
from telemetry.push import OtlpMetrics
from tests.contract.telemetry.otlp_sink import Collector, attributes, grpc_collector, http_collector
from tests.contract.telemetry.test_export import Opener, both_protocols, serve_one
from tests.contract.telemetry.test_metrics import Series, _fixed, _view, read

pytestmark = pytest.mark.usefixtures("quick_export")
NOTHING: dict[str, str] = {}
SHOWN_LABELS = {name: label for label, name in OTLP_LABELS.items()}
SHOWN_METRICS = {name: metric for metric, name in OTLP_METRICS.items()}


def target_of(collector: Collector) -> Target:
    if collector.url.startswith("grpc"):
        return Target("grpc", collector.url.replace("grpc://", "http://"))
    return Target("http/protobuf", f"{collector.url}/v1/metrics")


def as_samples(metrics: Iterable[Metric]) -> Series:
    """What a collector has got, as `/metrics` would say it."""
    samples: Series = {}
    for metric in metrics:
        name = SHOWN_METRICS.get(metric.name, metric.name)
        for point in [*metric.sum.data_points, *metric.gauge.data_points]:
            samples[name, labels_of(point)] = point.as_int if point.HasField("as_int") else point.as_double
        for point in metric.histogram.data_points:
            counted = 0
            for bound, count in zip([*point.explicit_bounds, float("inf")], point.bucket_counts, strict=True):
                counted += count
                samples[f"{name}_bucket", labels_of(point) | {("le", f"{bound:g}")}] = counted
            samples[f"{name}_count", labels_of(point)] = point.count
            samples[f"{name}_sum", labels_of(point)] = point.sum
    return samples


def labels_of(point: NumberDataPoint | HistogramDataPoint) -> frozenset[tuple[str, str]]:
    named = attributes(point.attributes)
    return frozenset((SHOWN_LABELS.get(name, name), str(value)) for name, value in named.items())


def plain_bounds(series: Series) -> Series:
    """Each bound in one spelling."""
    return {
        (name, frozenset((label, f"{float(value):g}" if label == "le" else value) for label, value in labels)): amount
        for (name, labels), amount in series.items()
    }


@both_protocols
async def test_a_collector_gets_the_numbers_of_the_metrics_page(opened: Opener) -> None:
    numbers = _fixed().numbers(_view())

    async def look() -> Numbers:
        return numbers

    with opened("good") as collector:
        pushing = OtlpMetrics(target_of(collector), look, resource={"service.name": "pellucid"}, version="1")
        pushing.start()
        await pushing.stop(10)
        metrics = collector.wait_for_push(1)
    assert as_samples(metrics.values()) == plain_bounds(read(exposition(numbers)[0]))
    kinds = {SHOWN_METRICS.get(name, name): metric.WhichOneof("data") for name, metric in metrics.items()}
    expected = {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}
    assert kinds == {metric.name: expected[metric.kind] for metric in CATALOGUE if metric.name in kinds}
    missing = {metric.name for metric in CATALOGUE} - kinds.keys()
    assert not {name for name in missing if numbers.sums.get(name) or numbers.histograms.get(name)}
    assert metrics["gen_ai.server.request.duration"].unit == "s"
    assert collector.resource["service.name"] == "pellucid" and collector.scopes == {"pellucid"}


@both_protocols
async def test_the_hub_pushes_again_and_again_and_at_its_end(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "PERIOD_S", 0.05)
    with opened("good") as collector:
        told = Hub(model="tiny", version="0.1.0", otlp_endpoint=collector.url, otlp_metrics=True)
        await told.start()
        serve_one(told)
        await asyncio.to_thread(collector.wait_for_push, 2)
        started_ns = _start_ns(collector)
        serve_one(told, "r2")
        await told.stop()
        metrics = collector.wait_for_push(3)
        spans = collector.wait_for(14)
    samples = as_samples(metrics.values())
    requests = [amount for (name, labels), amount in samples.items() if name == "pellucid_requests_total" and amount]
    assert requests == [2]
    assert _start_ns(collector) == started_ns, "one beginning, as cumulative numbers have"
    exemplars = {
        (exemplar.trace_id, exemplar.span_id)
        for point in metrics["pellucid_request_duration_seconds"].histogram.data_points
        for exemplar in point.exemplars
    }
    assert exemplars and exemplars <= {(span.trace_id, span.span_id) for span in spans}
    assert collector.resource["service.version"] == "0.1.0"


def _start_ns(collector: Collector) -> int:
    started_ns: int = collector.metrics["pellucid_requests_total"].sum.data_points[0].start_time_unix_nano
    return started_ns


async def test_a_collector_that_refuses_is_spoken_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "PERIOD_S", 0.02)
    with http_collector("refusing") as collector:
        told = Hub(otlp_endpoint=collector.url, otlp_metrics=True)
        await told.start()
        await asyncio.to_thread(collector.asked.wait, 20)
        collector.mood = "good"
        await asyncio.to_thread(collector.wait_for_push, 2)
        await told.stop()
    said = [record.levelname for record in caplog.records if record.getMessage().startswith("metrics")]
    said = [level for level in said if level != "INFO"]  # Where they go: heard where another test has let it through.
    assert said == ["ERROR", "WARNING"]


@both_protocols
async def test_a_frozen_collector_is_asked_once_and_holds_up_nobody(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "PERIOD_S", 0.01)
    monkeypatch.setattr(hub, "FLUSH_S", 0.2)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    with opened("frozen") as collector:
        told = Hub(otlp_endpoint=collector.url, otlp_metrics=True)
        looks = 0

        async def look() -> Numbers:
            nonlocal looks
            looks += 1
            return Numbers()

        told.push_numbers(look)
        await told.start()
        assert await asyncio.to_thread(collector.asked.wait, 20)
        await asyncio.sleep(0.2)  # Twenty periods: nothing is there to be awaited that should not happen.
        assert looks == 1, "while one is under way there is no other"
        started_ns = clock.now_ns()
        await told.stop()
        assert clock.now_ns() - started_ns < 2_000_000_000


async def test_of_several_workers_only_the_first_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "PERIOD_S", 0.01)
    with grpc_collector() as collector:
        second = Hub(otlp_endpoint=collector.url, otlp_metrics=True, first=False)
        await second.start()
        serve_one(second)
        await second.stop()
        assert collector.wait_for(7), "it sends its spans"
    assert collector.pushes == 0


def test_where_metrics_go() -> None:
    def of(endpoint: str = "", *, metrics: bool = False, environ: Mapping[str, str] = NOTHING) -> Exports:
        return exports(endpoint=endpoint, metrics=metrics, trace_file="", trace_sample=1.0, environ=environ)

    assert of(endpoint="http://c:4318").metrics is None
    assert of(endpoint="http://c:4318", metrics=True).metrics == Target("http/protobuf", "http://c:4318/v1/metrics")
    assert of(endpoint="http://c:4317", metrics=True).metrics == Target("grpc", "http://c:4317")
    wanted = {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}
    assert of(environ=wanted).metrics == Target("http/protobuf", "http://a/v1/metrics")
    elsewhere = wanted | {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://b/m"}
    assert of(environ=elsewhere).metrics == Target("http/protobuf", "http://b/m")
    assert of(environ={"OTEL_METRICS_EXPORTER": "otlp"}).metrics is None, "nobody says where"
    assert of(metrics=True, environ={"OTEL_SDK_DISABLED": "true"}).metrics is None
    with pytest.raises(ExportConfigError, match="--otlp-endpoint"):
        of(metrics=True)
