"""
The flight recorder of records: what the hub hears is kept, in directories that do not become too many.
"""

import logging
import os
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry import flight
from telemetry.flight import LIVES_MAX, Records, open_records, open_ring, read_records, recordings
from telemetry.hub import Hub
from telemetry.records import RequestRecord, StepRecord
from telemetry.ring import RING_BYTES_MIN, RingError, read_ring
from tests.contract.telemetry.records_strategy import MODEL, request_records, step_records
from tests.contract.telemetry.test_hub import a_record, a_step
from tests.contract.telemetry.test_metrics import read, total


@pytest.fixture(autouse=True)
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")


def opened(folder: Path, process: str = "gateway-0") -> Records:
    records = open_records(str(folder), process, ring_bytes=RING_BYTES_MIN)
    assert records is not None
    return records


@settings(max_examples=40, deadline=None)
@given(records=st.lists(st.one_of(step_records(), request_records()), max_size=20))
def test_records_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, records: list[StepRecord | RequestRecord]
) -> None:
    folder = tmp_path_factory.mktemp("flight")
    kept = opened(folder)
    for record in records:
        if isinstance(record, StepRecord):
            kept.step(record)
        else:
            kept.request(record)
    kept.close()
    assert list(read_records(recordings(folder)[0].path)) == records
    assert kept.lost == 0


async def test_the_hub_keeps_what_it_hears_and_one_worker_the_steps(tmp_path: Path) -> None:
    for worker in range(2):
        hub = Hub(model=MODEL, first=worker == 0, flight=opened(tmp_path, f"gateway-{worker}"))
        await hub.start()
        hub.step(a_step())
        hub.request(a_record())
        assert b'pellucid_telemetry_drops_total{reason="flight"} 0.0' in hub.metrics_text()[0]
        found = list(read_records(recordings(tmp_path)[-1].path))  # while it is written
        assert found == [a_step(), a_record()][worker:]
        await hub.stop()


def test_what_is_lost_is_counted(tmp_path: Path) -> None:
    hub = Hub(model=MODEL, flight=opened(tmp_path))
    hub.request(a_record(tenant="x" * RING_BYTES_MIN))
    hub.request(a_record())
    series = read(hub.metrics_text()[0])
    assert total(series, "pellucid_telemetry_drops_total", reason="flight") == 1
    assert list(read_records(recordings(tmp_path)[0].path)) == [a_record()]


def test_the_oldest_lives_make_room_and_those_of_others_stay(tmp_path: Path) -> None:
    living = opened(tmp_path)  # the oldest, and still there: another server with the same data directory
    opened(tmp_path, "gateway-1").close()
    for _ in range(LIVES_MAX + 3):
        opened(tmp_path).close()
    lives = [one for one in recordings(tmp_path) if one.process == "gateway-0"]
    assert len(lives) == LIVES_MAX + 1
    assert [one.living for one in lives] == [True] + [False] * LIVES_MAX
    assert [one.process for one in recordings(tmp_path)].count("gateway-1") == 1
    sizes = [sum(path.stat().st_size for path in one.path.iterdir()) for one in lives]
    assert sizes[0] == sizes[-1] and max(sizes[1:-1]) < 1000, "what was never written has been given back"
    living.close()


def test_an_old_life_that_is_unlike_ours_is_left_alone(tmp_path: Path) -> None:
    for name in ("notes", "engine-0-yesterday", "-20260101T000000000000"):
        (tmp_path / name).mkdir()
    opened(tmp_path).close()
    assert [one.process for one in recordings(tmp_path)] == ["gateway-0"]
    assert (tmp_path / "notes").is_dir()


def test_no_folder_no_recording_and_nothing_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert open_records("", "gateway-0", ring_bytes=RING_BYTES_MIN) is None
    assert recordings(Path("/nowhere")) == []
    assert caplog.records == []


def test_a_full_disk_means_no_recording_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING):
        assert open_records(str(tmp_path), "gateway-0", ring_bytes=RING_BYTES_MIN) is None
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["No space left on device"]
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_recording_of_records_is_said(tmp_path: Path) -> None:
    ring = open_ring(str(tmp_path), "engine-0", kind="journal", ring_bytes=RING_BYTES_MIN, epoch="e")
    assert ring is not None
    ring.close()
    path = recordings(tmp_path)[0].path
    header = read_ring(path)[0].header
    assert (header.name, header.kind, header.epoch) == ("engine-0", "journal", "e")
    assert abs(header.began_ns + header.wall_offset_ns - time.time_ns()) < 60e9
    with pytest.raises(RingError, match="this is a journal, and not a recording of records"):
        list(read_records(path))


def test_records_of_another_version_are_said(tmp_path: Path) -> None:
    ring = open_ring(str(tmp_path), "gateway-0", kind=flight.RECORDS, ring_bytes=RING_BYTES_MIN)
    assert ring is not None
    ring.put(b"s" + msgspec.msgpack.encode({"step_id": "seven"}))
    ring.close()
    with pytest.raises(RingError, match="a record is none of this version"):
        list(read_records(recordings(tmp_path)[0].path))
