"""
A full disk under the data directory: what is served goes on and is recorded; each gateway keeps the limits for itself.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flight.replay import replayed
from telemetry.flight import recordings
from tests.chaos.conftest import Fleet, new_key
from tests.live.conftest import serve

DISK_BYTES = 64 << 20
"""Too little for the packed weights, which are then not kept."""


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of its own."""
    with tempfile.TemporaryDirectory(prefix="pellucid-disk-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", folder]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def test_it_fills_up(small_disk: Path, default_model: Path) -> None:
    key = new_key(small_disk)
    options = ["--model", str(default_model), "--data-dir", str(small_disk), "--threads", "2"]
    with serve(*options, "--kv-memory", "256MiB", "--drain", "2", "--flight-memory", "4MiB") as appliance:
        fleet = Fleet(appliance, small_disk, key, 1)
        assert fleet.post(max_tokens=4).status_code == 200
        text = fleet.stream(fleet.body(1)).end().text
        filler = small_disk / "filler"
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            except OSError:
                pass
        assert os.statvfs(small_disk).f_bavail == 0
        statuses = [fleet.post(max_tokens=4).status_code for _ in range(60)]
        stream = fleet.stream(fleet.body(1)).end()
        assert (stream.error, stream.text) == ("", text)
        health = fleet.get("/health")["status"]
        print(f"full disk: {statuses.count(200)} of {len(statuses)} answered, health says {health}")
        assert statuses == [200] * len(statuses)
        recorded = [one.header for one in recordings(small_disk / "flight")]
        assert [one.kind for one in recorded if one is not None] == ["journal", "records"]
        assert replayed(small_disk / "flight", None)[1], "the journal goes on: its place was reserved"
        filler.unlink()
        well_s = fleet.until(lambda: fleet.get("/health")["status"] == "ok", "well again")
        print(f"room on the disk again: well after {well_s:.1f} s")
        assert fleet.post(max_tokens=4).status_code == 200
