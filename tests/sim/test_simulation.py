"""
Random worlds around the pure core.  Each failure names the command line that plays its world again.
"""

import pytest

from engine.journal import Planned, replay
from tests.sim.model import FailingPool, Simulation, explain

WORLDS = 1500
WORLDS_WITH_DRAFTS = 400
WORLDS_WITH_A_DRAFT_MODEL = 150
WORLDS_WITH_SHARES = 200


@pytest.mark.parametrize("first", range(0, WORLDS, 100))
def test_every_request_ends_and_every_book_closes(first: int) -> None:
    for seed in range(first, first + 100):
        explain(seed, Simulation(seed).run)


@pytest.mark.parametrize("first", range(0, WORLDS_WITH_DRAFTS, 100))
@pytest.mark.parametrize("pressure", [False, True])
def test_drafts_change_no_token_and_no_book(first: int, pressure: bool) -> None:
    """The expected tokens are those of the model alone, which knows nothing of drafts."""
    accepted = rejected = emitted = decode = 0
    for seed in range(first, first + 100):
        world = Simulation(seed, drafts=True, pressure=pressure)
        explain(seed, world.run, drafts=True, pressure=pressure)
        accepted += world.totals["accepted"]
        rejected += world.totals["drafted"] - world.totals["accepted"]
        emitted, decode = emitted + world.totals["emitted"], decode + world.totals["decode"]
    assert accepted > 200 and rejected > 200
    assert decode < emitted


@pytest.mark.parametrize("pressure", [False, True])
def test_a_draft_model_changes_no_token_and_no_book(pressure: bool) -> None:
    """It runs out of KV, out of numbers, and fails for good; its journals replay."""
    accepted = rejected = preemptions = 0
    for seed in range(WORLDS_WITH_A_DRAFT_MODEL):
        world = Simulation(seed, model=True, pressure=pressure)
        explain(seed, world.run, model=True, pressure=pressure)
        accepted += world.totals["accepted"]
        rejected += world.totals["drafted"] - world.totals["accepted"]
        preemptions += sum(client.record.preemptions for client in world.clients if client.record)
        if seed % 4 == 0:
            assert replay(world.journal) is None
    assert accepted > 100 and rejected > 100 and preemptions > 10


@pytest.mark.parametrize("pressure", [False, True])
def test_shares_keep_nobody_waiting_for_ever(pressure: bool) -> None:
    """Every request ends, also those that are bypassed or preempted; the journals replay."""
    overtaken = 0
    for seed in range(WORLDS_WITH_SHARES):
        world = Simulation(seed, shares=True, pressure=pressure)
        explain(seed, world.run, shares=True, pressure=pressure)
        begun = [piece.sequence for one in world.journal if isinstance(one, Planned) for piece in one.plan.slices]
        overtaken += begun != sorted(begun)
        if seed % 4 == 0:
            assert replay(world.journal) is None
    assert overtaken > 50


@pytest.mark.parametrize("seed", range(20))
def test_failure_of_the_nth_allocation_with_drafts(seed: int) -> None:
    fails_at = 1
    while True:
        world = Simulation(seed, fails_at=fails_at, requests=6, drafts=True)
        explain(seed, world.run, fails_at=fails_at, drafts=True)
        pool = world.scheduler.pool
        assert isinstance(pool, FailingPool)
        if pool.takes < fails_at:
            break
        fails_at += 1


@pytest.mark.parametrize("seed", range(40))
def test_failure_of_the_nth_allocation_for_every_n(seed: int) -> None:
    """N = 1, 2, 3 ... until a run has fewer than N allocations and so passes clean."""
    fails_at = 1
    while True:
        world = Simulation(seed, fails_at=fails_at, requests=8)
        explain(seed, world.run, fails_at=fails_at)
        pool = world.scheduler.pool
        assert isinstance(pool, FailingPool)
        if pool.takes < fails_at:
            break
        fails_at += 1
    assert fails_at > 1 or pool.takes == 0


def test_the_worlds_are_not_too_easy() -> None:
    """The simulation is worth its name only if it reaches the corners."""
    outcomes: set[str] = set()
    states: set[str] = set()
    preemptions = evictions = cached = 0
    for seed in range(400):
        world = Simulation(seed).run()
        evictions += world.scheduler.pool.evictions
        cached += world.totals["cached"]
        for client in world.clients:
            assert client.record is not None
            outcomes.add(client.record.outcome)
            states |= client.record.states.keys()
            preemptions += client.record.preemptions
    assert outcomes == {"stop", "length", "abort", "deadline", "overloaded", "refused", "failed"}
    assert states == {
        "queue_batch_full",
        "queue_kv_full",
        "queue_token_budget",
        "queue_fairness",
        "prefill",
        "decode",
        "preempted",
        "recompute",
    }
    assert preemptions > 50
    assert evictions > 500
    assert cached > 500


def test_preemption_always_comes_to_an_end() -> None:
    """Pools in which everybody fits alone and hardly two together; some wait for blocks that they were promised."""
    preemptions = waited = 0
    for seed in range(300):
        world = Simulation(seed, pressure=True)
        explain(seed, world.run, pressure=True)
        records = [client.record for client in world.clients if client.record]
        preemptions += sum(record.preemptions for record in records)
        waited += sum("stalled" in record.states for record in records)
    assert preemptions > 1000
    assert waited >= 1


@pytest.mark.parametrize("seed", range(50))
def test_a_journal_replays_to_the_same_plans(seed: int) -> None:
    world = Simulation(seed).run()
    assert replay(world.journal) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_journal_with_drafts_replays_to_the_same_plans(seed: int) -> None:
    world = Simulation(seed, drafts=True).run()
    assert replay(world.journal) is None


def test_a_journal_names_the_first_step_that_differs() -> None:
    world = Simulation(3).run()
    index = max(index for index, entry in enumerate(world.journal) if isinstance(entry, Planned) and entry.plan.slices)
    entry = world.journal[index]
    assert isinstance(entry, Planned)
    changed = type(entry.plan)(step_id=entry.plan.step_id, slices=entry.plan.slices[1:])
    journal = [*world.journal[:index], Planned(changed, entry.now_ns), *world.journal[index + 1 :]]
    divergence = replay(journal)
    assert divergence is not None
    assert divergence.recorded == changed
    assert divergence.replayed == entry.plan
