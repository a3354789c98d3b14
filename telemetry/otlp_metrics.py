"""
Numbers of the catalogue as OTLP metrics.

A collector gets the names that `/metrics` has, so dashboards work on either: Prometheus, which receives OTLP, leaves
names alone that already end in their unit or in `_total`.  What the GenAI conventions name has the name that they give.
"""

from opentelemetry.sdk.metrics import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as SdkHistogram
from opentelemetry.sdk.metrics.export import Metric as SdkMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from telemetry import names
from telemetry.catalogue import CATALOGUE
from telemetry.numbers import Amount, Exemplar, Histogram, Labels, Numbers
from telemetry.vocabulary import Metric

_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "": "1"}
"""Units as UCUM has them."""


def metrics_data(
    numbers: Numbers, resource: Resource, scope: InstrumentationScope, *, at_ns: tuple[int, int]
) -> MetricsData:
    """All rows that have a number; `at_ns`: when counting began, and now."""
    metrics = [
        SdkMetric(
            name=names.OTLP_METRICS.get(metric.name, metric.name),
            description=metric.help,
            unit=_UNITS[metric.unit],
            data=data,
        )
        for metric in CATALOGUE
        if (data := _data(metric, numbers, at_ns)).data_points
    ]
    of_scope = ScopeMetrics(scope=scope, metrics=metrics, schema_url=names.SCHEMA_URL)
    return MetricsData([ResourceMetrics(resource=resource, scope_metrics=[of_scope], schema_url=names.SCHEMA_URL)])


def _data(metric: Metric, numbers: Numbers, at_ns: tuple[int, int]) -> Sum | Gauge | SdkHistogram:
    if metric.kind == "histogram":
        histograms = numbers.histograms.get(metric.name, {}).items()
        points = [_histogram(metric, labels, histogram, at_ns) for labels, histogram in histograms]
        return SdkHistogram(points, AggregationTemporality.CUMULATIVE)
    sums = [
        NumberDataPoint(_attributes(metric, labels), *at_ns, value=_value(metric, amount))
        for labels, amount in numbers.sums.get(metric.name, {}).items()
    ]
    if metric.kind == "gauge":
        return Gauge(sums)
    return Sum(sums, AggregationTemporality.CUMULATIVE, is_monotonic=True)


def _histogram(metric: Metric, labels: Labels, histogram: Histogram, at_ns: tuple[int, int]) -> HistogramDataPoint:
    return HistogramDataPoint(
        attributes=_attributes(metric, labels),
        start_time_unix_nano=at_ns[0],
        time_unix_nano=at_ns[1],
        count=sum(histogram.counts),
        sum=histogram.total / metric.divisor,
        bucket_counts=histogram.counts,
        explicit_bounds=metric.buckets,
        # Optional in OTLP and unknown here; the SDK's type forgets that.
        min=None,  # type: ignore[arg-type]
        max=None,  # type: ignore[arg-type]
        exemplars=[_exemplar(metric, exemplar) for exemplar in histogram.exemplars.values()],
    )


def _exemplar(metric: Metric, exemplar: Exemplar) -> SdkExemplar:
    ids = (int(exemplar.span_id, 16), int(exemplar.trace_id, 16))
    return SdkExemplar({}, exemplar.amount / metric.divisor, exemplar.at_ns, *ids)


def _attributes(metric: Metric, labels: Labels) -> dict[str, str]:
    return {names.OTLP_LABELS.get(label, label): value for label, value in zip(metric.labels, labels, strict=True)}


def _value(metric: Metric, amount: Amount) -> Amount:
    return amount / metric.divisor if metric.divisor != 1 else amount
