"""
`/metrics`: what it says is the sum of the records, and nothing else.
"""

import math
import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from telemetry.catalogue import CATALOGUE
from telemetry.metrics import Metrics
from telemetry.records import KvBook, RequestRecord, StepRecord
from telemetry.vocabulary import (
    BOOKS,
    DEPLOYMENT_LABELS,
    FAULTS,
    FINISHED_OUTCOMES,
    GENERATING_ROUTES,
    LABELS,
    LATENCY_BUCKETS_S,
    OBSERVING_ROUTES,
    OTHER,
    PROMISES,
    STATES,
    LimitsView,
    ReplicaView,
    UpstreamView,
    View,
)
from tests.contract.telemetry.records_strategy import MODEL, UPSTREAM, request_records, step_records

GOLDEN = Path(__file__).parent / "golden" / "metrics.prom"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: bytes) -> Series:
    """Every sample by its name and labels."""
    samples: Series = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} is there twice"
            samples[key] = sample.value
    return samples


def total(series: Series, name: str, **labels: str) -> float:
    """The sum over all series of that name that carry these labels."""
    wanted = set(labels.items())
    return math.fsum(value for (found, has), value in series.items() if found == name and wanted <= has)


def close(left: float, right_ns: int) -> bool:
    return math.isclose(left, right_ns / 1e9, rel_tol=1e-12, abs_tol=1e-12)


@settings(max_examples=60, deadline=None)
@given(records=st.lists(request_records(), max_size=12))
def test_the_sums_over_requests_equal_the_metrics(records: list[RequestRecord]) -> None:
    metrics = Metrics(models=[MODEL])
    metrics.learn(models=[], upstreams=[UPSTREAM])
    for record in records:
        metrics.request(record)
    series = read(metrics.text(View())[0])

    assert total(series, "pellucid_requests_total") == len(records)
    for outcome in {record.outcome for record in records}:
        count = sum(record.outcome == outcome for record in records)
        assert total(series, "pellucid_requests_total", outcome=outcome) == count
        assert total(series, "pellucid_request_duration_seconds_count", outcome=outcome) == count
    lives_ns = sum(record.finished_ns - record.accepted_ns for record in records)
    assert close(total(series, "pellucid_request_duration_seconds_sum"), lives_ns)
    served = [record for record in records if record.route not in OBSERVING_ROUTES]
    lives_ns = sum(record.finished_ns - record.accepted_ns for record in served)
    assert close(total(series, "pellucid_request_state_seconds_total"), lives_ns), "states sum to the durations"
    for state in STATES:
        spent_ns = sum(record.states.get(state, 0) for record in served)
        assert close(total(series, "pellucid_request_state_seconds_total", state=state), spent_ns)
    first_ns = sum(record.first_token_ns for record in records)
    assert close(total(series, "pellucid_request_time_to_first_token_seconds_sum"), first_ns)
    block_ns = sum(record.kv_block_ns for record in records)
    assert close(total(series, "pellucid_request_kv_block_seconds_total"), block_ns)
    ours = [record for record in records if not record.upstream]
    finished_prompts = sum(record.prompt_tokens for record in ours if record.outcome in FINISHED_OUTCOMES)
    cut_prompts = sum(
        record.computed_tokens + record.cached_tokens for record in ours if record.outcome not in FINISHED_OUTCOMES
    )
    assert total(series, "pellucid_prompt_tokens_total") == finished_prompts + cut_prompts
    for name, field in {
        "pellucid_output_tokens_total": "output_tokens",
        "pellucid_recomputed_tokens_total": "recomputed_tokens",
        "pellucid_draft_tokens_total": "drafted_tokens",
    }.items():
        assert total(series, name) == sum(getattr(record, field) for record in records), name
    assert total(series, "pellucid_routed_requests_total") == sum(bool(record.routing) for record in records)
    asked = [one for one in records if one.promised_tokens is not None and one.computed_tokens + one.cached_tokens]
    promised = {name: total(series, "pellucid_prefix_index_tokens_total", promise=name) for name in PROMISES}
    assert promised["kept"] + promised["broken"] == sum(one.promised_tokens or 0 for one in asked)
    assert promised["kept"] + promised["unpromised"] == sum(one.cached_tokens for one in asked)
    assert promised["kept"] == sum(min(one.promised_tokens or 0, one.cached_tokens) for one in asked)
    for stage in LABELS["stage"]:
        tokens = sum(getattr(record, f"{stage}_tokens") for record in records)
        assert total(series, "pellucid_limit_tokens_total", stage=stage) == tokens
    spent = sum(record.charged_micros for record in records) / 1e6
    assert math.isclose(total(series, "pellucid_limit_spend_total"), spent, rel_tol=1e-12)
    hits = total(series, "pellucid_prefix_cache_hit_tokens_total")
    assert (
        hits
        == sum(record.cached_tokens for record in ours)
        <= total(series, "pellucid_prefix_cache_query_tokens_total")
    )
    theirs = [record for record in records if record.upstream]
    for usage in ("prompt", "cached", "output"):
        counted = total(series, "pellucid_upstream_tokens_total", upstream=UPSTREAM, usage=usage)
        assert counted == sum(getattr(record, f"{usage}_tokens") for record in theirs)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(step_records(), max_size=12))
