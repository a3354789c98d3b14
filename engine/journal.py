"""
The journal: what went into the core, in order, and what it decided.

Because the core is a function of its messages, of the times, of the device's results and of what was guessed ahead, a
journal replays an incident without the device and without the clients, and the first plan that differs names the step
where the code changed.

A replay may begin at any snapshot; at one that it comes to it must know the same.  Of a plan the journal has what was
decided (`PlanNote`); how tokens are sampled follows from the request, but for the random numbers, which are there.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Many

import msgspec

from engine.api import Message
from engine.plan import Slice, SliceResult, StepPlan, StepResult
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.snapshot import Snapshot, capture, restore


class SliceNote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a plan says of one sequence."""

    sequence: int
    start: int
    tokens: tuple[int, ...]
    kept: int
    """Of its block table in the plan before: so many blocks from the first one on are as they were."""
    blocks: tuple[int, ...]
    """Those behind."""
    drafts: int
    uniforms: tuple[float, ...]
    """One for each row that samples."""


class PlanNote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a plan has decided."""

    step_id: int
    slices: tuple[SliceNote, ...]


class Notes:
    """Makes notes of plans, of each with regard to the one before it."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[int, ...]] = {}

    def note(self, plan: StepPlan) -> PlanNote:
        """The next plan."""
        before = self._tables
        self._tables = {piece.sequence: piece.blocks for piece in plan.slices}
        return PlanNote(plan.step_id, tuple(_note(piece, before.get(piece.sequence, ())) for piece in plan.slices))


def _note(piece: Slice, before: tuple[int, ...]) -> SliceNote:
    blocks, kept = piece.blocks, len(before)
    if blocks[:kept] != before:
        kept = 0
    uniforms = piece.sample.uniforms if piece.sample is not None else ()
    return SliceNote(piece.sequence, piece.start, piece.tokens, kept, blocks[kept:], piece.drafts, uniforms)


class Applied(msgspec.Struct, frozen=True, tag="applied"):
    """A message was taken in."""

    message: Message
    now_ns: int


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """A step was chosen."""

    plan: PlanNote
    now_ns: int


class Committed(msgspec.Struct, frozen=True, tag="committed", omit_defaults=True):
    """The device's answer was booked.  Log probabilities, which decide nothing, may be left out."""

    result: StepResult
    now_ns: int
    wasted_share: float = 0.0
    """Of the step's time, by speculation's model of its costs."""


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """Everything was ended: the engine went down in good order."""

    now_ns: int


Entry = Snapshot | Applied | Planned | Committed | Stopped


def committed(result: StepResult, now_ns: int, wasted_share: float) -> Committed:
    """An entry without log probabilities."""
    if any(piece.logprobs for piece in result.slices):
        slices = tuple(SliceResult(one.emitted, (), one.fault, one.degenerate) for one in result.slices)
        result = msgspec.structs.replace(result, slices=slices)
    return Committed(result, now_ns, wasted_share)


class Told:
    """
    Implements `engine.speculate.Speculation`: says what was said when the journal was written.

    Of wishes that is what came of them: they find their blocks in the batch's order, and what was cut off for want of
    one takes none.
    """

    def __init__(self) -> None:
        self._wishes: dict[int, tuple[int, ...]] = {}
        self.wasted = 0.0

    def look(self, plan: PlanNote) -> None:
        """The next wishes are those of this plan."""
        pieces = [piece for piece in plan.slices if piece.drafts]
        self._wishes = {piece.sequence: piece.tokens[-piece.drafts :] for piece in pieces}

    def wish(self, asking: Many[Sequence], budget: int) -> dict[int, tuple[int, ...]]:
        """Whoever asks: where a replay goes another way, its plan shows it."""
        del asking, budget
        return self._wishes

    def answered(self, sequence: Sequence, emitted: Many[int]) -> None:
        """It learns nothing."""

    def spent(self, rows: int, keys: float, spent_ns: int) -> None:
        """It learns nothing."""

    def wasted_share(self, rows: int, keys: float, rejected: int) -> float:
        """As it was."""
        del rows, keys, rejected
        return self.wasted

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """It learns nothing."""


class Divergence(msgspec.Struct, frozen=True):
    """The first step at which a replay is not what was recorded: its plan, or what is known behind it."""

    recorded: PlanNote | Snapshot
    replayed: PlanNote | Snapshot


class Replay:
    """Runs a journal.  Same entries, same answers."""

    def __init__(self) -> None:
        self.steps = 0
        """Plans that were the same."""
        self.step_id = 0
        """Of the newest one."""
        self.begin_ns = self.end_ns = 0
        """Of what was replayed."""
        self.gaps = 0
        """Snapshots at which it began anew, since something before them is missing."""
        self.in_flight: PlanNote | None = None
        """What was being computed at the end."""
        self.divergence: Divergence | None = None
        self._scheduler: Scheduler | None = None
        self._told = Told()
        self._notes = Notes()
        self._plan = StepPlan(step_id=0, slices=())

    def run(self, entries: Iterable[Entry]) -> Divergence | None:
        """Replay up to the end or the first divergence; what stands before the first snapshot is passed over."""
        for entry in entries:
            if isinstance(entry, Snapshot):
                self._begin(entry)
            elif self._scheduler is not None:
                self.begin_ns, self.end_ns = self.begin_ns or entry.now_ns, entry.now_ns
                self._go_on(self._scheduler, entry)
            if self.divergence is not None:
                break
        return self.divergence

    def names(self) -> dict[int, str]:
        """The requests that are here, by the number of their sequence."""
        if self._scheduler is None:
            return {}
        everybody = [*self._scheduler.running, *self._scheduler.waiting]
        return {sequence.number: sequence.request.request_id for sequence in everybody}

    def _begin(self, snapshot: Snapshot) -> None:
        if self._scheduler is not None and snapshot.continues:
            known = capture(self._scheduler)
            if msgspec.msgpack.encode(known) != msgspec.msgpack.encode(snapshot):
                self.divergence = Divergence(snapshot, known)
                return
        elif self._scheduler is not None:
            self.gaps += 1
        self._notes, self.in_flight = Notes(), None
        self._scheduler = restore(snapshot, self._told)

    def _go_on(self, scheduler: Scheduler, entry: Applied | Planned | Committed | Stopped) -> None:
        match entry:
            case Applied(message, now_ns):
                scheduler.apply(message, now_ns)
            case Planned(recorded, now_ns):
                self.step_id, self.in_flight = recorded.step_id, recorded
                self._told.look(recorded)
                self._plan = scheduler.plan(now_ns)
                replayed = self._notes.note(self._plan)
                if replayed != recorded:
                    self.divergence = Divergence(recorded, replayed)
                else:
                    self.steps += 1
            case Committed(result, now_ns, wasted):
                self._told.wasted, self.in_flight = wasted, None
                scheduler.commit(self._plan, result, now_ns)
            case Stopped(now_ns):
                scheduler.stop(now_ns)


def replay(entries: Iterable[Entry]) -> Divergence | None:
    """Run a journal from its first snapshot on.  None: every plan came out the same."""
    return Replay().run(entries)
