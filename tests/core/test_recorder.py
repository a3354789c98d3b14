"""
The journal in its ring: it replays from either segment, whatever did not fit, and disturbs nobody.
"""

from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from engine.api import Abort, GenerateRequest, Message, TokenLogprobs
from engine.config import SchedulerConfig
from engine.device.fake import FakeRunner
from engine.journal import Applied, Committed, Planned, Replay, Stopped, committed
from engine.loop import Loop
from engine.plan import SliceResult, StepResult
from engine.recorder import Journal, entries_of, open_journal
from engine.scheduler import Scheduler
from engine.snapshot import Snapshot
from telemetry.clock import now_ns
from telemetry.flight import recordings
from telemetry.records import InterconnectBook
from telemetry.ring import RING_BYTES_MIN, SEGMENT_NS, RingError, read_ring
from tests.core.test_loop import Clock, Script, fake, request
from tests.sim.model import Simulation


class Recorded:
    """A scheduler with a journal, and a device that answers at once."""

    def __init__(self, folder: Path, *, ring_bytes: int = RING_BYTES_MIN, prompt: int = 5) -> None:
        config = SchedulerConfig(blocks_max=4096, block_slots=16, context_max=50_000, sequences_max=8)
        self.scheduler = Scheduler(config)
        self.device = FakeRunner(vocab_size=50_000, context_max=50_000, blocks_max=4096, block_slots=16)
        journal = open_journal(str(folder), "engine-0", self.scheduler, ring_bytes=ring_bytes, epoch="e1")
        assert journal is not None
        self.journal = journal
        self.now_ns = self.began_ns = now_ns()
        self.names = 0
        self._prompt = prompt
        self.folder = folder

    def ask(self, tokens_max: int = 4) -> None:
        """One more request."""
        self.names += 1
        self.apply(request(f"r{self.names}", self._prompt, tokens_max))

    def apply(self, message: Message) -> None:
        self.scheduler.apply(message, self.now_ns)
        self.journal.applied(message, self.now_ns)

    def step(self, step_ns: int = 1_000_000) -> None:
        plan = self.scheduler.plan(self.now_ns)
        self.journal.planned(plan, self.now_ns)
        self.now_ns += step_ns
        result = self.device.run(plan)
        self.journal.committed(result, self.scheduler.commit(plan, result, self.now_ns), self.now_ns)

    def replay(self) -> Replay:
        run = Replay()
        assert run.run(entries_of(read_ring(self.path))) is None
        return run

    @property
    def path(self) -> Path:
        return recordings(self.folder)[-1].path


