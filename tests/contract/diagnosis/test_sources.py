"""
The same request is explained alike from wherever its record is: a flight recording, a file of traces, Jaeger.
"""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from click.testing import CliRunner

from diagnosis.doctor import Report, examine
from diagnosis.sources import asked
from diagnosis.sources.recording import recorded
from diagnosis.sources.scrape import of_scrape
from diagnosis.why import Why, why
from diagnosis.words import report_lines
from launch.errors import UserError
from pellucid import cli
from telemetry.evidence import Evidence, Facts
from telemetry.flight import open_records
from telemetry.metrics import Metrics
from telemetry.otlp_json import otlp_line
from telemetry.records import MemoryReading, RequestRecord
from telemetry.runtime import GC_PAUSE, LAG_PERIOD_S, LOOP_LAG
from telemetry.spans import request_spans
from telemetry.vocabulary import OBSERVING_ROUTES, ReplicaView, View
from tests.core.test_diagnosis import MS, QUIET, busy, request, with_slow

SLOW = request(7, QUIET | {"queue_kv_full": 4000})
EVERYBODY = [*(request(number, QUIET) for number in range(6)), SLOW]


def told(answer: Why) -> list[tuple[str, int, int | None]]:
    """What it says, but for what only steps could tell."""
    return [(one.cause, one.ns, one.baseline_ns) for one in answer.causes]