def test_the_sums_over_steps_equal_the_metrics(steps: list[StepRecord]) -> None:
    metrics = Metrics()
    for step in steps:
        metrics.step(step)
    series = read(metrics.text(View())[0])

    by_replica: dict[str, list[StepRecord]] = defaultdict(list)
    for step in steps:
        by_replica[str(step.replica)].append(step)
    for replica, own in by_replica.items():
        assert total(series, "pellucid_engine_steps_total", replica=replica) == len(own)
        step_ns = sum(step.step_ns for step in own)
        assert close(total(series, "pellucid_engine_step_part_seconds_total", replica=replica), step_ns)
        busy_ns = sum(step.step_ns - step.parts["idle"] for step in own)
        assert close(total(series, "pellucid_engine_step_busy_seconds_sum", replica=replica), busy_ns)
        wasted_ns = sum(step.draft_rejected_ns for step in own)
        assert close(total(series, "pellucid_engine_draft_rejected_seconds_total", replica=replica), wasted_ns)
        for name, field in {
            "pellucid_engine_tokens_total": "tokens",
            "pellucid_engine_emitted_tokens_total": "emitted_tokens",
            "pellucid_engine_cached_tokens_total": "cached_tokens",
            "pellucid_engine_draft_tokens_total": "drafted_tokens",
            "pellucid_engine_preemptions_total": "preemptions",
            "pellucid_engine_evictions_total": "evictions",
            "pellucid_engine_sequences_per_step_sum": "sequences",
        }.items():
            assert total(series, name, replica=replica) == sum(getattr(step, field) for step in own), name
        interconnect = [step.interconnect for step in own]
        waited, moved = (
            "pellucid_engine_interconnect_wait_seconds_total",
            "pellucid_engine_interconnect_transfer_seconds_total",
        )
        assert close(total(series, waited, replica=replica), sum(one.wait_ns for one in interconnect))
        assert close(total(series, moved, replica=replica), sum(one.transfer_ns for one in interconnect))
        received = total(series, "pellucid_engine_interconnect_bytes_total", replica=replica)
        assert received == sum(one.bytes for one in interconnect)
        ranks_wait_ns = sum(sum(one.rank_wait_ns) for one in interconnect)
        assert close(total(series, "pellucid_engine_rank_wait_seconds_total", replica=replica), ranks_wait_ns)
        stragglers = sum(one.straggler >= 0 for one in interconnect)
        assert total(series, "pellucid_engine_straggler_steps_total", replica=replica) == stragglers


@settings(max_examples=100, deadline=None)
@given(amounts_ns=st.lists(st.integers(0, 130_000_000_000), min_size=1, max_size=50))
def test_histograms_count_each_observation_in_every_bucket_that_covers_it(amounts_ns: list[int]) -> None:
    metrics = Metrics()
    for amount_ns in amounts_ns:
        metrics.feed("pellucid_event_loop_lag_seconds", (), amount_ns)
    series = read(metrics.text(View())[0])
    for bound_s in LATENCY_BUCKETS_S:
        covered = sum(amount_ns / 1e9 <= bound_s for amount_ns in amounts_ns)
        assert total(series, "pellucid_event_loop_lag_seconds_bucket", le=str(bound_s)) == covered
    assert total(series, "pellucid_event_loop_lag_seconds_bucket", le="+Inf") == len(amounts_ns)