def test_from_either_segment_it_replays_to_the_same_plans(tmp_path: Path) -> None:
    """Segments change with age, in the midst of requests, also behind a long silence."""
    recorded = Recorded(tmp_path)
    for number in range(60):
        if number % 3 == 0:
            recorded.ask(tokens_max=20)
        if number % 7 == 6:
            recorded.apply(Abort(f"r{recorded.names}"))
        recorded.step(SEGMENT_NS // 7 if number != 40 else 50 * SEGMENT_NS)
        segments = read_ring(recorded.path)
        run = recorded.replay()
        assert run.gaps == 0 and run.step_id == number + 1
        assert run.steps == sum(isinstance(entry, Planned) for entry in entries_of(segments))
        assert run.end_ns - run.begin_ns >= min(recorded.now_ns - recorded.began_ns, SEGMENT_NS)
    assert segments[-1].header.number > 5
    assert segments[0].header.epoch == "e1"


def test_a_full_segment_makes_room_between_two_steps(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, prompt=1000)
    for _ in range(400):
        recorded.ask(tokens_max=2)
        recorded.step()
    recorded.replay()
    assert read_ring(recorded.path)[-1].header.number > 3
    assert read_ring(recorded.path)[-1].lost == 0


def test_what_does_not_fit_is_a_gap_behind_which_it_goes_on(tmp_path: Path) -> None:
    """A burst that is larger than a segment: the next one begins at once, and says that something is missing."""
    recorded = Recorded(tmp_path, prompt=40_000)
    with capture_logs() as logged:
        for _ in range(12):
            recorded.ask()
        for number in range(1, recorded.names + 1):
            recorded.apply(Abort(f"r{number}"))
        recorded.step()
    for _ in range(3):
        recorded.step()
    assert [entry["event"] for entry in logged] == ["journal_gap"]
    run = recorded.replay()
    assert (run.gaps, run.steps) == (1, 3)
    assert read_ring(recorded.path)[-1].lost > 10


def test_a_snapshot_that_does_not_fit_is_not_tried_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(tmp_path, prompt=40_000)
    for _ in range(8):
        recorded.ask(tokens_max=1000)
    recorded.step()
    tried = []
    monkeypatch.setattr(Journal, "_snapshot", lambda self: tried.append(recorded.now_ns))
    for _ in range(50):
        recorded.step()
    assert tried == []
    monkeypatch.undo()
    for number in range(1, 9):
        recorded.apply(Abort(f"r{number}"))
    recorded.step(SEGMENT_NS)
    recorded.apply(request("small"))
    recorded.step()
    assert recorded.replay().steps == 1


def test_the_loop_tells_it_everything_and_the_end(tmp_path: Path) -> None:
    clock = Clock()
    polls: list[list[Message]] = [[request("a"), request("none", 0)], [request("b")], [], [Abort("b")], []]
    scheduler = Scheduler(SchedulerConfig(blocks_max=32, block_slots=4, context_max=64, vocab_size=100))
    journal = open_journal(str(tmp_path), "engine-0", scheduler, ring_bytes=RING_BYTES_MIN, epoch="")
    assert journal is not None
    loop = Loop(scheduler, fake(), Script(clock, iter(polls)), recorder=journal, clock=clock)
    for _ in range(4):
        loop.step()
    loop.stop()
    loop.run()
    journal.close()
    entries = list(entries_of(read_ring(recordings(tmp_path)[0].path)))
    kinds = [type(entry).__name__ for entry in entries]
    assert kinds[:5] == ["Snapshot", "Applied", "Applied", "Planned", "Committed"]
    assert isinstance(entries[-3], Stopped)
    run = Replay()
    assert run.run(entries) is None
    assert run.in_flight is None and run.names() == {}


def test_a_step_in_flight_is_known(tmp_path: Path) -> None:
    """As a crash of the device leaves it."""
    recorded = Recorded(tmp_path)
    recorded.ask()
    recorded.step()
    recorded.ask()
    plan = recorded.scheduler.plan(recorded.now_ns)
    recorded.journal.planned(plan, recorded.now_ns)
    run = recorded.replay()
    assert run.in_flight is not None and run.in_flight.step_id == 2
    assert [run.names()[piece.sequence] for piece in run.in_flight.slices] == ["r1", "r2"]


def test_a_recorder_in_trouble_is_one_line_in_the_log_and_nobody_suffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(tmp_path)
    recorded.ask()

    def broken(*_: object) -> None:
        raise RuntimeError("our own bug")

    monkeypatch.setattr("engine.recorder.Notes.note", broken)
    with capture_logs() as logged:
        for _ in range(5):
            recorded.step()
    assert [entry["event"] for entry in logged] == ["journal_failed"]
    assert not recordings(tmp_path)[-1].living, "its files are closed"


def test_log_probabilities_are_left_out_and_the_interconnect_is_not() -> None:
    world = Simulation(1).run()
    entry = next(entry for entry in world.journal if isinstance(entry, Committed) and entry.result.slices)
    wire = InterconnectBook(kind="gloo", wait_ns=3)
    slices = (SliceResult((7,), (TokenLogprobs(-0.5),)), SliceResult((), (), "f", "flat"))
    given = StepResult(step_id=1, slices=slices, interconnect=wire)
    kept = committed(given, 5, 0.25)
    assert [(one.emitted, one.logprobs, one.fault, one.degenerate) for one in kept.result.slices] == [
        ((7,), (), "", ""),
        ((), (), "f", "flat"),
    ]
    assert (kept.result.interconnect, kept.now_ns, kept.wasted_share) == (wire, 5, 0.25)
    assert committed(entry.result, 5, 0.0).result is entry.result


def test_segments_that_do_not_follow_are_a_gap(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    for _ in range(3):
        recorded.ask()
        recorded.step(SEGMENT_NS)
    segments = read_ring(recorded.path)
    for broken in (
        [segments[0]._replace(torn=True), segments[1]],
        [segments[0]._replace(header=msgspec.structs.replace(segments[0].header, number=0)), segments[1]],
    ):
        snapshots = [entry for entry in entries_of(broken) if isinstance(entry, Snapshot)]
        assert [snapshot.continues for snapshot in snapshots] == [True, False]


def test_a_journal_of_another_version_is_said(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.ask()
    segment = read_ring(recorded.path)[0]
    for frame in (b"\xc1", msgspec.msgpack.encode({"type": "dreamt"})):
        with pytest.raises(RingError, match="of another version"):
            list(entries_of([segment._replace(frames=[frame])]))
    of_records = msgspec.structs.replace(segment.header, kind="records")
    with pytest.raises(RingError, match="a recording of records, and no journal"):
        list(entries_of([segment._replace(header=of_records)]))


def test_a_request_with_everything_comes_back(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    changes = {"traceparent": "00-a-b-01", "tenant": "é\U0001f600", "stop_ids": (1,), "deadline_s": 5.0, "weight": 3}
    message: GenerateRequest = msgspec.structs.replace(request("full", 30, 5), **changes)
    recorded.apply(message)
    recorded.step()
    entries = list(entries_of(read_ring(recorded.path)))
    assert [entry.message for entry in entries if isinstance(entry, Applied)] == [message]
