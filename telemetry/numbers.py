"""
The numbers of the catalogue as one process has them, how those of several become one, and the text of them.

Gateway workers share a port, so a scrape reaches any of them and is to tell of all.  Each has ended requests of its
own, which add up.  But all of them hear of every engine step, as long as they live: of those each has seen a part, none
more than there were, and the largest number is nearest to the truth.  That holds for each bucket of a histogram too.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Exemplar as ShownExemplar
from prometheus_client.utils import floatToGoString

from telemetry.catalogue import CATALOGUE
from telemetry.vocabulary import NS_PER_S, Metric

Amount = int | float
"""Nanoseconds and the like, not yet divided: sums are exact."""
Labels = tuple[str, ...]


class Exemplar(msgspec.Struct, frozen=True, array_like=True):
    """One observation that has a trace, which somebody keeps."""

    amount: Amount
    at_ns: int
    """Of the wall clock."""
    trace_id: str
    span_id: str


class Histogram(msgspec.Struct, array_like=True):
    """Observations of one series: how many fell into each bucket, their exact sum, and the last that have a trace."""

    counts: list[int]
    total: Amount = 0
    exemplars: dict[int, Exemplar] = {}
    """By the number of the bucket."""


class Numbers(msgspec.Struct, frozen=True):
    """By metric and label values."""

    sums: dict[str, dict[Labels, Amount]] = {}
    histograms: dict[str, dict[Labels, Histogram]] = {}

    def counted(self) -> "Numbers":
        """Without what was only true at its time, or is nothing of its own: all that is left of one that has died."""
        seen = {metric.name for metric in CATALOGUE if metric.kind == "gauge" or metric.absolute}
        return Numbers({name: series for name, series in self.sums.items() if name not in seen}, self.histograms)


def join(several: Sequence[Numbers]) -> Numbers:
    """One from those of several processes.  Where only one can be believed it is the first that says something."""
    sums: dict[str, dict[Labels, Amount]] = {}
    histograms: dict[str, dict[Labels, Histogram]] = {}
    for metric in CATALOGUE:
        for numbers in several:
            for labels, amount in numbers.sums.get(metric.name, {}).items():
                series = sums.setdefault(metric.name, {})
                series[labels] = _joined(metric, series[labels], amount) if labels in series else amount
            for labels, histogram in numbers.histograms.get(metric.name, {}).items():
                found = histograms.setdefault(metric.name, {})
                found[labels] = _joined_histogram(metric, found[labels], histogram) if labels in found else histogram
    return Numbers(sums, histograms)


def _joined(metric: Metric, one: Amount, other: Amount) -> Amount:
    match metric.join:
        case "sum":
            return one + other
        case "most":
            return max(one, other)
        case "least":
            return min(one, other)
        case "first":
            return one


def _joined_histogram(metric: Metric, one: Histogram, other: Histogram) -> Histogram:
    counts = [_joined(metric, *pair) for pair in zip(one.counts, other.counts, strict=True)]
    exemplars = one.exemplars | {
        bucket: exemplar
        for bucket, exemplar in other.exemplars.items()
        if bucket not in one.exemplars or one.exemplars[bucket].at_ns < exemplar.at_ns
    }
    return Histogram([int(count) for count in counts], _joined(metric, one.total, other.total), exemplars)


def exposition(numbers: Numbers, accept: str = "") -> tuple[bytes, str]:
    """The text in the format that the Accept header asks for, and its content type."""
    encode, content_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(numbers))
    return encode(registry), content_type


class _Families:
    """A collector, as prometheus-client knows them."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Family]:
        """All metrics of the catalogue, in its order."""
        for metric in CATALOGUE:
            if metric.kind == "histogram":
                yield self._histograms(metric)
            else:
                yield self._sums(metric)

    def _sums(self, metric: Metric) -> Family:
        make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = make(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
        for labels, amount in self._numbers.sums.get(metric.name, {}).items():
            family.add_metric(labels, amount / metric.divisor if metric.divisor != 1 else amount)
        return family

    def _histograms(self, metric: Metric) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        for labels, histogram in self._numbers.histograms.get(metric.name, {}).items():
            cumulative = zip(bounds, accumulate(histogram.counts), strict=True)
            buckets = [
                (bound, count, _shown(metric, histogram.exemplars[number]))
                if number in histogram.exemplars
                else (bound, count)
                for number, (bound, count) in enumerate(cumulative)
            ]
            family.add_metric(labels, buckets, histogram.total / metric.divisor)
        return family


def _shown(metric: Metric, exemplar: Exemplar) -> ShownExemplar:
    """As OpenMetrics has them; in the older format they are left out."""
    labels = {"trace_id": exemplar.trace_id, "span_id": exemplar.span_id}
    return ShownExemplar(labels, exemplar.amount / metric.divisor, exemplar.at_ns / NS_PER_S)