@contextmanager
def serving(answers: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """A server with these answers by path, and what it was asked."""
    asked_for: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked_for.append(self.path)
            answer = answers.get(urlsplit(self.path).path)
            self.send_response(200 if answer is not None else 404)
            self.end_headers()
            self.wfile.write(answer or b'{"error": {"message": "Not here."}}')

        def log_message(self, *_: object) -> None:
            """Quietly."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked_for
        finally:
            server.shutdown()


def line(record: RequestRecord) -> bytes:
    return otlp_line(request_spans(record, None, offset_ns=1), resource={}, version="0")


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    records = open_records(str(tmp_path), "gateway-0", ring_bytes=1 << 20)
    assert records is not None
    for record in EVERYBODY:
        records.request(record)
    records.step(busy(0))
    records.close()
    return next(path for path in tmp_path.rglob("gateway-0*") if path.is_dir())


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    file = tmp_path / "traces.jsonl"
    file.write_bytes(b"".join(map(line, EVERYBODY)))
    return file


def test_all_places_say_the_same(recording: Path, traces: Path) -> None:
    recorded = asked.why_recorded("r7", recording)
    traced = asked.why_traced("r7", trace=str(traces), jaeger=None)
    assert recorded.causes[0].cause == "kv_starvation" and recorded.causes[0].ns == 4_000_000_000
    assert told(recorded) == told(traced)
    assert recorded.e2e_ns == traced.e2e_ns and recorded.outcome == traced.outcome


def test_jaeger_is_asked_by_request_and_by_trace() -> None:
    trace_id = "ab" * 16
    document = b'{"result": ' + line(SLOW).strip() + b"}\n"
    with serving({"/api/v3/traces": document, f"/api/v3/traces/{trace_id}": document}) as (url, asked_for):
        by_request = asked.why_traced("r7", trace=None, jaeger=url)
        by_trace = asked.why_traced(trace_id, trace=None, jaeger=url + "/")
        with pytest.raises(UserError, match="no request 'r9'"):
            asked.why_traced("r9", trace=None, jaeger=url)
    assert by_request == by_trace and by_request.causes[0].cause == "kv_starvation"
    query = parse_qs(urlsplit(asked_for[0]).query)
    assert query["query.service_name"] == ["pellucid"]
    assert query["query.attributes"] == ['{"pellucid.request_id":"r7"}']
    assert {"query.start_time_min", "query.start_time_max"} <= query.keys()


def test_a_recording_is_examined_from_its_end(recording: Path) -> None:
    assert [one.cause for one in asked.report_recorded(recording, 300).findings] == ["kv_starvation"]
    assert asked.report_recorded(recording, 1).requests == 1, "the others had ended long before"


def test_a_scrape_is_examined_as_one_mean_request(tmp_path: Path) -> None:
    metrics = Metrics()
    for number in range(20):
        metrics.request(request(number, QUIET | {"limit": 900}))
    file = tmp_path / "metrics.txt"
    file.write_bytes(metrics.text(View())[0])
    report = asked.report_scraped(str(file), "")
    assert report.findings[0].cause == "redis"
    with serving({"/metrics": file.read_bytes()}) as (url, _):
        assert asked.report_scraped(f"{url}/metrics", "") == report


def scraped(metrics: Metrics, view: View = View()) -> Evidence:  # noqa: B008 - frozen
    return of_scrape(metrics.text(view)[0].decode())


def test_who_looks_and_who_is_refused_do_not_shorten_the_mean() -> None:
    alone, beside = Metrics(), Metrics()
    for number in range(20):
        for metrics in (alone, beside):
            metrics.request(request(number, QUIET | {"limit": 900}, repeated_tokens=90))
    for number in range(2000):
        route = OBSERVING_ROUTES[number % len(OBSERVING_ROUTES)]
        looking = request(number, {"parse": 100 + number}, first_token_ns=0, first_token_states={}, computed_tokens=0)
        beside.request(msgspec.structs.replace(looking, route=route, outcome="ok"))
    for number in range(200):
        short = request(number, {"auth": 1}, first_token_ns=0, first_token_states={}, computed_tokens=0)
        beside.request(msgspec.structs.replace(short, outcome="unauthorized", status=401))
        beside.request(msgspec.structs.replace(short, outcome="ok", route="/v1/models"))
    expected, found = scraped(alone).requests[0], scraped(beside).requests[0]
    life_ns = (sum(QUIET.values()) + 900) * MS
    assert expected.finished_ns == pytest.approx(life_ns, abs=20), "in whole ns, each state"
    assert expected.states["limit"] == 900 * MS and expected.first_token_states == found.first_token_states
    assert found.finished_ns == pytest.approx(life_ns, abs=20)
    assert found.states["limit"] == pytest.approx(900 * MS, rel=0.03), "of all that are served, as there is no other"
    assert found.repeated_tokens == 90 and scraped(beside).mean_of == 20


def test_without_a_request_for_tokens_there_is_no_mean() -> None:
    metrics = Metrics()
    metrics.request(request(1, {"parse": 1}, route="/metrics", outcome="ok"))
    with pytest.raises(UserError, match="no request for tokens has ended"):
        scraped(metrics)


@pytest.mark.parametrize(
    ("late_ms", "collected_ms", "starved_ms", "cause"),
    [
        (900, 0, 0, "event_loop"),
        (900, 850, 0, "garbage_collection"),
        (900, 0, 850, "cpu_starvation"),
        (1, 0, 0, None),
    ],
)
def test_what_held_the_gateway_up_is_in_the_mean_once(
    late_ms: int, collected_ms: int, starved_ms: int, cause: str | None
) -> None:
    """A hundred looks at the loop of one worker: each so late, and of that so much explained by the others."""
    metrics = Metrics()
    for number in range(20):
        metrics.request(request(number, {"parse": 2000, "prefill": 400, "decode": 100}))
    for _ in range(100):
        metrics.feed(LOOP_LAG, (), late_ms * MS)
        metrics.feed(GC_PAUSE, ("2",), collected_ms * MS)
    replicas = tuple(ReplicaView(number, True, 2, 0, None) for number in (0, 1))
    evidence = scraped(metrics, View(starved_ns=100 * starved_ms * MS, replicas=replicas))
    [mean] = evidence.requests
    period_ms = LAG_PERIOD_S * 1000 + late_ms
    shown = {"event_loop": mean.loop_lag_ns, "garbage_collection": mean.gc_pause_ns, "cpu_starvation": mean.starved_ns}
    held_ms = late_ms - collected_ms - starved_ms
    for name, spent_ms in zip(shown, (held_ms, collected_ms, starved_ms), strict=True):
        assert shown[name] == pytest.approx(2500 * MS * spent_ms / period_ms, abs=20), name
    found = [one.cause for one in examine(evidence).findings]
    assert (found[0] if found else None) == cause
    assert evidence.starts == 4


def test_a_key_that_is_none_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_API_KEY", "pk-secret\nx")
    done = CliRunner().invoke(cli, ["why", "r7", "--url", "http://127.0.0.1:9"])
    assert isinstance(done.exception, UserError) or done.exit_code
    assert "no API key" in f"{done.output}{done.exception}" and "secret" not in f"{done.output}{done.exception}"


def test_a_mean_is_not_called_a_tail() -> None:
    metrics = Metrics()
    for number in range(20):
        metrics.request(request(number, QUIET | {"limit": 900}))
    report = examine(scraped(metrics))
    assert report.requests == 20 and report.tails.keys() == {"ttft_mean", "e2e_mean"}
    finding = report.findings[0]
    assert finding.quantities.keys() == {"ttft_mean", "e2e_mean"}
    assert "of the mean time to the first token, " in finding.words
    assert "p99" not in " ".join(report_lines(report))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["why", "r7", "--trace", "{missing}"], "No such file"),
        (["why", "r7", "--trace", "{garbage}"], "does not hold traces"),
        (["why", "r8", "--trace", "{traces}"], "no request 'r8'"),
        (["why", "r7", "--trace", "{traces}", "--jaeger", "http://x"], "one of them"),
        (["why", "r7", "--url", "ftp://x"], "no URL like"),
        (["why", "r7", "--url", "http://127.0.0.1:9"], "nothing answers"),
        (["why", "r7", "--flight", "{empty}/"], "holds no recording"),
        (["doctor", "--scrape", "{garbage}"], "no text of Prometheus"),
        (["doctor", "--scrape", "{missing}"], "No such file"),
        (["doctor", "--scrape", "x", "--flight", "y"], "one of them"),
        (["doctor", "--url", "http://127.0.0.1:9"], "nothing answers"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    arguments: list[str], words: str, tmp_path: Path, traces: Path
) -> None:
    garbage, empty = tmp_path / "garbage", tmp_path / "empty"
    garbage.write_text("this { is not\nit")
    empty.mkdir()
    places = {"missing": tmp_path / "missing", "garbage": garbage, "empty": empty, "traces": traces}
    done = CliRunner().invoke(cli, [one.format(**places) for one in arguments])
    assert isinstance(done.exception, UserError) and words in str(done.exception)
    assert "\n" not in str(done.exception)


def test_the_answers_of_a_live_system_are_shown_and_a_finding_is_an_exit_code() -> None:
    evidence = with_slow({"limit": 900})
    report = examine(evidence)
    answers = {"/debug/doctor": msgspec.json.encode(report), "/debug/why/r%207": b"{}", "/debug/requests": b""}
    with serving(answers) as (url, asked_for):
        done = CliRunner().invoke(cli, ["doctor", "--url", url, "--minutes", "2"])
        assert done.exit_code == 1
        assert "1. slow server of keys and limits: " in done.stdout and "--redis-url" in done.stdout
        assert asked_for == ["/debug/doctor?seconds=120"]
        asjson = CliRunner().invoke(cli, ["doctor", "--url", url, "--json"])
        assert msgspec.json.decode(asjson.stdout, type=Report) == report
        unlike = CliRunner().invoke(cli, ["why", "r 7", "--url", url])
        assert "does not answer as Pellucid does" in str(unlike.exception)
        unknown = CliRunner().invoke(cli, ["why", "r8", "--url", url])
        assert "404, Not here." in str(unknown.exception)


def test_why_in_words(traces: Path) -> None:
    done = CliRunner().invoke(cli, ["why", "r7", "--trace", str(traces)])
    assert done.exit_code == 0
    first, summary, *rest = done.stdout.splitlines()
    assert first == "r7  stop  4.25 s"
    assert summary.startswith("Of 4.25 s, 4.00 s, 94%, went because it waited for KV memory")
    assert any("What would help" in one for one in rest) and any("--kv-memory" in one for one in rest)


def test_a_recording_knows_how_the_system_was_set_up_and_tells_two_lives_apart(tmp_path: Path) -> None:
    records = open_records(str(tmp_path), "gateway-0", ring_bytes=1 << 20)
    assert records is not None
    records.facts(Facts(prefix_cache=False))
    for life in ("a", "b"):
        for number in range(1, 4):
            memory = MemoryReading(resident_bytes={"a": 900, "b": 100}[life] + number)
            records.step(busy(number, requests={1: f"{life}{number}"}, slices=((1, 1),), memory=memory))
    for number in range(20):
        records.request(request(number, QUIET | {"prefill": 400}, repeated_tokens=90))
    records.close()
    place = next(path for path in tmp_path.rglob("gateway-0*") if path.is_dir())
    assert [one.cause for one in asked.report_recorded(place, 300).findings] == ["prefix_off"]
    evidence = recorded(place, None)
    assert {step.requests[1] for step in evidence.steps.values()} == {"b1", "b2", "b3"}
    assert evidence.totals.steps == 6 and evidence.starts == 1
    assert evidence.names == {(0, 1): "b3"} and [size for _, size in evidence.memory["engine 0"]] == [101, 102, 103]


def test_who_was_in_the_last_seconds_of_a_recording_stands_before_them(tmp_path: Path) -> None:
    records = open_records(str(tmp_path), "gateway-0", ring_bytes=1 << 20)
    assert records is not None
    records.step(busy(0, requests={1: "mine#a-0", 2: "other#b-0"}, slices=((1, 1), (2, 1))))
    for number in range(1, 1000):
        records.step(busy(number, slices=((1, 1), (2, 3))))
    records.close()
    evidence = recorded(next(path for path in tmp_path.rglob("gateway-0*") if path.is_dir()), 5)
    assert 400 < len(evidence.steps) < 600
    answer = why(request(0, QUIET, request_id="mine"), evidence)
    assert answer.steps_known == len(evidence.steps) and [one.request_id for one in answer.others] == ["other"]