@settings(max_examples=50, deadline=None)
@given(word=st.text(min_size=1, max_size=40))
def test_a_client_cannot_make_series(word: str) -> None:
    metrics = Metrics(models=[MODEL])
    before = len(read(metrics.text(View())[0]))
    for index in range(20):
        odd = f"{word}{index}"
        metrics.request(
            RequestRecord(
                request_id="r",
                accepted_ns=0,
                finished_ns=5,
                states={odd: 5},
                model=odd,
                outcome=odd,
                route=odd,
                upstream=odd,
            )
        )
    series = read(metrics.text(View(live={f"{word}1": 1, f"{word}2": 2}))[0])
    assert total(series, "pellucid_requests_total", route=OTHER, outcome=OTHER) == 20
    assert total(series, "pellucid_request_state_seconds_total", state=OTHER) == 20 * 5 / 1e9
    assert total(series, "pellucid_requests_live", route=OTHER) == 3
    histogram_lines = len(LATENCY_BUCKETS_S) + 3
    usages = len(LABELS["usage"])
    assert len(series) <= before + 2 + usages + histogram_lines


def test_books_and_drops_are_there_before_anything_has_happened() -> None:
    series = read(Metrics().text(View())[0])
    for book in BOOKS:
        assert series["pellucid_book_mismatches_total", frozenset({("book", book)})] == 0
    for reason in LABELS["reason"]:
        assert series["pellucid_telemetry_drops_total", frozenset({("reason", reason)})] == 0


def test_what_alerts_divide_is_there_before_anything_has_happened() -> None:
    """A series that comes into being with its first event has no rate: the first failure would go unseen."""
    series = read(Metrics().text(View())[0])
    for route in GENERATING_ROUTES:
        for outcome in (*FINISHED_OUTCOMES, *FAULTS):
            key = {"route": route, "outcome": outcome, "status_class": "5xx"}
            assert series["pellucid_requests_total", frozenset(key.items())] == 0
        for name in ("time_to_first_token", "time_per_output_token"):
            assert series[f"pellucid_request_{name}_seconds_count", frozenset({("route", route)})] == 0
    assert total(series, "pellucid_requests_total") == 0
    assert not any(key[0] == "pellucid_requests_total" and ("route", "/health") in key[1] for key in series)


def test_a_replica_that_nobody_knows_about_shows_no_old_value() -> None:
    step = StepRecord(step_id=1, ended_ns=0, step_ns=0, parts={}, running=3, kv=KvBook(32, 0, 0, 17, 15))
    metrics = Metrics()
    there = ReplicaView(replica=0, up=True, restarts=0, silent_ns=0, step=step)
    gone = ReplicaView(replica=0, up=False, restarts=0, silent_ns=9, step=None)
    series = read(metrics.text(View(replicas=(there,)))[0])
    assert total(series, "pellucid_engine_running_sequences", replica="0") == 3
    assert total(series, "pellucid_kv_slots", replica="0") == 32
    series = read(metrics.text(View(replicas=(gone,)))[0])
    assert total(series, "pellucid_engine_up", replica="0") == 0
    assert not [key for key in series if key[0] in ("pellucid_engine_running_sequences", "pellucid_kv_slots")]


def test_the_catalogue_keeps_its_own_rules() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    for metric in CATALOGUE:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert metric.help.endswith("."), metric.name
        if metric.unit:
            assert f"_{metric.unit}" in metric.name, metric.name
        for label in metric.labels:
            assert label in LABELS or label in DEPLOYMENT_LABELS, f"{metric.name}: {label} is open"
        for label, values in metric.zeros_of.items():
            assert label in metric.labels and set(values) <= set(LABELS[label]), metric.name
        if metric.zeros:
            assert all(label in LABELS for label in metric.labels), metric.name
        readers = (metric.of_request, metric.of_step, metric.of_view)
        assert sum(reader is not None for reader in readers) <= 1, metric.name
        assert not metric.absolute or (metric.of_view is not None and metric.join == "most"), metric.name


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=1.0.0", "text/plain", ""])
def test_the_format_follows_the_accept_header(accept: str) -> None:
    metrics = _fixed()
    text, content_type = metrics.text(_view(), accept)
    if "openmetrics" in accept:
        assert content_type.startswith("application/openmetrics-text")
        assert text.endswith(b"# EOF\n")
        assert {family.name for family in parse_openmetrics(text.decode())}
    else:
        assert content_type.startswith("text/plain; version=0.0.4")
        assert read(text)


