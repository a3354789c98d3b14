"""
Recordings as text: a table of all, and one as JSON lines.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from engine.journal import Entry, Planned
from engine.recorder import entries_of
from engine.snapshot import Snapshot
from flight.choose import chosen
from launch.errors import UserError
from launch.sizes import format_bytes
from telemetry.flight import JOURNAL, RECORDS, Recording, recordings, records_of, together
from telemetry.records import RequestRecord, StepRecord
from telemetry.ring import FILES, RingError, Segment, is_free, read_ring
from telemetry.views import JsonObject, request_json, step_json


def table(folder: Path) -> Iterator[str]:
    """A line for each recording."""
    found = recordings(folder)
    if not found:
        yield f"No recordings in {folder}: `pellucid serve` makes them, unless --flight-memory is 0."
    for one in found:
        header = one.header
        kind = header.kind if header is not None else "nothing that can be read"
        state = "being written" if one.living else "ended"
        yield f"{one.path.name}  {kind}, {state}, {format_bytes(_bytes_on_disk(one))}"


def _bytes_on_disk(recording: Recording) -> int:
    return sum(path.stat().st_size for name in FILES if (path := recording.path / name).exists())


def lines(folder: Path, name: str | None, *, journal: bool) -> Iterator[str]:
    """A recording as JSON, the head first.  Raises UserError."""
    path = chosen(folder, name, kind=JOURNAL if journal else RECORDS)
    try:
        segments = read_ring(path)
        if segments[0].header.kind == JOURNAL:
            yield from _journal(path, segments)
        else:
            yield from _records(path, segments)
    except RingError as error:
        raise UserError(str(error)) from error


def when(segment: Segment, stamp_ns: int) -> str:
    """A stamp of the recording's clock as time of day."""
    at = datetime.fromtimestamp((stamp_ns + segment.header.wall_offset_ns) / 1e9, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _head(path: Path, segments: list[Segment], stamps_ns: list[int], **counts: int) -> str:
    first, last = segments[0], segments[-1]
    found = together(path)
    siblings = [one for one in found.parts if one.path != path.resolve()] if found is not None else []
    begin_ns, end_ns = min(stamps_ns, default=first.header.began_ns), max(stamps_ns, default=last.header.began_ns)
    return _line(
        {
            "recording": path.name,
            "process": first.header.name,
            "kind": first.header.kind,
            "epoch": first.header.epoch,
            "from": when(first, begin_ns),
            "to": when(last, end_ns),
            "seconds": round((end_ns - begin_ns) / 1e9, 3),
            **counts,
            "lost": last.lost,
            "torn": any(segment.torn for segment in segments),
            "being_written": not is_free(path),
            "siblings": [one.path.name for one in siblings],
        }
    )


def _records(path: Path, segments: list[Segment]) -> Iterator[str]:
    records = list(records_of(segments))
    steps = sum(isinstance(record, StepRecord) for record in records)
    yield _head(path, segments, [_ended_ns(one) for one in records], steps=steps, requests=len(records) - steps)
    for record in records:
        at = when(segments[-1], _ended_ns(record))
        if isinstance(record, StepRecord):
            requests: JsonObject = {str(number): name for number, name in record.requests.items()}
            yield _line({"record": "step", "at": at, **step_json(record), "requests": requests})
        else:
            yield _line({"record": "request", "at": at, **request_json(record, record.finished_ns)})


def _ended_ns(record: StepRecord | RequestRecord) -> int:
    return record.ended_ns if isinstance(record, StepRecord) else record.finished_ns


def _journal(path: Path, segments: list[Segment]) -> Iterator[str]:
    entries = list(entries_of(segments))
    stamps_ns = [entry.now_ns for entry in entries if not isinstance(entry, Snapshot)]
    plans = sum(isinstance(entry, Planned) for entry in entries)
    yield _head(path, segments, stamps_ns, entries=len(entries), steps=plans)
    for entry in entries:
        yield _line(_entry_json(entry, segments[-1]))


def _entry_json(entry: Entry, segment: Segment) -> JsonObject:
    fields = msgspec.to_builtins(entry)
    name = fields.pop("type")
    at = {} if isinstance(entry, Snapshot) else {"at": when(segment, entry.now_ns)}
    if isinstance(entry, Planned):  # In the file its fields have no names.
        slices = [msgspec.structs.asdict(piece) for piece in entry.plan.slices]
        fields["plan"] = {"step_id": entry.plan.step_id, "slices": slices}
    return {"entry": name, **at, **fields}


def _line(fields: JsonObject) -> str:
    return msgspec.json.encode(fields).decode()
