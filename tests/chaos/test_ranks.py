"""
One model over three ranks: each is killed, or stops, while it computes, idles and loads; all tokens come, once.

There is one replica, so all streams wait until its group has loaded again.  Each test has an appliance of its own: the
pause before a restart doubles with each death.
"""

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.chaos.conftest import Fleet, Stream, started
from tests.chaos.test_engines import STREAMS, check, undisturbed
from tests.processes import ignores, is_there, ranks_of

RANKS = 3
TIMEOUT_S = 2.0
NOTICED_S = 2 * TIMEOUT_S + 4.0  # without a pulse, and what a machine that loads models elsewhere makes of that
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    """What one appliance leaves to the next: the packed weights."""
    with tempfile.TemporaryDirectory(prefix="pellucid-chaos-") as folder:
        yield Path(folder)


@pytest.fixture
def fleet(default_model: Path, data: Path) -> Iterator[Fleet]:
    """One gateway, and one replica of three ranks."""
    options = ["--tensor-parallel", str(RANKS), "--rank-timeout-s", str(TIMEOUT_S), "--resume-deadline-s", "60"]
    with started(default_model, data, 1, "--kv-memory", "64MiB", *options) as running:
        yield running


def hit(fleet: Fleet, ranks: Sequence[int], number: signal.Signals) -> list[int]:
    """Send a signal to some ranks of the group that runs; the process ids of all."""
    pids = fleet.ranks(0)
    assert len(pids) == RANKS
    for rank in ranks:
        os.kill(pids[rank], number)
    return pids


def gone(fleet: Fleet, pids: list[int], what: str) -> None:
    """The whole group ends, also those that are stopped; until it is back the appliance says so."""
    begun_s = time.monotonic()
    fleet.until(lambda: not any(map(is_there, pids)), "all ranks are gone", NOTICED_S)
    noticed_s = time.monotonic() - begun_s
    fleet.until(lambda: fleet.get("/health")["status"] == "degraded", "/health says so", 1)
    fleet.until_whole()
    assert not set(fleet.ranks(0)) & set(pids)
    print(f"{what}: all gone after {noticed_s:.2f} s, whole again after {time.monotonic() - begun_s:.1f} s")


def named(fleet: Fleet, rank: int) -> None:
    """The log says who it was; of rank 0 that was killed the supervisor says it, who knows it as the engine."""
    log = "".join(fleet.appliance.log)
    assert f"rank {rank} " in log, log


def begun(fleet: Fleet, first: int, tokens: int = 80) -> tuple[list[Stream], list[str]]:
    """Streams that have said something, and all that they should say."""
    bodies = [fleet.body(first + number, max_tokens=tokens) for number in range(STREAMS)]
    texts = undisturbed(fleet, bodies)
    streams = [fleet.stream(body) for body in bodies]
    for stream in streams:
        stream.has_begun()
    return streams, texts


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_is_lost(fleet: Fleet, rank: int, number: signal.Signals) -> None:
    """First in the middle of streams, then when nobody asks anything; who asks just then gets all of the answer too."""
    turn = len(SIGNALS) * rank + SIGNALS.index(number)
    streams, texts = begun(fleet, 200 + 10 * turn)
    what = f"{number.name} of rank {rank} of {RANKS}"
    gone(fleet, hit(fleet, [rank], number), f"{what}, decode")
    check(fleet, streams, texts, f"{what}, decode")
    assert all(fleet.ledger(stream.request_id)["resumes"] == 1 for stream in streams)

    body = fleet.body(280 + turn)  # another one each time: it is suspected of the death, and that is remembered
    [text] = undisturbed(fleet, [body])
    pids = hit(fleet, [rank], number)
    stream = fleet.stream(body)
    gone(fleet, pids, f"{what}, idle")
    check(fleet, [stream], [text], f"{what}, idle, and a request that comes then")
    if rank or number == signal.SIGSTOP:
        named(fleet, rank)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 2)])
def test_two_ranks_are_lost_at_once(fleet: Fleet, ranks: tuple[int, int]) -> None:
    for turn, number in enumerate(SIGNALS):
        streams, texts = begun(fleet, 300 + 20 * ranks[0] + 10 * turn)
        what = f"{number.name} of ranks {ranks[0]} and {ranks[1]} of {RANKS}, decode"
        gone(fleet, hit(fleet, ranks, number), what)
        check(fleet, streams, texts, what)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_rank_is_lost_while_its_group_loads(fleet: Fleet, number: signal.Signals) -> None:
    """Of a group that is to go on with streams: they wait for the next one."""
    streams, texts = begun(fleet, 350 + 10 * SIGNALS.index(number))
    before = hit(fleet, [1], signal.SIGKILL)

    def loads() -> bool:
        leaders = fleet.processes("engine").keys() - before
        return any(len(ranks_of(leader)) == RANKS for leader in leaders)

    fleet.until(loads, "the group is started again")
    pids = fleet.ranks(0)
    # From then on it gives signs of life; before, it only has START_S_MAX to give the first.
    fleet.until(lambda: ignores(pids[1], signal.SIGTERM), "rank 1 has begun to load")
    os.kill(pids[1], number)
    begun_s = time.monotonic()
    fleet.until(lambda: not any(map(is_there, pids)), "those are gone too", NOTICED_S)
    print(f"{number.name} of rank 1 of {RANKS}, while it loads: gone after {time.monotonic() - begun_s:.2f} s")
    check(fleet, streams, texts, f"{number.name} of rank 1 of {RANKS}, while it loads to resume")
    named(fleet, 1)


def test_a_pause_is_a_pause(fleet: Fleet) -> None:
    """A rank that goes on in time: nothing is started again, and where there was a wait, the book says for whom."""
    pids = fleet.ranks(0)
    pause_s = TIMEOUT_S / 2
    for rank in range(RANKS):
        streams, texts = begun(fleet, 400 + 10 * rank, tokens=90)
        os.kill(pids[rank], signal.SIGSTOP)
        try:
            time.sleep(pause_s)  # the fault itself
        finally:
            os.kill(pids[rank], signal.SIGCONT)
        check(fleet, streams, texts, f"SIGSTOP of rank {rank} of {RANKS} for {pause_s:g} s")
        assert not any(fleet.ledger(stream.request_id)["resumes"] for stream in streams)
        steps = fleet.get("/debug/steps")["steps"]
        longest = max(steps, key=lambda step: step["step_ns"] - step["parts"]["idle"])
        assert longest["step_ns"] > 0.9e9 * pause_s
        if rank:  # For rank 0 others wait: in its own book that is no wait.
            book = longest["interconnect"]
            assert longest["parts"]["interconnect_wait"] > 0.9e9 * pause_s
            assert book["straggler"] == rank
    assert fleet.ranks(0) == pids