def test_the_text_is_as_it_was() -> None:
    """Golden: a change of names is a change of the interface.  PELLUCID_WRITE_GOLDEN=1 writes the new text."""
    text = _fixed().text(_view())[0]
    if os.environ.get("PELLUCID_WRITE_GOLDEN"):
        GOLDEN.write_bytes(text)
        pytest.fail(f"{GOLDEN.name} was written: read the difference, then run again without the variable")
    assert text == GOLDEN.read_bytes()


def _fixed() -> Metrics:
    metrics = Metrics(models=[MODEL])
    metrics.learn(models=[], upstreams=[UPSTREAM])
    ms = 1_000_000
    chat = RequestRecord(
        request_id="a",
        outcome="stop",
        accepted_ns=0,
        finished_ns=100 * ms,
        states={"parse": 1 * ms, "tokenize": 2 * ms, "dispatch": 3 * ms, "prefill": 30 * ms, "decode": 64 * ms},
        prompt_tokens=40,
        cached_tokens=16,
        computed_tokens=24,
        output_tokens=9,
        drafted_tokens=4,
        draft_accepted_tokens=3,
        draft_rejected_tokens=1,
        steps=9,
        kv_block_ns=250 * ms,
        first_token_ns=36 * ms,
        gap_max_ns=11 * ms,
        reserved_tokens=104,
        charged_tokens=49,
        charged_micros=75,
        model=MODEL,
        route="/v1/chat/completions",
        status=200,
        stream=True,
    )
    refused = RequestRecord(
        request_id="b",
        outcome="invalid",
        accepted_ns=0,
        finished_ns=ms,
        states={"parse": ms},
        route="/v1/completions",
        status=400,
    )
    step = StepRecord(
        step_id=1,
        ended_ns=0,
        step_ns=12 * ms,
        parts={"idle": 2 * ms, "plan": ms, "compute": 8 * ms, "sample": ms},
        tokens=25,
        prefill_tokens=24,
        decode_tokens=1,
        emitted_tokens=2,
        sequences=2,
        cached_tokens=16,
    )
    metrics.request(chat)
    metrics.request(refused)
    metrics.request(_elsewhere(ms))
    metrics.step(step)
    return metrics


def _elsewhere(ms: int) -> RequestRecord:
    return RequestRecord(
        request_id="c",
        outcome="stop",
        accepted_ns=0,
        finished_ns=50 * ms,
        states={"parse": ms, "dispatch": 2 * ms, "upstream": 45 * ms, "send": 2 * ms},
        prompt_tokens=20,
        cached_tokens=8,
        output_tokens=5,
        first_token_ns=30 * ms,
        model=MODEL,
        route="/v1/chat/completions",
        status=200,
        upstream=UPSTREAM,
    )


def _view() -> View:
    step = StepRecord(
        step_id=1, ended_ns=0, step_ns=0, parts={}, running=2, waiting=1, kv=KvBook(768, 256, 0, 280, 232)
    )
    return View(
        replicas=(ReplicaView(replica=0, up=True, restarts=1, silent_ns=250_000_000, step=step),),
        upstreams=(UpstreamView(name=UPSTREAM, up=True, in_flight=1, results={"complete": 1, "failed": 2}),),
        live={"/v1/chat/completions": 2},
        drops={"sink_full": 3},
        resident_bytes=123_456_789,
        build=(("0.1.0", MODEL),),
        limits=LimitsView(
            up=True,
            openings=1,
            commands_failed=5,
            workers=4,
            held=2,
            owed=3,
            forgotten=0,
            unknown=1,
            refusals={("tenant", "tokens"): 7, ("key", "requests"): 2},
        ),
    )
