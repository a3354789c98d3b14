"""
From a bucket of a histogram to a trace: only to one that somebody has, and only where the format allows it.
"""

import random
from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from telemetry.catalogue import CATALOGUE
from telemetry.hub import Hub
from telemetry.numbers import Numbers, exposition, join
from telemetry.vocabulary import LATENCY_BUCKETS_S, NS_PER_S
from tests.contract.telemetry.otlp_file import read_trace_file
from tests.contract.telemetry.records_strategy import MODEL
from tests.contract.telemetry.test_spans import a_record

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TTFT = "pellucid_request_time_to_first_token_seconds"
LABEL_CHARS_MAX = 128
"""Of the label set of an exemplar: OpenMetrics 1.0."""


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No collector of this machine."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")


def buckets(text: bytes) -> list[Sample]:
    """All samples that have an exemplar, as the parser of OpenMetrics sees them."""
    families = text_string_to_metric_families(text.decode())
    return [sample for family in families for sample in family.samples if sample.exemplar is not None]


def told(hub: Hub, number: int, first_s: float, **changes: object) -> None:
    first_ns = int(first_s * NS_PER_S)
    record = a_record(request_id=f"r{number}", trace_id=f"{number + 1:032x}", first_token_ns=first_ns, **changes)
    hub.request(msgspec.structs.replace(record, finished_ns=record.accepted_ns + first_ns + NS_PER_S))


async def test_each_bucket_names_the_last_kept_request_in_it(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    hub = Hub(model=MODEL, trace_file=str(path))
    await hub.start()
    chance = random.Random(3)
    firsts = [chance.uniform(0.001, 1.9) for _ in range(200)]
    for number, first_s in enumerate(firsts):
        told(hub, number, first_s)
    text, content_type = hub.metrics_text(OPENMETRICS)
    await hub.stop()
    assert content_type.startswith("application/openmetrics-text")
    found = [sample for sample in buckets(text) if sample.name == f"{TTFT}_bucket"]
    newest = {
        next(bound for bound in LATENCY_BUCKETS_S if bound >= first): number for number, first in enumerate(firsts)
    }
    assert {float(sample.labels["le"]) for sample in found} == set(newest)
    for sample in found:
        assert sample.exemplar is not None
        number = newest[float(sample.labels["le"])]
        assert sample.exemplar.labels["trace_id"] == f"{number + 1:032x}"
        assert sample.exemplar.value == pytest.approx(firsts[number])
        assert sample.exemplar.value <= float(sample.labels["le"])
    roots = {(span.trace_id.hex(), span.span_id.hex()) for span in read_trace_file(path).spans}
    for sample in buckets(text):
        assert sample.exemplar is not None
        assert sample.exemplar.timestamp is not None
        assert (sample.exemplar.labels["trace_id"], sample.exemplar.labels["span_id"]) in roots, "the trace is there"
        assert sum(len(part) for pair in sample.exemplar.labels.items() for part in pair) <= LABEL_CHARS_MAX
    assert {sample.name.removesuffix("_bucket") for sample in buckets(text)} == {
        metric.name for metric in CATALOGUE if metric.exemplars and "gap_max" not in metric.name
    }


async def test_a_trace_that_nobody_keeps_is_named_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(model=MODEL, trace_file=str(tmp_path / "t.jsonl"), trace_sample=0)
    await hub.start()
    for number in range(50):
        told(hub, number, 0.1)
    assert buckets(hub.metrics_text(OPENMETRICS)[0]) == []
    monkeypatch.setattr("telemetry.trace_file.QUEUE_SPANS_MAX", 0)
    told(hub, 60, 0.1, status=500, outcome="failed")
    assert buckets(hub.metrics_text(OPENMETRICS)[0]) == [], "it was to be kept, but nobody has taken it"
    monkeypatch.undo()
    told(hub, 61, 0.1, status=500, outcome="failed")
    exemplars = {
        sample.exemplar.labels["trace_id"] for sample in buckets(hub.metrics_text(OPENMETRICS)[0]) if sample.exemplar
    }
    assert exemplars == {f"{62:032x}"}
    await hub.stop()


async def test_the_older_format_has_none_and_there_are_never_more_than_buckets(tmp_path: Path) -> None:
    hub = Hub(model=MODEL, trace_file=str(tmp_path / "t.jsonl"))
    await hub.start()
    chance = random.Random(2)
    for number in range(2000):
        told(hub, number, chance.uniform(0.0001, 300))
    assert b"trace_id" not in hub.metrics_text()[0]
    numbers = hub.numbers()
    await hub.stop()
    for metric in CATALOGUE:
        for histogram in numbers.histograms.get(metric.name, {}).values():
            assert len(histogram.exemplars) <= len(histogram.counts)
    told_of = msgspec.msgpack.decode(msgspec.msgpack.encode(numbers), type=Numbers)
    assert told_of == numbers, "they go to other workers, and into the file for the next life"


async def test_of_several_workers_the_last_of_each_bucket_is_named(tmp_path: Path) -> None:
    hubs = [Hub(model=MODEL, trace_file=str(tmp_path / "t.jsonl")) for _ in range(2)]
    for hub in hubs:
        await hub.start()
    for number, (hub, accepted_ns, first_s) in enumerate(
        [(hubs[0], 1000, 0.1), (hubs[1], 2000, 0.1), (hubs[1], 3000, 0.2), (hubs[0], 4000, 0.2), (hubs[0], 5000, 0.3)]
    ):
        told(hub, number, first_s, accepted_ns=accepted_ns)
    numbers = [hub.numbers() for hub in hubs]
    for several in (numbers, numbers[::-1]):
        found = buckets(exposition(join(several), OPENMETRICS)[0])
        named = {sample.labels["le"]: sample.exemplar for sample in found if sample.name == f"{TTFT}_bucket"}
        ids = {bound: int(exemplar.labels["trace_id"], 16) - 1 for bound, exemplar in named.items() if exemplar}
        assert ids == {"0.1": 1, "0.2": 3, "0.3": 4}
    for hub in hubs:
        await hub.stop()
