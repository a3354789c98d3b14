"""
The flight recorder: what happened last, kept where it survives the process that it happened to.

    FOLDER/gateway-0-20261130T132851123456/    records of steps and requests, as the gateway's hub hears of them
    FOLDER/engine-0-20261130T132849001234/     the journal of that engine's scheduler (engine.recorder)

One directory for each life of each process, in it a ring (telemetry.ring).  Of several workers of a gateway each
records the requests that it served, and the first one the steps: `together` finds what belongs together.  Recording
never fails anybody: what cannot be written is counted, and a disk that is full at the start means no recording, which
the log says once.
"""

import logging
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from telemetry import clock
from telemetry.evidence import UNKNOWN, Facts
from telemetry.records import RequestRecord, StepRecord
from telemetry.ring import RING_BYTES_MIN, Header, Ring, RingError, Segment, head_of, is_free, read_ring, shrink

__all__ = ["RING_BYTES_MIN", "RingError"]

FIRST_WORKER = "gateway-0"
"""Of several it records the steps for all."""
LIVES_MAX = 8
"""Recordings that are kept for each process, the present one included."""
RECORDS, JOURNAL = "records", "journal"
_STEP, _REQUEST, _FACTS = b"s", b"r", b"f"
_NEVER = datetime.max.replace(tzinfo=UTC)
_STAMP = "%Y%m%dT%H%M%S%f"

_logger = logging.getLogger("pellucid.telemetry")


class Recording(NamedTuple):
    """One life of one process."""

    path: Path
    process: str
    """`gateway-0`"""
    began: datetime

    @property
    def header(self) -> Header | None:
        """None: it cannot be read."""
        return head_of(self.path)

    @property
    def living(self) -> bool:
        """Whether somebody still writes there."""
        return not is_free(self.path)


def recordings(folder: Path) -> list[Recording]:
    """All that are there, the oldest first."""
    found = [one for path in folder.iterdir() if (one := recording_at(path))] if folder.is_dir() else []
    return sorted(found, key=lambda one: (one.began, one.process))


def recording_at(path: Path) -> Recording | None:
    """The one in this directory; None: by its name it is none."""
    process, _, stamp = path.name.rpartition("-")
    try:
        return Recording(path, process, datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC)) if process else None
    except ValueError:
        return None


class Together(NamedTuple):
    """Recordings of the workers of one gateway, each of which has a part of what happened."""

    parts: tuple[Recording, ...]
    """The oldest first."""
    until_ns: int | None
    """By their clock: then the one that was asked for ended, and its process began anew; None: it did not."""

    def said(self) -> str:
        """Which they are, and what is missing."""
        named = ", ".join(one.path.name for one in self.parts)
        if any(one.process == FIRST_WORKER for one in self.parts):
            return named
        return f"{named} (that of {FIRST_WORKER} is not there, so there are no steps)"


def together(directory: Path) -> Together | None:
    """
    This recording, and those of all workers of the same gateway that lived when it was made.

    None: it is no part of anything.
    """
    directory = directory.resolve()
    head, own = head_of(directory), recording_at(directory)
    if head is None or own is None or not head.start:
        return None
    lives: dict[str, list[Recording]] = {}
    for one in recordings(directory.parent):
        if one == own or ((header := one.header) is not None and header.start == head.start):
            lives.setdefault(one.process, []).append(one)
    ends = {one: later.began for several in lives.values() for one, later in pairwise(several)}
    end = ends.get(own, _NEVER)
    everybody = [one for several in lives.values() for one in several]
    parts = [one for one in everybody if one.began < end and ends.get(one, _NEVER) > own.began]
    until_ns = int(end.timestamp() * 1e9) - head.wall_offset_ns if own in ends else None
    return Together(tuple(sorted(parts, key=lambda one: (one.began, one.process))), until_ns)


