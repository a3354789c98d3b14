"""
Ranks as threads of one process: a collective to read, and whole models over it, lines and all.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineOptions
from engine.device.kernels import Kernels
from engine.device.ranks.book import Interconnect
from engine.device.ranks.collective import RankLost, Stamps
from engine.device.ranks.model import follow
from engine.device.ranks.seat import Line, Seat
from engine.device.runner import Runner, load_model

TIMEOUT_S = 60.0


class Meeting:
    """Where the threads of one group meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Tensor] = [torch.zeros(0)] * size
        self.entered_ns = [0] * size
        self.mail: dict[tuple[int, int], list[Tensor]] = {}
        self.posted = threading.Condition()


class ThreadCollective:
    """Implements `engine.device.ranks.collective.Collective` in the plainest way there is."""

    kind = "threads"
    clock_error_ns = 0

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.size = len(meeting.values)
        self._meeting = meeting

    def sum(self, values: Tensor) -> Stamps:
        """In the order of the ranks."""
        entered_ns, everything = self._exchange(values.clone())
        total = everything[0].clone()
        for one in everything[1:]:
            total += one
        values.copy_(total)
        return Stamps(entered_ns, time.monotonic_ns())

    def gather(self, values: Tensor, counts: Sequence[int]) -> tuple[list[Tensor], Stamps]:
        """To rank 0."""
        assert values.numel() == counts[self.rank]
        entered_ns, everything = self._exchange(values.clone())
        assert [one.numel() for one in everything] == list(counts)
        return ([] if self.rank else everything), Stamps(entered_ns, time.monotonic_ns())

    def send(self, values: Tensor, receiver: int) -> Stamps:
        """Into a box without a bottom."""
        entered_ns = time.monotonic_ns()
        with self._meeting.posted:
            self._meeting.mail.setdefault((self.rank, receiver), []).append(values.clone())
            self._meeting.posted.notify_all()
        return self._stamps({self.rank: entered_ns, receiver: entered_ns})

    def receive(self, values: Tensor, sender: int) -> Stamps:
        """In the order in which it was sent."""
        entered_ns = time.monotonic_ns()
        with self._meeting.posted:
            box = self._meeting.mail.setdefault((sender, self.rank), [])
            if not self._meeting.posted.wait_for(lambda: bool(box), TIMEOUT_S):
                raise RankLost(sender, "sends nothing")
            values.copy_(box.pop(0))
        return self._stamps({self.rank: entered_ns, sender: entered_ns})

    def close(self) -> None:
        """Nobody is to wait for this one."""
        self._meeting.barrier.abort()

    def _stamps(self, entered: dict[int, int]) -> Stamps:
        return Stamps([entered.get(rank, 0) for rank in range(self.size)], time.monotonic_ns())

    def _exchange(self, values: Tensor) -> tuple[list[int], list[Tensor]]:
        meeting = self._meeting
        meeting.values[self.rank], meeting.entered_ns[self.rank] = values, time.monotonic_ns()
        try:
            meeting.barrier.wait(TIMEOUT_S)
            found = list(meeting.entered_ns), list(meeting.values)
            meeting.barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError as error:
            raise RankLost(-1, "is gone") from error
        return found


def options_of(model: Path, *, tensor: int = 1, pipeline: int = 1, **more: object) -> EngineOptions:
    """Of an engine of so many ranks."""
    given: dict[str, object] = {
        "dtype": "float32",
        "quantization": "none",
        "threads": 1,
        "kv_memory_bytes": 4 << 20,
        "tokens_step_max": 64,
    }
    return EngineOptions(
        model=str(model),
        model_name="tiny",
        listen="unix:/nowhere",
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        **(given | more),  # type: ignore[arg-type]
    )


@contextlib.contextmanager
def split(options: EngineOptions, kernels: Kernels | None = None) -> Iterator[Runner]:
    """The runner of rank 0; the other ranks follow it on threads of their own."""
    size = options.tensor_parallel * options.pipeline_parallel
    meeting = Meeting(size)
    stages = [Meeting(options.tensor_parallel) for _ in range(options.pipeline_parallel)]
    pairs = [socket.socketpair() for _ in range(size - 1)]
    failures: list[BaseException] = []

    def interconnect(rank: int) -> Interconnect:
        return Interconnect(ThreadCollective(meeting, rank), stages=options.pipeline_parallel)

    def stage(rank: int) -> Interconnect | None:
        number, place = divmod(rank, options.tensor_parallel)
        both = min(options.tensor_parallel, options.pipeline_parallel) > 1
        return Interconnect(ThreadCollective(stages[number], place)) if both else None

    def serve(rank: int) -> None:
        line = Line(pairs[rank - 1][1], rank=0)
        seat = Seat(interconnect(rank), [line], timeout_s=TIMEOUT_S, stage=stage(rank))
        try:
            loaded = load_model(options, kernels, seat=seat)
            follow(loaded.model, seat, loaded.parts)
        except RankLost:
            pass
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            seat.close()

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    lines = [Line(ours, rank=rank) for rank, (ours, _) in enumerate(pairs, 1)]
    seat = Seat(interconnect(0), lines, timeout_s=TIMEOUT_S, stage=stage(0))
    try:
        yield Runner.load(options, kernels, seat=seat if size > 1 else None)
    finally:
        seat.close()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not failures, failures
