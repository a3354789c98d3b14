"""
PromQL from rows of the metric catalogue: a small vocabulary, and `check`, which knows every name and label value.

Divisors are guarded: where nothing has happened there is no share and no quantile, rather than NaN or a made-up zero.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from telemetry.catalogue import CATALOGUE
from telemetry.vocabulary import DEPLOYMENT_LABELS, LABELS, Metric

Where = str | tuple[str, ...]
"""The value of a label, or several; one value with `!` before it: any but this."""

OF_PROMETHEUS = {"up": ("job", "instance"), "ALERTS": ("job", "instance", "alertname", "alertstate", "severity")}
"""Series that Prometheus makes, and their labels."""
_BY_SERIES: dict[str, Metric] = {
    metric.name + suffix: metric
    for metric in CATALOGUE
    for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}
_TARGET_LABELS = ("job", "instance")
_WORDS = frozenset({"and", "or", "unless", "bool", "offset"})
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SERIES = re.compile(r'(?<![\w.$])([a-zA-Z_:][\w:]*)(\s*\{(?:[^"}]|"[^"]*")*\})?(?!\w|\s*\()')
_MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*(?:,|$)')


class PromqlError(Exception):
    """An expression speaks of what the catalogue, its labels or their vocabularies do not have: a bug of ours."""


def share(part: str, whole: str, *, each: str = "") -> str:
    """`part` of `whole`; nothing where that is none.  each: the label by which `part` is split, and `whole` is not."""
    matching = f"ignoring ({each}) group_left () " if each else ""
    return f"{part} / {matching}({whole} > 0)"


@dataclass(frozen=True, slots=True)
class Scope:
    """Of which series an expression speaks, and over how long."""

    window: str
    """Of rates: 5m, or a variable of Grafana."""
    matcher: str = ""
    """What each selector has beside its own matchers."""
    kept: tuple[str, ...] = ()
    """Labels that every sum keeps."""

    def select(self, series: str, **where: Where) -> str:
        """The series of that name."""
        matchers = [self.matcher] if self.matcher else []
        for label, value in where.items():
            if isinstance(value, tuple):
                matchers.append(f'{label}=~"{"|".join(value)}"')
            else:
                matchers.append(f'{label}{"!=" if value.startswith("!") else "="}"{value.removeprefix("!")}"')
        return series + (f"{{{', '.join(matchers)}}}" if matchers else "")

    def rate(self, counter: str, *by: str, **where: Where) -> str:
        """How much a second."""
        return self._over("sum", by, f"rate({self.select(counter, **where)}[{self.window}])")

    def increase(self, counter: str, *by: str, **where: Where) -> str:
        """How much in the window."""
        return self._over("sum", by, f"increase({self.select(counter, **where)}[{self.window}])")

    def now(self, gauge: str, *by: str, how: str = "sum", **where: Where) -> str:
        """What it is; how: sum, min, max or avg of those that are alike in `by`."""
        return self._over(how, by, self.select(gauge, **where))

    def quantile(self, q: float, histogram: str, *by: str, **where: Where) -> str:
        """The value that the share `q` of observations does not exceed."""
        # Without an observation it is NaN, which is not greater than anything.
        return f"histogram_quantile({q}, {self.rate(f'{histogram}_bucket', 'le', *by, **where)}) >= 0"

    def mean(self, histogram: str, *by: str, **where: Where) -> str:
        """Of the observations."""
        return share(self.rate(f"{histogram}_sum", *by, **where), self.rate(f"{histogram}_count", *by, **where))

    def within(self, histogram: str, bound: float, *by: str, **where: Where) -> str:
        """The share of observations of at most `bound`, which is a bound of its buckets: no interpolation."""
        good = self.rate(f"{histogram}_bucket", *by, le=str(float(bound)), **where)
        return share(good, self.rate(f"{histogram}_count", *by, **where))

    def above(self, histogram: str, bound: float, *by: str, **where: Where) -> str:
        """The share of observations of more than `bound`."""
        return f"1 - {self.within(histogram, bound, *by, **where)}"

    def _over(self, how: str, by: tuple[str, ...], inner: str) -> str:
        labels = (*self.kept, *by)
        return f"{how} by ({', '.join(labels)}) ({inner})" if labels else f"{how}({inner})"


def check(expression: str, recorded: Mapping[str, tuple[str, ...]] | None = None) -> frozenset[str]:
    """
    The metrics of the catalogue in an expression.  Raises PromqlError.

    Args:
        expression: PromQL, with variables of Grafana.
        recorded: names that recording rules give, and the labels behind them.
    """
    labels: set[str] = set()
    metrics = set()
    grouped = [label.strip() for inner in _GROUPING.findall(expression) for label in inner.split(",") if label.strip()]
    bare = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub("", expression))
    for name, selector in _SERIES.findall(bare):
        if name in _WORDS:
            continue
        metric, known = _known(name, recorded or {})
        labels |= known
        if metric is not None:
            metrics.add(metric.name)
        for label, value in _matched(selector.strip()):
            if label not in known:
                raise PromqlError(f"{name} has no label {label}: {expression}")
            if not _may_be(label, value, metric):
                raise PromqlError(f"{label}={value!r} is no value that {name} has: {expression}")
    if strangers := set(grouped) - labels:
        raise PromqlError(f"nothing has the label {', '.join(sorted(strangers))}: {expression}")
    return frozenset(metrics)


def labels_of(expression: str) -> frozenset[str]:
    """Labels that the result may have: those of its groupings, or of its only series."""
    groupings = re.findall(r"\bby\s*\(([^)]*)\)", expression)
    return frozenset(label.strip() for inner in groupings for label in inner.split(",")) - {"le"}


def _known(name: str, recorded: Mapping[str, tuple[str, ...]]) -> tuple[Metric | None, set[str]]:
    """The metric behind a series, None if it is not ours, and the labels that it has."""
    if name in recorded:
        return None, {*_TARGET_LABELS, *recorded[name]}
    if name in OF_PROMETHEUS:
        return None, {*OF_PROMETHEUS[name]}
    if name not in _BY_SERIES:
        raise PromqlError(f"no metric of the catalogue has the series {name}")
    metric = _BY_SERIES[name]
    return metric, {*_TARGET_LABELS, *metric.labels, *(("le",) if name.endswith("_bucket") else ())}


def _matched(selector: str) -> Iterator[tuple[str, str]]:
    """Labels and values of a selector in braces."""
    inner = selector.removeprefix("{").removesuffix("}")
    place = 0
    while place < len(inner):
        found = _MATCHER.match(inner, place)
        if found is None:
            raise PromqlError(f"{selector} is no selector")
        label, operator, value = found.groups()
        yield from ((label, one) for one in (value.split("|") if "~" in operator else [value]))
        place = found.end()


def _may_be(label: str, value: str, metric: Metric | None) -> bool:
    if value.startswith("$") or metric is None or label in (*_TARGET_LABELS, *DEPLOYMENT_LABELS):
        return True
    if label == "le":
        return value in ("+Inf", *map(str, metric.buckets))
    return value in LABELS[label]
