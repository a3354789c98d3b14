"""
More records than one look sees: what several workers of a gateway have recorded is one, and of long files of traces
the newest count.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from diagnosis.sources import asked, traces
from diagnosis.sources.recording import recorded
from diagnosis.sources.traces import of_trace_file
from flight.choose import chosen
from flight.show import lines
from launch.errors import UserError
from pellucid import cli
from telemetry import flight
from telemetry.flight import Records, open_records, recordings, together
from telemetry.records import RequestRecord
from tests.contract.diagnosis.test_sources import SLOW, line
from tests.core.test_diagnosis import MS, QUIET, busy, request

START = "serve-a"


def opened(folder: Path, worker: int, start: str = START) -> Records:
    records = open_records(str(folder), f"gateway-{worker}", ring_bytes=1 << 20, start=start)
    assert records is not None
    return records


def newest(folder: Path, process: str) -> Path:
    return [one.path for one in recordings(folder) if one.process == process][-1]


def names(directory: Path) -> list[str]:
    """Of the requests that were recorded there and beside it."""
    return [one.request_id for one in recorded(directory, None).requests]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What two workers have left: the first one the steps and some requests, the other one the slow request."""
    folder = tmp_path / "flight"
    first, second = opened(folder, 0), opened(folder, 1)
    for number in range(20):
        first.step(busy(number))
    for number in range(6):
        (first, second)[number % 2].request(request(number, QUIET, finished_ns=(number + 1) * MS))
    second.request(SLOW)
    for one in (first, second):
        one.close()
    return folder


@pytest.mark.parametrize("process", ["gateway-0", "gateway-1"])
def test_requests_are_those_of_all_workers_newest_first_and_steps_those_of_the_first(
    folder: Path, process: str
) -> None:
    directory = newest(folder, process)
    evidence = recorded(directory, None)
    assert [one.request_id for one in evidence.requests] == ["r7", "r5", "r4", "r3", "r2", "r1", "r0"]
    assert evidence.totals.steps == 20
    assert asked.why_recorded("r7", directory).causes[0].cause == "kv_starvation"
    assert asked.why_recorded("r0", directory).request_id == "r0"
    assert [one.cause for one in asked.report_recorded(directory, 300).findings] == ["kv_starvation"]


def test_it_is_said_which_were_taken(folder: Path) -> None:
    both = ", ".join(newest(folder, f"gateway-{worker}").name for worker in range(2))
    with pytest.raises(UserError, match=f"there is no request 'r9' in {both}$"):
        asked.why_recorded("r9", newest(folder, "gateway-1"))
    place = str(newest(folder, "gateway-1"))
    done = CliRunner().invoke(cli, ["why", "r0", "--flight", place])
    assert done.exit_code == 0 and done.stderr == f"Taken together: {both}\n"
    for path in newest(folder, "gateway-0").iterdir():
        path.unlink()
    done = CliRunner().invoke(cli, ["why", "r1", "--flight", place])
    assert done.stderr.endswith("(that of gateway-0 is not there, so there are no steps)\n")


def test_an_only_worker_and_those_of_another_start_stand_alone(folder: Path) -> None:
    other, alone = opened(folder, 1, start="serve-b"), opened(folder, 0, start="")
    other.request(request(8, QUIET))
    alone.request(request(9, QUIET))
    assert names(newest(folder, "gateway-1")) == ["r8"]
    assert names(newest(folder, "gateway-0")) == ["r9"]
    assert together(newest(folder, "gateway-0")) is None
    for one in (other, alone):
        one.close()


def test_a_life_is_joined_with_the_lives_beside_it_and_ends_where_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns, wall_ns = 0, 1_800_000_000_000_000_000
    monkeypatch.setattr("telemetry.clock.now_ns", lambda: now_ns)
    monkeypatch.setattr("time.time_ns", lambda: wall_ns + now_ns)
    first, second = opened(tmp_path, 0), opened(tmp_path, 1)

    def ended(records: Records, name: str) -> None:
        records.request(request(0, QUIET, request_id=name, finished_ns=now_ns))

    now_ns = 10_000_000_000
    ended(first, "early by 0")
    ended(second, "early by 1")
    second.close()
    now_ns = 20_000_000_000
    third = opened(tmp_path, 1)  # in place of the second one, which has died
    now_ns = 30_000_000_000
    ended(first, "late by 0")
    ended(third, "late by 1")
    lives = [one.path for one in recordings(tmp_path) if one.process == "gateway-1"]
    assert set(names(lives[0])) == {"early by 0", "early by 1"}
    assert set(names(lives[1])) == {"early by 0", "late by 0", "late by 1"}
    assert set(names(newest(tmp_path, "gateway-0"))) == {"early by 0", "early by 1", "late by 0", "late by 1"}
    for one in (first, third):
        one.close()


def test_a_dump_is_of_the_worker_that_has_the_steps_and_names_the_others(folder: Path) -> None:
    assert recordings(folder)[-1].process == "gateway-1"
    assert chosen(folder, None, kind=flight.RECORDS) == newest(folder, "gateway-0")
    head = json.loads(next(lines(folder, None, journal=False)))
    assert (head["steps"], head["siblings"]) == (20, [newest(folder, "gateway-1").name])


def test_of_traces_the_newest_stay_and_the_one_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "REQUESTS_MAX", 3)
    file = tmp_path / "traces.jsonl"

    def write(*several: RequestRecord) -> None:
        file.write_bytes(b"".join(map(line, several)))

    def found(name: str) -> list[tuple[str, int]]:
        return [(one.request_id, one.finished_ns - 1) for one in of_trace_file(file, name)]

    write(*(request(number, QUIET, finished_ns=number * MS) for number in (5, 1, 4, 2, 3)))
    assert found("r4") == [("r5", 5 * MS), ("r4", 4 * MS), ("r3", 3 * MS)]
    assert found("r1") == [("r5", 5 * MS), ("r4", 4 * MS), ("r3", 3 * MS), ("r1", MS)]
    again = (request(1, QUIET, finished_ns=number * MS, status=number) for number in (6, 9, 7))
    write(request(1, QUIET, finished_ns=MS), *again)
    assert found("r1") == [("r1", 9 * MS), ("r1", 7 * MS), ("r1", 6 * MS)]
    assert asked.why_traced("r1", trace=str(file), jaeger=None).e2e_ns == 9 * MS


def test_a_file_of_traces_is_never_there_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Path, "read_bytes")
    file = tmp_path / "traces.jsonl"
    with file.open("wb") as writer:
        writer.write(line(SLOW))
    assert [one.request_id for one in of_trace_file(file, "r7")] == ["r7"]
    monkeypatch.setattr(traces, "LINE_BYTES_MAX", 100)
    with pytest.raises(UserError, match="does not hold traces"):
        of_trace_file(file, "r7")


def test_a_torn_line_takes_nothing_else_with_it(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    whole = [line(request(number, QUIET)) for number in range(4)]
    file.write_bytes(whole[0][100:] + whole[1] + whole[2] + whole[3][:-200])
    assert {one.request_id for one in of_trace_file(file, "r1")} == {"r1", "r2"}
    assert asked.why_traced("r2", trace=str(file), jaeger=None).outcome == "stop"


def test_a_recording_that_reaches_less_far_back_does_not_say_more(folder: Path) -> None:
    assert recorded(newest(folder, "gateway-0"), 300).window_ns < 300 * 10**9
