"""
Ranks for tests: processes that stay, and run what they are given.

    results = processes.results(3, function, *arguments)      each calls function(seat, *arguments)

`function` is one of a module, so that a process can import it; arguments and results cross as multiprocessing does it.
What does not answer in time, or has died, is killed, and a new process takes its place in the next run.
"""

import itertools
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, TypeVar

SPAWN = get_context("spawn")
ENDS_S = 10.0
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Seat:
    """What one rank of a run knows."""

    rank: int
    size: int
    directory: Path
    """Empty at first, and of this run alone: where its ranks find each other."""

    def say(self, name: str, value: object) -> None:
        """Tell the other ranks something, once."""
        whole = self.directory / f".{name}"
        whole.write_text(str(value))
        whole.rename(self.directory / name)

    def hear(self, name: str, within_s: float = 30.0) -> str:
        """What one of them has said."""
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            try:
                return (self.directory / name).read_text()
            except FileNotFoundError:
                time.sleep(0.002)
        raise TimeoutError(f"nobody said {name}")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What became of one rank: a value, an error, or nothing, because it died or hung."""

    value: T | None = None
    error: str = ""
    lost: bool = False


class RankProcesses:
    """At most `ranks_max` processes; none is started before it is needed."""

    def __init__(self, ranks_max: int = 4) -> None:
        self.ranks_max = ranks_max
        self._ranks: dict[int, tuple[BaseProcess, Connection]] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._runs = itertools.count()

    def results(
        self, size: int, function: Callable[Concatenate[Seat, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """What `function` returned on each rank.  Fails if one raised, died or took more than 60 s."""
        outcomes = self.outcomes(size, 60.0, function, *args, **kwargs)
        broken = {rank: one.error or "lost" for rank, one in enumerate(outcomes) if one.error or one.lost}
        if broken:
            raise AssertionError("\n".join(f"rank {rank}: {error}" for rank, error in broken.items()))
        return [one.value for one in outcomes]  # type: ignore[misc]  # no error: it is a T

    def outcomes(
        self, size: int, within_s: float, function: Callable[Concatenate[Seat, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[Outcome[T]]:
        """What became of `function` on each rank, of those that may die or hang too."""
        assert size <= self.ranks_max
        for rank in range(size):
            self._start(rank)
        directory = self._directory / str(next(self._runs))
        directory.mkdir()
        waiting: dict[Connection, int] = {}
        for rank in range(size):
            connection = self._ranks[rank][1]
            connection.send((function, Seat(rank, size, directory), args, kwargs))
            waiting[connection] = rank
        outcomes: list[Outcome[T]] = [Outcome(lost=True)] * size
        deadline_s = time.monotonic() + within_s
        while waiting and time.monotonic() < deadline_s:
            for ready in wait(list(waiting), timeout=0.1):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    outcomes[rank] = ready.recv()
                except EOFError:
                    self._end(rank)
            # One that was stopped on purpose answers no more.
            if waiting and all(_stopped(self._ranks[rank][0]) for rank in waiting.values()):
                break
        for rank in waiting.values():
            self._end(rank)
        shutil.rmtree(directory, ignore_errors=True)
        return outcomes

    def close(self) -> None:
        """Nothing is left of them."""
        for rank in list(self._ranks):
            self._end(rank)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, rank: int) -> None:
        if rank in self._ranks:
            return
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=_serve, args=(theirs,), daemon=True, name=f"rank-{rank}")
        process.start()
        theirs.close()
        self._ranks[rank] = process, ours

    def _end(self, rank: int) -> None:
        process, connection = self._ranks.pop(rank)
        connection.close()
        process.kill()
        process.join(ENDS_S)


def _stopped(process: BaseProcess) -> bool:
    """Whether it got SIGSTOP, or is dead."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ"
    except OSError:
        return True


def _serve(connection: Connection) -> None:
    """Life of a rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # It tells at length what a lost rank does to sockets.
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, seat, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            outcome: Outcome[object] = Outcome(function(seat, *args, **kwargs))
        except Exception:  # noqa: BLE001  # whatever it is, it fails the test
            outcome = Outcome(error=traceback.format_exc())
        connection.send(outcome)


@contextmanager
def rank_processes(ranks_max: int = 4) -> Iterator[RankProcesses]:
    """They are gone afterwards, whatever happens."""
    processes = RankProcesses(ranks_max)
    try:
        yield processes
    finally:
        processes.close()
