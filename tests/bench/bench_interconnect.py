"""
A sum over ranks: through shared memory, over gloo as our ranks use it, and gloo's own all_reduce; in turns, in one run.

    python -m tests.bench.bench_interconnect [--ranks 2 3] [--values 18432] [--calls 200] [--rounds 9]

Each rank is a process of one thread.  18,432 float32 are 32 rows of 576: what ranks of the default model sum twice in
each layer when 32 sequences decode.  All ranks meet before each call, so that none waits for another's last one.  What
is printed is the median over rounds of the median call of rank 0, and its range.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from bench.host import commit, host
from engine.device.ranks.gloo import open_store
from engine.device.ranks.shared_memory import SharedMemory
from tests.torch.ranks.implementations import START_S, open_gloo, open_shared_memory
from tests.torch.ranks.processes import Seat, rank_processes


def measure(seat: Seat, count: int, calls: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of the median call, of each round, by way."""
    memory, ours = open_shared_memory(seat, "memory", START_S), open_gloo(seat, "ours", START_S)
    gloo, values = _gloo_itself(seat), torch.full((count,), 1e-3)
    ways: dict[str, Callable[[], object]] = {
        "shared memory": lambda: memory.sum(values),
        "gloo": lambda: ours.sum(values),
        "gloo's all_reduce": lambda: gloo.allreduce([values]).wait(),  # type: ignore[attr-defined]  # the stubs lack it
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    try:
        for _ in range(rounds):
            for way, call in ways.items():
                found[way].append(statistics.median(_timed(memory, values, call) for _ in range(calls)))
    finally:
        memory.close()
        ours.close()
    return found


def _timed(meeting: SharedMemory, values: torch.Tensor, call: Callable[[], object]) -> float:
    values.fill_(1e-3)
    meeting.sum(torch.zeros(1))
    began_s = time.perf_counter()
    call()
    return (time.perf_counter() - began_s) * 1e6


def _gloo_itself(seat: Seat) -> ProcessGroupGloo:
    if seat.rank == 0:
        store = open_store("127.0.0.1", 0, leads=True, start_s=START_S)
        seat.say("itself", store.port)
    else:
        store = open_store("127.0.0.1", int(seat.hear("itself")), leads=False, start_s=START_S)
    return ProcessGroupGloo(PrefixStore("itself", store), seat.rank, seat.size, timedelta(seconds=START_S))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--values", type=int, default=576 * 32)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    print(f"{host()}, commit {commit()}, {given.values} float32, {given.rounds} rounds of {given.calls} calls")
    with rank_processes(max(given.ranks)) as processes:
        for ranks in given.ranks:
            found = processes.results(ranks, measure, given.values, given.calls, given.rounds)[0]
            best = statistics.median(found["shared memory"])
            for way, times in found.items():
                median = statistics.median(times)
                print(
                    f"{ranks} ranks  {way:18} {median:9.1f} us  ({min(times):.1f} to {max(times):.1f})"
                    f"  {median / best:6.1f} x shared memory"
                )


if __name__ == "__main__":
    main()
