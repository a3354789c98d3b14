"""
Turns records into the numbers of the catalogue.

Amounts are kept as integers and divided at the scrape.  There is no global registry and no state outside `Metrics`.
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import product

from telemetry.catalogue import CATALOGUE
from telemetry.numbers import Amount, Exemplar, Histogram, Labels, Numbers, exposition
from telemetry.records import RequestRecord, StepRecord
from telemetry.vocabulary import LABELS, OTHER, Metric, Points, View

_NAMES_MAX = 64
"""Replicas that get labels of their own."""


class Metrics:
    """The state behind `/metrics`."""

    def __init__(self, *, models: Iterable[str] = ()) -> None:
        self.models = frozenset(models)
        self.upstreams: frozenset[str] = frozenset()
        self._sums: dict[str, dict[Labels, Amount]] = {metric.name: {} for metric in CATALOGUE}
        self._histograms: dict[str, dict[Labels, Histogram]] = {metric.name: {} for metric in CATALOGUE}
        self._by_name = {metric.name: metric for metric in CATALOGUE}
        self._of_request = [metric for metric in CATALOGUE if metric.of_request is not None]
        self._of_step = [metric for metric in CATALOGUE if metric.of_step is not None]
        for metric in CATALOGUE:
            if metric.zeros:
                self._begin(metric)

    def learn(self, *, models: Iterable[str], upstreams: Iterable[str]) -> None:
        """More values that labels may have."""
        self.models |= frozenset(models)
        self.upstreams |= frozenset(upstreams)

    def request(self, record: RequestRecord) -> None:
        """Count one ended request."""
        for metric in self._of_request:
            assert metric.of_request is not None
            self._take(metric, metric.of_request(record))

    def exemplify(self, record: RequestRecord, *, trace_id: str, span_id: str, at_ns: int) -> None:
        """The trace of a request that has been counted is kept: show people the way to it."""
        for metric in self._of_request:
            if metric.exemplars:
                assert metric.of_request is not None
                for raw, amount in metric.of_request(record):
                    bucket = bisect_left(metric.buckets, amount / metric.divisor)
                    self._histogram(metric, raw).exemplars[bucket] = Exemplar(amount, at_ns, trace_id, span_id)

    def step(self, record: StepRecord) -> None:
        """Count one engine step."""
        for metric in self._of_step:
            assert metric.of_step is not None
            self._take(metric, metric.of_step(record))

    def feed(self, name: str, labels: tuple[str, ...], amount: int | float) -> None:
        """Add to a metric that no record holds."""
        self._take(self._by_name[name], [(labels, amount)])

    def numbers(self, view: View) -> Numbers:
        """All of them, as they are now."""
        sums = {
            metric.name: self._sums[metric.name] if metric.of_view is None else self._seen(metric, view)
            for metric in CATALOGUE
        }
        return Numbers(sums, self._histograms)

    def text(self, view: View, accept: str = "") -> tuple[bytes, str]:
        """The same in the format that the Accept header asks for, and its content type."""
        return exposition(self.numbers(view), accept)

    def resume(self, numbers: Numbers) -> None:
        """Count on from where another life of this process was; nothing has been counted yet."""
        counted = numbers.counted()
        for name, series in counted.sums.items():
            self._sums[name] |= series
        for name, histograms in counted.histograms.items():
            self._histograms[name] |= histograms

    def _begin(self, metric: Metric) -> None:
        for labels in product(*(metric.zeros_of.get(label, LABELS[label]) for label in metric.labels)):
            if metric.kind == "histogram":
                self._histograms[metric.name][labels] = Histogram([0] * (len(metric.buckets) + 1))
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

    def _histogram(self, metric: Metric, raw: tuple[str, ...]) -> Histogram:
        series = self._histograms[metric.name]
        histogram = series.get(raw)
        if histogram is None:
            histogram = series.setdefault(self._closed(metric, raw), Histogram([0] * (len(metric.buckets) + 1)))
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
        if label == "upstream":
            return value in self.upstreams
        return label == "version" or value in self.models

    def _seen(self, metric: Metric, view: View) -> dict[Labels, Amount]:
        """The present alone counts, beside what a former life has counted: a gauge cannot freeze."""
        assert metric.of_view is not None
        series = dict(self._sums[metric.name])
        for raw, amount in metric.of_view(view):
            labels = self._closed(metric, raw)
            series[labels] = series.get(labels, 0) + amount
        return series
