"""`pellucid flight`: what is there, what it says, and whether a journal comes to the same plans."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.journal import Divergence, Planned, PlanNote, SliceNote
from engine.recorder import entries_of, open_journal
from engine.scheduler import Scheduler
from engine.snapshot import Snapshot, capture
from flight.difference import difference
from telemetry.flight import JOURNAL, open_records, open_ring, recordings
from telemetry.records import RequestRecord, StepRecord
from telemetry.ring import RING_BYTES_MIN, read_ring
from tests.launch.test_cli import pellucid
from tests.sim.model import Simulation
from tests.tidy.imports import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data/flight"


Flight = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def flight(tmp_path: Path) -> Flight:
    """Runs `pellucid flight ...` on the data directory."""
    return lambda *words: pellucid(tmp_path, "flight", *words, "--data-dir", str(tmp_path / "data"))


def write_journal(folder: Path, **changes: object) -> Path:
    """That of a simulated world, as an engine would have left it; the last plan may be changed."""
    world = Simulation(3, drafts=True, pressure=True, snapshots=0.02).run()
    ring = open_ring(str(folder), "engine-0", kind=JOURNAL, ring_bytes=1 << 20, epoch="e1")
    assert ring is not None
    entries = list(world.journal)
    if changes:
        places = [place for place, one in enumerate(entries) if isinstance(one, Planned) and one.plan.slices]
        last = entries[places[-1]]
        assert isinstance(last, Planned)
        pieces = (msgspec.structs.replace(last.plan.slices[0], **changes), *last.plan.slices[1:])
        plan = msgspec.structs.replace(last.plan, slices=pieces)
        entries[places[-1]] = msgspec.structs.replace(last, plan=plan)
    for entry in entries:
        assert ring.put(msgspec.msgpack.encode(entry))
    ring.close()
    return recordings(folder)[-1].path


def write_records(folder: Path) -> None:
    records = open_records(str(folder), "gateway-0", ring_bytes=RING_BYTES_MIN)
    assert records is not None
    records.step(StepRecord(step_id=7, ended_ns=2_000_000_000, step_ns=5, parts={"plan": 5}))
    records.request(RequestRecord(request_id="r1", accepted_ns=1, finished_ns=3_000_000_000, states={"decode": 1}))
    records.close()


def test_a_dump_has_a_head_and_the_records_by_the_names_of_the_debug_routes(folder: Path, flight: Flight) -> None:
    write_records(folder)
    write_journal(folder)
    done = flight("dump")
    assert done.returncode == 0, done.stderr
    head, step, request = map(json.loads, done.stdout.splitlines())
    assert head["process"] == "gateway-0" and head["kind"] == "records"
    assert (head["steps"], head["requests"], head["lost"], head["torn"], head["being_written"]) == (
        1,
        1,
        0,
        False,
        False,
    )
    assert head["seconds"] == 1.0 and head["from"] == step["at"] and head["to"] == request["at"]
    assert (step["record"], step["step_id"], step["parts"]) == ("step", 7, {"plan": 5})
    assert (request["record"], request["request_id"], request["states"]) == ("request", "r1", {"decode": 1})


def test_a_dump_of_a_journal_has_every_entry_and_its_fields_have_names(folder: Path, flight: Flight) -> None:
    path = write_journal(folder)
    write_records(folder)
    done = flight("dump", "--journal")
    assert done.returncode == 0, done.stderr
    head, *entries = map(json.loads, done.stdout.splitlines())
    written = list(entries_of(read_ring(path)))
    assert len(entries) == len(written) == head["entries"]
    assert head["epoch"] == "e1" and head["steps"] == sum(isinstance(one, Planned) for one in written)
    assert entries[0]["entry"] == "snapshot" and entries[0]["config"]["block_slots"] == 1
    piece = next(one for one in entries if one["entry"] == "planned" and one["plan"]["slices"])["plan"]["slices"][0]
    assert set(piece) == {"sequence", "start", "tokens", "kept", "blocks", "drafts", "uniforms"}
    assert [json.loads(line)["entry"] for line in flight("dump", path.name).stdout.splitlines()[1:3]]


def test_a_replay_says_how_many_plans_are_the_same(folder: Path, flight: Flight) -> None:
    path = write_journal(folder)
    steps = sum(isinstance(one, Planned) for one in entries_of(read_ring(path)))
    for words in ((), (str(path),)):
        done = flight("replay", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f": {steps} steps from " in done.stdout and done.stdout.endswith(": all plans are the same.\n")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start": 77}, "from position 77, and in the replay"),
        ({"tokens": (1,) * 40}, "had 40 tokens"),
        ({"blocks": (1, 99)}, "[1, 99], and in the replay"),
        ({"uniforms": (0.5,)}, "the random numbers [0.5], and in the replay"),
        ({"sequence": 99}, "was not served, and is in the replay"),
    ],
)
def test_a_plan_that_differs_is_named_with_the_request(
    folder: Path, flight: Flight, changes: dict[str, object], words: str
) -> None:
    write_journal(folder, **changes)
    done = flight("replay")
    assert done.returncode == 1 and done.stderr == ""
    first, second = done.stdout.splitlines()
    assert " steps from " in first
    assert second.startswith("Step ") and " differs: sequence " in second and "(r" in second, second
    assert words in second


def test_what_is_known_behind_the_same_plans_may_differ(folder: Path, flight: Flight) -> None:
    world = Simulation(5, pressure=True, snapshots=0.3).run()
    ring = open_ring(str(folder), "engine-0", kind=JOURNAL, ring_bytes=1 << 20)
    assert ring is not None
    changed = False
    for entry in world.journal:
        if isinstance(entry, Snapshot) and entry.running and not changed:
            changed = True
            first = msgspec.structs.replace(entry.running[0], bypassed=41)
            entry = msgspec.structs.replace(entry, running=[first, *entry.running[1:]])
        ring.put(msgspec.msgpack.encode(entry))
    assert changed
    ring.close()
    done = flight("replay")
    assert done.returncode == 1
    assert "what is known differs: running[0].bypassed was 41, and in the replay is 0." in done.stdout


def test_a_scheduler_that_fails_is_a_difference_too(folder: Path, flight: Flight) -> None:
    world = Simulation(3).run()
    ring = open_ring(str(folder), "engine-0", kind=JOURNAL, ring_bytes=1 << 20)
    assert ring is not None
    twice = next(entry for entry in world.journal if isinstance(entry, Planned))
    for entry in (world.journal[0], twice, twice):
        ring.put(msgspec.msgpack.encode(entry))
    ring.close()
    done = flight("replay")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the scheduler fails: AssertionError" in done.stdout or "differs" in done.stdout


def test_differences_of_whole_plans_in_words() -> None:
    a, b = SliceNote(1, 0, (5, 6), 0, (2,), 0, (0.5,)), SliceNote(2, 3, (7, 8, 9), 1, (), 2, (0.1, 0.2, 0.3))
    plan = PlanNote(4, (a, b))
    said = [
        difference(Divergence(plan, other), {1: "r1"})
        for other in (
            PlanNote(5, (a, b)),
            PlanNote(4, (b, a)),
            PlanNote(4, (a,)),
            PlanNote(4, (msgspec.structs.replace(a, tokens=(5, 7)), b)),
            PlanNote(4, (a, msgspec.structs.replace(b, kept=0, blocks=(3, 4)))),
        )
    ]
    assert said == [
        "in the replay it is step 5",
        "the order was [1, 2], and in the replay it is [2, 1]",
        "sequence 2 was served, with 3 tokens, 2 of them guessed, from position 3, and is not in the replay",
        "sequence 1 (r1) had token 6 at position 1, and in the replay 7",
        "sequence 2 had blocks as before up to number 1, then no more, and in the replay [3, 4]",
    ]


def test_a_living_one_is_listed_dumped_and_replayed(folder: Path, flight: Flight) -> None:
    world = Simulation(2)
    scheduler = Scheduler(world.config)
    journal = open_journal(str(folder), "engine-0", scheduler, ring_bytes=RING_BYTES_MIN, epoch="")
    assert journal is not None
    assert capture(scheduler).step_id == 0
    name = recordings(folder)[0].path.name
    assert flight("list").stdout == f"{name}  journal, being written, 256 KiB\n"
    assert json.loads(flight("dump", "--journal").stdout.splitlines()[0])["being_written"] is True
    assert ": 0 steps from " in flight("replay").stdout
    journal.close()
    assert ", ended, " in flight("list").stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("dump",), "no recordings in"),
        (("replay",), "unless --flight-memory is 0"),
        (("dump", "engine-0"), "no recordings in"),
        (("dump", "some/where"), "some/where holds no recording"),
        (("replay", "/"), "/ holds no recording"),
    ],
)
def test_nothing_there_is_one_line(flight: Flight, words: tuple[str, ...], says: str) -> None:
    done = flight(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("pellucid: ") and done.stderr.count("\n") == 1 and says in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("dump", "gateway-1"), "no recording 'gateway-1' in"),
        (("dump", "gatway-0"), "did you mean 'gateway-0'?"),
        (("replay",), "holds a readable journal"),
        (("replay", "gateway-0"), "a recording of records, and no journal of an engine"),
    ],
)
def test_the_wrong_one_is_one_line(folder: Path, flight: Flight, words: tuple[str, ...], says: str) -> None:
    write_records(folder)
    done = flight(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and says in done.stderr


def test_no_recordings_is_no_error_for_a_list(flight: Flight) -> None:
    done = flight("list")
    assert done.returncode == 0 and "No recordings in" in done.stdout


def test_it_needs_no_torch(folder: Path) -> None:
    write_journal(folder)
    script = (
        "import sys, pathlib\nfrom flight.replay import replayed\nfrom flight.show import lines\n"
        "where = pathlib.Path(sys.argv[1])\nassert replayed(where, None)[1]; list(lines(where, None, journal=True))\n"
        "print(*[name for name in ('torch', 'litestar', 'redis', 'opentelemetry') if name in sys.modules])"
    )
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "\n"