def open_ring(
    folder: str, process: str, *, kind: str, ring_bytes: int, epoch: str = "", start: str = ""
) -> Ring | None:
    """
    A new ring for this life of `process`; the oldest of its lives are removed.  None: there is to be no recording, or
    there can be none, and then the log says why.
    """
    if not folder:
        return None
    now_ns, wall_ns = clock.now_ns(), time.time_ns()
    header = Header(
        kind=kind,
        name=process,
        epoch=epoch,
        start=start,
        clock_id=clock.CLOCK_ID,
        wall_offset_ns=wall_ns - now_ns,
        began_ns=now_ns,
        number=0,
        bytes=0,
    )
    began = datetime.fromtimestamp(wall_ns / 1e9, UTC)
    path = Path(folder) / f"{process}-{began.strftime(_STAMP)}"
    try:
        path.mkdir(parents=True, mode=0o700)
        Path(folder).chmod(0o700)
        _make_room(Path(folder), process)
        return Ring(path, header, ring_bytes=ring_bytes)
    except OSError as error:
        _logger.warning("no flight recording in %s: %s", path, error.strerror or error)
        shutil.rmtree(path, ignore_errors=True)
        return None


def _make_room(folder: Path, process: str) -> None:
    """Of the lives of `process` that are over the newest stay, without what was never written."""
    lives = [one for one in recordings(folder) if one.process == process]
    for index, one in enumerate(lives[:-1]):
        if shrink(one.path) and index < len(lives) - LIVES_MAX:
            shutil.rmtree(one.path, ignore_errors=True)


class Records:
    """A ring of records: a consumer of the hub."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._encoder = msgspec.msgpack.Encoder()
        self._facts = UNKNOWN

    @property
    def lost(self) -> int:
        """Records that were not written."""
        return self._ring.lost

    def step(self, record: StepRecord) -> None:
        """An engine has made a step."""
        self._put(_STEP, record)

    def request(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._put(_REQUEST, record)

    def facts(self, facts: Facts) -> None:
        """The system is set up so, from now on; each segment begins with it."""
        self._facts = facts
        self._put(_FACTS, facts)

    def close(self) -> None:
        """There is nothing more to come."""
        self._ring.close()

    def _put(self, kind: bytes, record: StepRecord | RequestRecord | Facts) -> None:
        now_ns = clock.now_ns()
        if self._ring.full or self._ring.old(now_ns):
            self._ring.turn(now_ns)
            self._ring.put(_FACTS + self._encoder.encode(self._facts))
        self._ring.put(kind + self._encoder.encode(record))


def open_records(folder: str, process: str, *, ring_bytes: int, start: str = "") -> Records | None:
    """As `open_ring`, for records; `start` is what several workers have in common."""
    ring = open_ring(folder, process, kind=RECORDS, ring_bytes=ring_bytes, start=start)
    return Records(ring) if ring is not None else None


def read_records(directory: Path) -> Iterator[StepRecord | RequestRecord]:
    """
    The records of a recording in the order in which they were written, also while it is written.  Raises RingError.

    A step's `finished` is what the engine says of requests; a request's own record is the whole, with the gateway's
    part.
    """
    yield from records_of(read_ring(directory))


def read_facts(directory: Path) -> Facts:
    """How the system of a recording was set up at last.  Raises RingError."""
    frames = [frame for segment in read_ring(directory) for frame in segment.frames if frame[:1] == _FACTS]
    try:
        return msgspec.msgpack.decode(frames[-1][1:], type=Facts) if frames else UNKNOWN
    except msgspec.MsgspecError as error:
        raise RingError(f"a record is none of this version: {error}") from error


def records_of(segments: list[Segment]) -> Iterator[StepRecord | RequestRecord]:
    """Those of segments that have been read.  Raises RingError: they are of another kind."""
    kind = segments[0].header.kind
    if kind != RECORDS:
        raise RingError(f"this is a {kind}, and not a recording of records")
    for segment in segments:
        for frame in segment.frames:
            if frame[:1] == _FACTS:
                continue
            try:
                yield msgspec.msgpack.decode(frame[1:], type=StepRecord if frame[:1] == _STEP else RequestRecord)
            except msgspec.MsgspecError as error:
                raise RingError(f"a record is none of this version: {error}") from error
