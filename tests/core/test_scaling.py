"""`pellucid bench scaling` without a server: what is compared, how answers and counters are read, what is summed up."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.appliance import Books, clean, last_words, read_books
from bench.host import busy_s, tree_s
from bench.load import Answer, Answers, Load, ServerError, read_answer
from bench.scaling import Sample, Settings, configurations, percentile, summary
from bench.table import Report, scaling_table
from bench.verdict import Row

LOAD = Load(streams=1, requests=1, prompt_words=1, output_tokens=2, seed=0)
METRICS = """\
# TYPE pellucid_engine_steps_total counter
pellucid_engine_steps_total{replica="0"} 10.0
pellucid_engine_steps_total{replica="1"} 2.0
# TYPE pellucid_engine_step_part_seconds_total counter
pellucid_engine_step_part_seconds_total{part="compute",replica="0"} 1.5
pellucid_engine_step_part_seconds_total{part="compute",replica="1"} 0.5
pellucid_engine_step_part_seconds_total{part="interconnect_wait",replica="0"} 0.25
# TYPE pellucid_engine_straggler_steps_total counter
pellucid_engine_straggler_steps_total{rank="1",replica="0"} 8.0
"""


def settings(**changes: object) -> Settings:
    plain = Settings(model="m", ranks=(1, 2, 3), replicas=True, threads=0, rounds=1, load=LOAD, serve_options=())
    return msgspec.structs.replace(plain, **changes)


def event(at_ns: int, text: str) -> tuple[int, bytes]:
    return at_ns, b'data: {"choices": [{"index": 0, "text": "' + text.encode() + b'"}], "usage": null}\n'


USAGE = (90, b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n')
DONE = (91, b"data: [DONE]\n")


def test_ranks_and_as_many_replicas_share_the_processors() -> None:
    found = configurations(settings(), 4)
    assert [one.name for one in found] == ["1 rank", "2 ranks", "3 ranks", "2 replicas", "3 replicas"]
    assert [one.processors for one in found] == [4, 4, 3, 4, 3]
    assert [one.processors for one in configurations(settings(threads=1), 2)] == [1, 2, 2, 2, 2]
    assert [one.name for one in configurations(settings(replicas=False), 4)] == ["1 rank", "2 ranks", "3 ranks"]


def test_an_answer_is_read_from_its_lines() -> None:
    lines = [event(15, "a"), (16, b"\n"), event(20, ""), event(25, "b"), event(45, "c"), USAGE, DONE]
    assert read_answer(10, lines) == Answer(5, (10, 20), 7, 3)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_an_answer_that_is_not_whole_is_none(missing: int) -> None:
    lines = [event(15, "a"), USAGE, DONE]
    del lines[missing]
    with pytest.raises(ServerError, match="cut off"):
        read_answer(10, lines)


def test_an_error_in_the_stream_is_told() -> None:
    with pytest.raises(ServerError, match="no room"):
        read_answer(0, [event(15, "a"), (16, b'data: {"error": {"message": "no room"}}\n')])


def test_counters_are_of_all_replicas_and_of_the_time_between() -> None:
    books = read_books(METRICS)
    assert books == Books(12, {"compute": 2.0, "interconnect_wait": 0.25}, {"1": 8})
    assert books.since(Books(2, {"compute": 0.5}, {})) == Books(
        10, {"compute": 1.5, "interconnect_wait": 0.25}, {"1": 8}
    )
    assert read_books("") == Books(0, {}, {})


def sample(tokens: int, wall_ns: int, wait_s: float) -> Sample:
    answers = Answers(wall_ns, (Answer(2_000_000, (1_000_000, 3_000_000), 5, tokens),))
    return Sample(answers, Books(10, {"compute": 1.0, "interconnect_wait": wait_s}, {"1": 8}), "gloo", wait_s / 10)


def test_figures_are_medians_over_rounds() -> None:
    rounds = [sample(100, 10**9, 1.0), sample(100, 5 * 10**8, 3.0), sample(100, 10**8, 1.0)]
    found = summary(Row(ranks=2, processors=2), rounds, 100.0)
    assert found.rounds_tokens_per_s == (100.0, 200.0, 1000.0)
    assert (found.tokens_per_s, found.speedup, found.efficiency) == (200.0, 2.0, 1.0)
    assert (found.first_p50_ms, found.gap_p50_ms, found.gap_p99_ms) == (2.0, 1.0, 3.0)
    assert found.shares == {"compute": 0.5, "interconnect_wait": 0.5}
    assert found.part_us == {"compute": 10000.0, "interconnect_wait": 10000.0}
    assert (found.straggler_shares, found.interconnect, found.others_share) == ({"1": 0.8}, "gloo", 0.1)
    assert summary(Row(processors=2), rounds, 0.0).speedup == 0  # one rank alone was refused: nothing to compare with


def test_one_that_did_not_run_has_a_row_too() -> None:
    rows = (Row(processors=1, tokens_per_s=1.0, speedup=1.0, efficiency=1.0), Row(ranks=2, processors=2, refused="no"))
    report = Report(commit="", host="h", processors=2, model="m", settings={}, rows=rows, verdict="v")
    assert scaling_table(report).row_count == 2
    assert msgspec.json.decode(msgspec.json.encode(report))["rows"][1]["refused"] == "no"


@given(st.lists(st.integers(0, 1000), min_size=1), st.floats(0, 1))
def test_a_percentile_is_one_of_the_values_that_enough_are_not_above(values: list[int], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) <= share * len(values)


def test_nothing_has_no_percentile() -> None:
    assert percentile([], 0.5) == 0


def test_options_in_the_environment_do_not_reach_what_is_compared() -> None:
    environ = {"PELLUCID_REPLICAS": "3", "PELLUCID_KERNELS": "avx2", "HOME": "h", "OTEL_EXPORTER_OTLP_ENDPOINT": "x"}
    kept = clean(environ | {"PYTHONPATH": "theirs"})
    assert (kept["HOME"], kept["PELLUCID_KERNELS"]) == ("h", "avx2")
    assert not kept.keys() & {"PELLUCID_REPLICAS", "OTEL_EXPORTER_OTLP_ENDPOINT"}
    assert kept["PYTHONPATH"].endswith(":theirs")


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not say where processor time went")
def test_what_a_child_has_spent_is_ours() -> None:
    before_s, busy_before_s = tree_s(os.getpid()), busy_s()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True, timeout=60)
    spent_s = tree_s(os.getpid()) - before_s
    assert 0.05 < spent_s <= busy_s() - busy_before_s + 0.1  # ticks are rounded
    assert tree_s(2**22 + 1) == 0


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("a\npellucid: too little memory\n", "too little memory"),
        ("pellucid: first\npellucid: 3 ranks are too many\nb\n\n", "3 ranks are too many"),
        ("pellucid engine: --tensor-parallel 5: no\nb\n", "--tensor-parallel 5: no"),
        ("a\nb\n\n", "b"),
        ("", ""),
    ],
)
def test_a_refusal_is_in_its_own_words(log: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_text(log)
    assert last_words(file) == words
