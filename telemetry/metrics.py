"""
Turns records into the numbers of the catalogue, and the numbers into the text that Prometheus reads.

Amounts are kept as integers and divided at the scrape.  There is no global registry and no state outside `Metrics`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate, product

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

from telemetry.catalogue import CATALOGUE
from telemetry.records import RequestRecord, StepRecord
from telemetry.vocabulary import LABELS, OTHER, Metric, Points, View

_NAMES_MAX = 64
"""Models and replicas that get labels of their own."""


class _Histogram:
    """Observations of one series: how many fell into each bucket, and their exact sum."""

    __slots__ = ("counts", "total")

    def __init__(self, bucket_count: int) -> None:
        self.counts = [0] * (bucket_count + 1)
        self.total: int | float = 0


class Metrics:
    """The state behind `/metrics`."""

    def __init__(self, *, models: Iterable[str] = ()) -> None:
        self.models = frozenset(models)
        self._sums: dict[str, dict[tuple[str, ...], int | float]] = {metric.name: {} for metric in CATALOGUE}
        self._histograms: dict[str, dict[tuple[str, ...], _Histogram]] = {metric.name: {} for metric in CATALOGUE}
        self._by_name = {metric.name: metric for metric in CATALOGUE}
        self._of_request = [metric for metric in CATALOGUE if metric.of_request is not None]
        self._of_step = [metric for metric in CATALOGUE if metric.of_step is not None]
        self._view = View()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        for metric in CATALOGUE:
            if metric.zeros:
                self._begin(metric)

    def request(self, record: RequestRecord) -> None:
        """Count one ended request."""
        for metric in self._of_request:
            assert metric.of_request is not None
            self._take(metric, metric.of_request(record))

    def step(self, record: StepRecord) -> None:
        """Count one engine step."""
        for metric in self._of_step:
            assert metric.of_step is not None
            self._take(metric, metric.of_step(record))

    def feed(self, name: str, labels: tuple[str, ...], amount: int | float) -> None:
        """Add to a metric that no record holds."""
        self._take(self._by_name[name], [(labels, amount)])

    def text(self, view: View, accept: str = "") -> tuple[bytes, str]:
        """All metrics in the format that the Accept header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        self._view = view
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Family]:
        """What prometheus-client asks its collectors for."""
        for metric in CATALOGUE:
            if metric.kind == "histogram":
                yield self._histogram_family(metric)
            else:
                yield self._sum_family(metric)

    def _begin(self, metric: Metric) -> None:
        for labels in product(*(LABELS[label] for label in metric.labels)):
            if metric.kind == "histogram":
                self._histograms[metric.name][labels] = _Histogram(len(metric.buckets))
            else:
                self._sums[metric.name][labels] = 0

    def _take(self, metric: Metric, points: Points) -> None:
        if metric.kind == "histogram":
            for raw, amount in points:
                histogram = self._histogram(metric, raw)
                histogram.counts[bisect_left(metric.buckets, amount / metric.divisor)] += 1
                histogram.total += amount
            return
        series = self._sums[metric.name]
        for raw, amount in points:
            # What is there already has been held against the vocabulary.
            labels = raw if raw in series else self._closed(metric, raw)
            series[labels] = series.get(labels, 0) + amount

    def _histogram(self, metric: Metric, raw: tuple[str, ...]) -> _Histogram:
        series = self._histograms[metric.name]
        histogram = series.get(raw)
        if histogram is None:
            histogram = series.setdefault(self._closed(metric, raw), _Histogram(len(metric.buckets)))
        return histogram

    def _closed(self, metric: Metric, values: tuple[str, ...]) -> tuple[str, ...]:
        """The same label values, with strangers replaced: nobody can make series by sending new words."""
        return tuple(
            value if self._is_known(label, value) else OTHER for label, value in zip(metric.labels, values, strict=True)
        )

    def _is_known(self, label: str, value: str) -> bool:
        vocabulary = LABELS.get(label)
        if vocabulary is not None:
            return value in vocabulary
        if label == "replica":
            return value.isdecimal() and len(value) <= 2 and int(value) < _NAMES_MAX
        return label == "version" or value in self.models

    def _sum_family(self, metric: Metric) -> Family:
        make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = make(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
        series = self._sums[metric.name]
        if metric.of_view is not None:
            # The present alone counts: a view replaces what an earlier one said, so nothing can freeze.
            series = dict.fromkeys(series, 0) if metric.zeros else {}
            for raw, amount in metric.of_view(self._view):
                labels = self._closed(metric, raw)
                series[labels] = series.get(labels, 0) + amount
        for labels, amount in series.items():
            family.add_metric(labels, amount / metric.divisor if metric.divisor != 1 else amount)
        return family

    def _histogram_family(self, metric: Metric) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        for labels, histogram in self._histograms[metric.name].items():
            cumulative = accumulate(histogram.counts)
            family.add_metric(labels, list(zip(bounds, cumulative, strict=True)), histogram.total / metric.divisor)
        return family
