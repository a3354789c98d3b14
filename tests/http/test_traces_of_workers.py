"""
Several workers as real processes: one file for the traces of all, and one of them pushes the metrics of all.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.contract.telemetry.otlp_file import read_trace_file
from tests.contract.telemetry.otlp_sink import Collector, http_collector
from tests.contract.telemetry.trees import received, roots
from tests.http.asking import CHAT_URL
from tests.http.guard import until
from tests.http.harness import ShellEngine
from tests.http.workers import Workers

TRIES_MAX = 80


@pytest.fixture
def both(model_dir: Path, vocab_size: int) -> Iterator[tuple[Workers, Path, Collector]]:
    """Two workers, their trace file, and their collector."""
    with TemporaryDirectory(prefix="pellucid") as home, http_collector() as sink:
        shell = ShellEngine(f"{home}/engine.sock", vocab_size=vocab_size)
        shell.start()
        path = Path(home) / "traces.jsonl"
        exports = {"export_trace": str(path), "otlp_endpoint": sink.url, "otlp_metrics": True}
        workers = Workers(model_dir, f"{home}/engine.sock", Path(home), 2, **exports)
        yield workers, path, sink
        workers.stop()
        shell.stop()


def test_all_traces_are_in_one_file_and_all_numbers_in_one_push(both: tuple[Workers, Path, Collector]) -> None:
    workers, path, sink = both
    ids: list[str] = []
    while len({workers.worker_of(one) for one in ids}) < 2:  # the kernel gives each connection to whoever is quicker
        assert len(ids) < TRIES_MAX, "one worker has taken every connection"
        ids.append(f"request-{len(ids)}")
        assert workers.post(ids[-1]).status_code == 200
        until(lambda: workers.worker_of(ids[-1]) is not None, "it is not logged")
    until(lambda: path.read_text().count("\n") >= len(ids), "there are not all lines")
    assert set(roots(map(received, read_trace_file(path).spans))) == set(ids)
    spans = sink.wait_until(lambda spans: sum(span.name == f"POST {CHAT_URL}" for span in spans) == len(ids), 30)
    assert set(roots(map(received, spans))) == set(ids)

    def told() -> int:
        metric = sink.metrics.get("pellucid_requests_total")
        return sum(point.as_int for point in metric.sum.data_points) if metric else 0

    until(lambda: told() >= len(ids), "the metrics of all are not there")
    steps = sum(point.as_int for point in sink.metrics["pellucid_engine_steps_total"].sum.data_points)
    assert steps == workers.get("/debug/steps").json()["steps"][0]["step_id"], "each step counts once"
    assert not sink.faults
