"""
A journal replayed, and what came of it in words.
"""

from pathlib import Path

from engine.journal import PlanNote, Replay
from engine.recorder import entries_of
from engine.snapshot import Snapshot
from flight.choose import chosen
from flight.difference import difference
from flight.show import when
from launch.errors import UserError
from telemetry.flight import JOURNAL
from telemetry.ring import RingError, Segment, read_ring


def replayed(folder: Path, name: str | None) -> tuple[str, bool]:
    """What to tell about a recording, and whether all plans are the same.  Raises UserError."""
    path = chosen(folder, name, kind=JOURNAL)
    try:
        segments = read_ring(path)
        entries = list(entries_of(segments))
    except RingError as error:
        raise UserError(str(error)) from error
    if not any(isinstance(entry, Snapshot) for entry in entries):
        raise UserError(f"{path}: the journal has no snapshot from which it could be replayed")
    run = Replay()
    try:
        run.run(entries)
    except Exception as error:  # noqa: BLE001 - a scheduler that has gone another way may do anything with the rest
        words = f"{type(error).__name__}: {error}".rstrip(": ")
        return f"{_span(path, segments, run)}\nBehind step {run.step_id} the scheduler fails: {words}", False
    if run.divergence is None:
        return f"{_span(path, segments, run)}: all plans are the same.{_in_flight(run)}", True
    found = run.divergence.recorded
    where = f"Step {found.step_id}" if isinstance(found, PlanNote) else f"Behind step {found.step_id} what is known"
    return f"{_span(path, segments, run)}.\n{where} differs: {difference(run.divergence, run.names())}.", False


def _span(path: Path, segments: list[Segment], run: Replay) -> str:
    since = when(segments[0], run.begin_ns)
    gaps = f", with {run.gaps} gap{'s' * (run.gaps > 1)} in between" if run.gaps else ""
    return f"{path.name}: {run.steps} steps from {since} to {when(segments[-1], run.end_ns)} replayed{gaps}"


def _in_flight(run: Replay) -> str:
    """Whom the engine was computing for when it ended, if it did so in the midst of a step."""
    if run.in_flight is None or not run.in_flight.slices:
        return ""
    names = run.names()
    whose = [names.get(piece.sequence, f"sequence {piece.sequence}") for piece in run.in_flight.slices]
    return f"\nStep {run.in_flight.step_id} was in flight at the end, for {', '.join(whose)}."
