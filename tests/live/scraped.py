"""
Debian's Prometheus, and an appliance for it to scrape in which all has gone wrong.

That one is a page of telemetry's own `Metrics`, fed with records at each scrape: what a healthy appliance cannot show
(preemptions, upstreams, ranks, failures) stands there as a real one would show it.
"""

import math
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import msgspec
import yaml  # type: ignore[import-untyped]  # it brings no types

from dashboards.files import render, write
from telemetry.metrics import Metrics
from telemetry.records import (
    COMPUTE_PARTS,
    DEGENERATE_KINDS,
    EXCHANGES,
    STEP_PARTS,
    Exchange,
    InterconnectBook,
    KvBook,
    MemoryReading,
    RequestRecord,
    StepRecord,
)
from telemetry.vocabulary import (
    BOOKS,
    DROP_REASONS,
    GENERATING_ROUTES,
    LEVELS,
    LIMITS,
    OUTCOMES,
    PRESSURES,
    ROUTINGS,
    STATES,
    UPSTREAM_RESULTS,
    WAITING_STATES,
    LimitsView,
    ReplicaView,
    UpstreamView,
    View,
)

MODEL, NEAR, FAR = "tiny", "near", "far"
MS = 1_000_000
READY_S = 30.0
NOBODY = "127.0.0.1:1"
"""A target that nobody answers for."""


class Troubled:
    """The page; each reading of it finds that more has happened."""

    def __init__(self) -> None:
        self._metrics = Metrics(models=[MODEL])
        self._metrics.learn(models=[], upstreams=[NEAR, FAR])
        self._readings = 0
        self._lock = threading.Lock()

    def text(self) -> tuple[bytes, str]:
        """As `/metrics` answers Prometheus."""
        with self._lock:
            self._readings += 1
            for route in GENERATING_ROUTES:
                for number, outcome in enumerate(OUTCOMES):
                    self._metrics.request(_request(route, outcome, number))
            self._metrics.request(_elsewhere())
            for replica in (0, 1):
                self._metrics.step(_step(replica, straggler=self._readings % 2))
            self._feed()
            return self._metrics.text(_view(self._readings), "application/openmetrics-text; version=1.0.0")

    def _feed(self) -> None:
        for book in BOOKS:
            self._metrics.feed("pellucid_book_mismatches_total", (book,), 1)
        self._metrics.feed("pellucid_prefix_index_news_lost_total", (), 2)
        for lag_ms in (20, 500):
            self._metrics.feed("pellucid_event_loop_lag_seconds", (), lag_ms * MS)
        for generation in "012":
            self._metrics.feed("pellucid_gc_pause_seconds", (generation,), 5 * MS)


