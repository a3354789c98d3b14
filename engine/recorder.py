"""
The journal of an engine, as it goes into the flight recorder's ring.

Each segment of the ring begins with a snapshot of the scheduler, so a replay can begin at either.  A segment is begun
between two steps only.  Where something did not fit, the next one is begun at once, and says so.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec
import structlog

from engine.api import Message
from engine.journal import Applied, Entry, Notes, Planned, Stopped, committed
from engine.outcome import Outcome
from engine.plan import StepPlan, StepResult
from engine.scheduler import Scheduler
from engine.snapshot import Snapshot, capture
from telemetry.flight import JOURNAL, open_ring
from telemetry.ring import Ring, RingError, Segment

log = structlog.get_logger("engine")


class Journal:
    """Implements `engine.loop.Recorder`."""

    def __init__(self, ring: Ring, scheduler: Scheduler) -> None:
        self._ring = ring
        self._scheduler = scheduler
        self._encoder = msgspec.msgpack.Encoder()
        self._notes = Notes()
        self._complete = True  # every entry behind the newest snapshot is there
        self._roomy = False  # that snapshot has left room for some
        self._complained = self._off = False
        self._guarded(self._snapshot)

    def applied(self, message: Message, now_ns: int) -> None:
        """See `Recorder`."""
        self._guarded(lambda: self._put(Applied(message, now_ns)))

    def planned(self, plan: StepPlan, now_ns: int) -> None:
        """See `Recorder`."""
        self._guarded(lambda: self._put(Planned(self._notes.note(plan), now_ns)))

    def committed(self, result: StepResult, outcome: Outcome, now_ns: int) -> None:
        """See `Recorder`."""
        self._guarded(lambda: self._end_step(result, outcome, now_ns))

    def stopped(self, now_ns: int) -> None:
        """See `Recorder`."""
        self._guarded(lambda: self._put(Stopped(now_ns)))

    def close(self) -> None:
        """There is nothing more to come."""
        self._ring.close()

    def _end_step(self, result: StepResult, outcome: Outcome, now_ns: int) -> None:
        self._put(committed(result, now_ns, outcome.draft_rejected_share))
        # Where the snapshot itself hardly fits, there is no use in another one at once: it costs more than a step.
        if self._ring.old(now_ns) or (self._roomy and (self._ring.full or not self._complete)):
            self._ring.turn(now_ns)
            self._snapshot()

    def _snapshot(self) -> None:
        snapshot = capture(self._scheduler, continues=self._complete)
        self._notes, self._complete = Notes(), True
        self._put(snapshot)
        self._roomy = self._complete and not self._ring.full

    def _put(self, entry: Entry) -> None:
        """Behind something that is missing nothing is of use."""
        if self._complete:
            self._complete = self._ring.put(self._encoder.encode(entry))
        else:
            self._ring.lose()
        if not self._complete and not self._complained:
            self._complained = True
            log.warning("journal_gap", consequence="what happens now cannot be replayed: --flight-memory is too small")

    def _guarded(self, write: Callable[[], None]) -> None:
        """Whatever is wrong with the recorder, nobody else may suffer."""
        if self._off:
            return
        try:
            write()
        except Exception:
            log.exception("journal_failed", consequence="no journal until the engine is started again")
            self._off = True
            self._ring.close()


def open_journal(folder: str, process: str, scheduler: Scheduler, *, ring_bytes: int, epoch: str) -> Journal | None:
    """As `telemetry.flight.open_ring`, with a journal of `scheduler` in it."""
    ring = open_ring(folder, process, kind=JOURNAL, ring_bytes=ring_bytes, epoch=epoch)
    return Journal(ring, scheduler) if ring is not None else None


def entries_of(segments: Iterable[Segment]) -> Iterator[Entry]:
    """The journal in segments that have been read.  Raises RingError: it is none, or one of another version."""
    before: Segment | None = None
    for segment in segments:
        if segment.header.kind != JOURNAL:
            raise RingError(f"this is a recording of {segment.header.kind}, and no journal of an engine")
        follows = before is None or (before.header.number + 1 == segment.header.number and not before.torn)
        for frame in segment.frames:
            try:
                entry: Entry = msgspec.msgpack.decode(frame, type=Entry)
            except msgspec.MsgspecError as error:
                raise RingError(f"the journal is of another version, which can replay it: {error}") from error
            if isinstance(entry, Snapshot) and not follows:
                entry = msgspec.structs.replace(entry, continues=False)
            yield entry
        before = segment
