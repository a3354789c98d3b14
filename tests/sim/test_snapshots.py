"""
Random worlds whose state is written down now and then: from any snapshot on everything comes as it came, and a
scheduler that has been changed is found out.
"""

from collections.abc import Callable

import msgspec
import pytest

from engine import admission, scheduler
from engine.api import GenerateRequest, Sampling
from engine.blocks import BlockPool
from engine.config import SchedulerConfig
from engine.fairness import Account, Book, FairQueue
from engine.interference import Interference
from engine.journal import Applied, Committed, Entry, Planned, Replay, Told, replay
from engine.outcome import Outcome
from engine.plan import StepPlan
from engine.prefix_news import PrefixLedger
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.snapshot import (
    BookState,
    InterferenceState,
    LedgerState,
    PoolState,
    SequenceState,
    Snapshot,
    capture,
    restore,
)
from telemetry.ledger import Ledger
from tests.sim.model import Simulation, explain

WORLDS = 40
KINDS = [
    {},
    {"pressure": True},
    {"drafts": True},
    {"drafts": True, "pressure": True},
    {"model": True, "pressure": True},
    {"shares": True},
    {"shares": True, "pressure": True},
]


def copied(entries: list[Entry]) -> list[Entry]:
    """As they come from a file: a replay uses its snapshots up."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(entries), type=list[Entry])


def outcomes_from(entries: list[Entry]) -> list[Outcome]:
    """What the steps behind the snapshot that `entries` begin with come to."""
    told, plan, outcomes = Told(), StepPlan(step_id=0, slices=()), list[Outcome]()
    assert isinstance(entries[0], Snapshot)
    restored = restore(entries[0], told)
    restored.check()
    for entry in entries[1:]:
        match entry:
            case Applied(message, now_ns):
                restored.apply(message, now_ns)
            case Planned(recorded, now_ns):
                told.look(recorded)
                plan = restored.plan(now_ns)
            case Committed(result, now_ns, wasted):
                told.wasted = wasted
                outcomes.append(restored.commit(plan, result, now_ns))
                restored.check()
    return outcomes


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "plain")
def test_from_any_snapshot_on_everything_comes_as_it_came(kind: dict[str, bool]) -> None:
    """Every plan, all that is known at each later snapshot, and every outcome, records and deltas included."""
    begun_busy = 0
    for seed in range(WORLDS):
        world = Simulation(seed, snapshots=0.1, **kind)
        explain(seed, world.run, **kind)
        journal = copied(world.journal)
        places = [place for place, entry in enumerate(journal) if isinstance(entry, Snapshot)]
        start = places[seed % len(places)]
        first = journal[start]
        assert isinstance(first, Snapshot)
        begun_busy += bool(first.running and first.waiting)
        run = Replay()
        assert run.run(copied(journal[start:])) is None
        plans = sum(isinstance(entry, Planned) for entry in journal[start:])
        assert run.steps == plans and run.gaps == 0
        if plans:
            assert outcomes_from(copied(journal[start:])) == world.outcomes[-plans:]
    assert begun_busy > 0


def test_what_a_sequence_or_a_pool_may_know_more_tomorrow_must_be_in_a_state() -> None:
    """Fails for an attribute that a snapshot would lose."""
    request = GenerateRequest(request_id="r", prompt=(1,), sampling=Sampling(), tokens_max=1)
    pool = BlockPool(blocks_max=1, block_slots=1)
    of = _attributes
    assert of(Sequence(request, number=0, now_ns=0)) - of_state(SequenceState) == {
        "tokens",  # `emitted`
        "names",
        "prompt_length",
        "status",
    }
    assert of(Ledger("decode", 0)) == of_state(LedgerState)
    assert of(Interference()) == of_state(InterferenceState)
    assert of(pool) - of_state(PoolState) == {"blocks_max", "block_slots", "prefixes", "named"}
    assert of(PrefixLedger()) == {"indexed", "news"} <= of_state(PoolState)
    assert of(FairQueue()) == {"books", "debtors_max", "line"}
    assert of(Book()) < of_state(BookState)
    assert of(Account()) == {"units", "waiting", "here"}
    assert of(Scheduler(SchedulerConfig(blocks_max=1))) - of_state(Snapshot) == {
        "pool",
        "waiting",
        "running",
        "by_id",
        "in_flight",
        "speculation",
        "draft_model",
        "decode_keys",  # of the step in flight, as the next one
        "planned_ns",
    } - {"pool", "running", "waiting"}


def of_state(kind: type[msgspec.Struct]) -> set[str]:
    return set(kind.__struct_fields__)


def _attributes(thing: object) -> set[str]:
    return {name.lstrip("_") for name in getattr(thing, "__slots__", None) or vars(thing)}


def test_a_snapshot_in_the_midst_of_a_step_is_a_bug() -> None:
    one = Scheduler(SchedulerConfig(blocks_max=4))
    one.apply(GenerateRequest(request_id="r", prompt=(1,), sampling=Sampling(), tokens_max=1), 1)
    one.plan(2)
    with pytest.raises(AssertionError, match="between two steps"):
        capture(one)


def younger_victims(self: Scheduler, sequence: Sequence) -> Sequence | None:
    """A change of the policy: the first one may be preempted, too."""
    del sequence
    return next((one for one in self.running if one.preemptions < self.config.preemptions_max), None)


def greedy_blocks(tokens: int, config: SchedulerConfig) -> int:
    """Another one: a block more than is needed."""
    return -(-tokens // config.block_slots) + 1


CHANGES: list[tuple[object, str, Callable[..., object]]] = [
    (Scheduler, "_victim", younger_victims),
    (admission, "blocks_for", greedy_blocks),
    (Sequence, "paying", property(lambda self: "decode")),  # type: ignore[list-item]
    (scheduler, "insort", lambda many, one, key: many.insert(0, one)),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[1])
def test_a_changed_scheduler_is_found_out(
    change: tuple[object, str, Callable[..., object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its plans, or by what it knows at the next snapshot; never by nothing."""
    journals = [copied(Simulation(seed, pressure=True, drafts=True, snapshots=0.2).run().journal) for seed in range(30)]
    assert [replay(copied(journal)) for journal in journals] == [None] * len(journals)
    monkeypatch.setattr(*change)
    found = []
    for journal in journals:
        try:
            found.append(replay(journal))
        except (AssertionError, KeyError):  # Where it goes another way, later entries may make no sense at all.
            found.append(None)
    assert any(found)