def _request(route: str, outcome: str, number: int) -> RequestRecord:
    """Odd ones are slow; all have been through everything."""
    states = dict.fromkeys(STATES, (200 if number % 2 else 20) * MS)
    states["queue_kv_full"] *= 10
    states["stalled"] *= 10
    return RequestRecord(
        request_id=f"{route}-{number}",
        outcome=outcome,
        status=200 if outcome in ("stop", "length", "ok") else 500,
        accepted_ns=0,
        finished_ns=sum(states.values()),
        states=states,
        prompt_tokens=60,
        cached_tokens=16,
        computed_tokens=44,
        recomputed_tokens=30,
        output_tokens=10,
        drafted_tokens=6,
        draft_accepted_tokens=4,
        draft_rejected_tokens=2,
        preemptions=1,
        steps=20,
        kv_block_ns=900 * MS,
        first_token_ns=sum(states.values()) // 3,
        first_token_states={state: spent_ns // 3 for state, spent_ns in states.items()},
        gap_max_ns=300 * MS,
        repeated_tokens=32,
        degenerate=DEGENERATE_KINDS[number % len(DEGENERATE_KINDS)] if outcome == "failed" else "",
        model=MODEL,
        route=route,
        routing=ROUTINGS[number % len(ROUTINGS)],
        promised_tokens=(0, 16, 32)[number % 3],
        reserved_tokens=100,
        charged_tokens=70,
        charged_micros=90,
    )


def _elsewhere() -> RequestRecord:
    states = {"parse": MS, "upstream": 400 * MS}
    return RequestRecord(
        request_id="e", outcome="stop", status=200, accepted_ns=0, finished_ns=401 * MS, states=states, model=MODEL,
        route=GENERATING_ROUTES[0], upstream=NEAR, first_token_ns=90 * MS, prompt_tokens=50, cached_tokens=10,
        output_tokens=20,
    )  # fmt: skip


def _step(replica: int, *, straggler: int) -> StepRecord:
    exchanges = {name: Exchange(calls=2, wait_ns=4 * MS, transfer_ns=MS, bytes=4096) for name in EXCHANGES}
    interconnect = InterconnectBook(
        kind="shared-memory",
        wait_ns=sum(one.wait_ns for one in exchanges.values()),
        transfer_ns=sum(one.transfer_ns for one in exchanges.values()),
        bubble_ns=2 * MS,
        bytes=sum(one.bytes for one in exchanges.values()),
        straggler=straggler,
        exchanges=exchanges,
        rank_wait_ns=(5 * MS, MS),
    )
    parts = dict.fromkeys(STEP_PARTS, 5 * MS)
    parts["interconnect_wait"] = interconnect.wait_ns
    parts["interconnect_transfer"] = interconnect.transfer_ns
    parts["bubble"] = interconnect.bubble_ns
    return StepRecord(
        step_id=1,
        replica=replica,
        ended_ns=0,
        step_ns=sum(parts.values()),
        parts=parts,
        compute_parts=dict.fromkeys(COMPUTE_PARTS, MS),
        tokens=60,
        prefill_tokens=20,
        recompute_tokens=20,
        decode_tokens=10,
        emitted_tokens=12,
        sequences=4,
        running=4,
        waiting=2,
        preemptions=1,
        cached_tokens=16,
        evictions=1,
        drafted_tokens=6,
        draft_accepted_tokens=4,
        draft_rejected_tokens=2,
        draft_rejected_ns=MS,
        interconnect=interconnect,
        waits=dict.fromkeys(WAITING_STATES, 1),
        gc_pause_ns=MS,
        starved_ns=2 * MS,
        kv=KvBook(768, 128, 64, 320, 128, 64, 64),
    )


def _view(readings: int) -> View:
    """The first replica and an upstream are down, a worker is silent, Redis is away."""
    steps = [msgspec.structs.replace(_step(replica, straggler=0), step_id=readings) for replica in (0, 1)]
    return View(
        replicas=tuple(
            ReplicaView(number, number > 0, readings, 250 * MS, step, MemoryReading(400, 300, 200, 100))
            for number, step in enumerate(steps)
        ),
        upstreams=tuple(
            UpstreamView(name=name, up=name == NEAR, in_flight=1, results=dict.fromkeys(UPSTREAM_RESULTS, readings))
            for name in (NEAR, FAR)
        ),
        live=dict.fromkeys(GENERATING_ROUTES, 2),
        drops=dict.fromkeys(DROP_REASONS, readings),
        pending_records=3,
        pending_spans=4,
        resident_bytes=123_456_789,
        starved_ns=readings * MS,
        pressure_ns=dict.fromkeys(PRESSURES, readings * MS),
        loop_tasks=12,
        workers=2,
        workers_silent=1,
        build=(("0.1.0", MODEL),),
        limits=LimitsView(
            up=False,
            openings=readings,
            commands_failed=readings,
            workers=2,
            held=2,
            owed=3,
            forgotten=readings,
            unknown=readings,
            refusals={(level, limit): readings for level in LEVELS for limit in LIMITS},
        ),
    )


@contextmanager
def troubled_page() -> Iterator[str]:
    """HOST:PORT of its page."""
    page = Troubled()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text, content_type = page.text()
            self.send_response(200)
            self.send_header("content-type", content_type)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Silence."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


class Prometheus:
    """One that runs."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=30)

    def values(self, expression: str) -> list[float]:
        """Of each series of the result, now.  The expression is right, or the test fails."""
        answer = self.http.get("/api/v1/query", params={"query": expression})
        assert answer.status_code == 200, (expression, answer.text)
        return [float(series["value"][1]) for series in answer.json()["data"]["result"]]

    def has(self, expression: str) -> bool:
        """Whether there are numbers."""
        values = self.values(expression)
        assert all(math.isfinite(value) for value in values), (expression, values)
        return bool(values)


@contextmanager
def scraping(folder: Path, targets: Sequence[str]) -> Iterator[Prometheus]:
    """What `pellucid dashboards render` writes, in a Prometheus; every second, because nobody has time."""
    write(folder, render(folder, targets=targets, prometheus_url="http://127.0.0.1:9090"))
    file = folder / "prometheus/prometheus.yml"
    config = yaml.safe_load(file.read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    file.write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    options = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(["prometheus", *options, "--log.level=warn"], stdout=log, stderr=log)
        prometheus = Prometheus(f"http://{address}")
        try:
            end_s = time.monotonic() + READY_S
            while not _is_ready(prometheus):
                assert process.poll() is None and time.monotonic() < end_s, (folder / "log").read_text()
                time.sleep(0.02)
            yield prometheus
        finally:
            prometheus.http.close()
            process.terminate()
            process.wait(30)


def _is_ready(prometheus: Prometheus) -> bool:
    try:
        return prometheus.http.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False
