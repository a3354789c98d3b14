"""
What the flight recorder takes: Python time of one engine step in the journal, of one record in the gateway's ring.

    python -m tests.bench.bench_flight [--sequences 1,16,64] [--context 1024] [--steps 2000]

So many sequences with prompts of so many tokens decode on a device that answers at once, so that nothing but the
recorder is timed: `planned` and `committed` of each step, the medians and the 99th percentiles; and a snapshot, as it
is taken once a minute.  Kept: how long a recording of the default size reaches back at 100 such steps a second.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.host import commit, host
from engine.api import GenerateRequest, Sampling
from engine.config import SchedulerConfig
from engine.outcome import Outcome
from engine.plan import SliceResult, StepPlan, StepResult
from engine.recorder import Journal, open_journal
from engine.scheduler import Scheduler
from telemetry.flight import open_records
from telemetry.records import COMPUTE_PARTS, STEP_PARTS, RequestRecord, StepRecord
from telemetry.ring import read_ring

RING_BYTES = 64 << 20
STEPS_PER_S = 100


class Timed:
    """Implements `engine.loop.Recorder`: a journal, and the nanoseconds that it takes in each step."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.spent_ns: list[int] = []

    def planned(self, plan: StepPlan, now_ns: int) -> None:
        """Begins a step."""
        began_ns = time.perf_counter_ns()
        self.journal.planned(plan, now_ns)
        self.spent_ns.append(time.perf_counter_ns() - began_ns)

    def committed(self, result: StepResult, outcome: Outcome, now_ns: int) -> None:
        """Ends it."""
        began_ns = time.perf_counter_ns()
        self.journal.committed(result, outcome, now_ns)
        self.spent_ns[-1] += time.perf_counter_ns() - began_ns


def decode(folder: str, sequences: int, context: int, steps: int) -> tuple[Timed, Scheduler]:
    """`steps` steps in which all decode, behind those of their prompts."""
    config = SchedulerConfig(
        blocks_max=sequences * (context + 2 * steps) // 16 + sequences,
        context_max=context + 2 * steps,
        sequences_max=sequences,
        tokens_step_max=512,
    )
    scheduler = Scheduler(config)
    journal = open_journal(folder, f"bench-{sequences}", scheduler, ring_bytes=RING_BYTES, epoch="bench")
    assert journal is not None
    timed, now_ns = Timed(journal), time.monotonic_ns()
    for number in range(sequences):
        prompt = tuple((number * 7919 + place * 31) % 49_000 for place in range(context))
        request = GenerateRequest(
            request_id=f"cmpl-{number:032x}", prompt=prompt, sampling=Sampling(seed=number), tokens_max=2 * steps
        )
        scheduler.apply(request, now_ns)
        journal.applied(request, now_ns)
    parts = dict.fromkeys(COMPUTE_PARTS, 1_234_567)
    while len(timed.spent_ns) < steps + sequences * context // 512 + 1:
        plan = scheduler.plan(now_ns)
        timed.planned(plan, now_ns)
        answers = tuple(SliceResult((one.start * 17 % 49_000,) if one.sample else ()) for one in plan.slices)
        result = StepResult(
            step_id=plan.step_id, slices=answers, batch_ns=12_345, sample_ns=23_456, compute_parts=parts
        )
        now_ns += 1_000_000_000 // STEPS_PER_S
        timed.committed(result, scheduler.commit(plan, result, now_ns), now_ns)
    return timed, scheduler


def measure(folder: Path, sequences: int, context: int, steps: int) -> None:
    """One line of the table."""
    timed, scheduler = decode(str(folder), sequences, context, steps)
    spent_us = sorted(spent_ns / 1000 for spent_ns in timed.spent_ns[-steps:])
    path = next(folder.glob(f"bench-{sequences}-*"))
    frames = [frame for segment in read_ring(path) for frame in segment.frames]
    began_ns = time.perf_counter_ns()
    timed.journal._snapshot()
    snapshot_ms = (time.perf_counter_ns() - began_ns) / 1e6
    last = sorted(len(frame) for frame in frames[-2 * steps :])
    step_bytes = sum(last) / steps
    kept_s = RING_BYTES / 2 / step_bytes / STEPS_PER_S
    print(
        f"{sequences:9d}  {statistics.median(spent_us):9.1f}  {spent_us[len(spent_us) * 99 // 100]:9.1f}  "
        f"{step_bytes:10.0f}  {snapshot_ms:11.2f}  {kept_s:6.0f} s or more",
        flush=True,
    )
    timed.journal.close()
    assert len(scheduler.running) == sequences


def measure_records(folder: Path, count: int) -> None:
    """Of the gateway."""
    records = open_records(str(folder), "gateway-0", ring_bytes=RING_BYTES)
    assert records is not None
    states = {"queue_batch_full": 1, "prefill": 2, "decode": 3, "stalled": 4, "parse": 5, "tokenize": 6, "send": 7}
    request = RequestRecord(request_id=f"cmpl-{1:032x}", accepted_ns=10**15, finished_ns=10**15 + 28, states=states)
    step = StepRecord(step_id=1, ended_ns=10**15, step_ns=10**7, parts=dict.fromkeys(STEP_PARTS, 10**6))
    puts: dict[str, Callable[[], None]] = {
        "step": lambda: records.step(step),
        "request": lambda: records.request(request),
    }
    for name, put in puts.items():
        spent_us = []
        for _ in range(count):
            began_ns = time.perf_counter_ns()
            put()
            spent_us.append((time.perf_counter_ns() - began_ns) / 1000)
        print(f"record of a {name}: {statistics.median(spent_us):.1f} us")
    records.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="1,16,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    print(f"commit {commit()}, {host()}, prompts of {arguments.context} tokens, {arguments.steps} steps")
    print("sequences  us a step   99th pct  bytes/step  snapshot ms  kept at 100 steps/s")
    for sequences in map(int, arguments.sequences.split(",")):
        with tempfile.TemporaryDirectory(prefix="pellucid-flight-") as folder:
            measure(Path(folder), sequences, arguments.context, arguments.steps)
    with tempfile.TemporaryDirectory(prefix="pellucid-flight-") as folder:
        measure_records(Path(folder), 20_000)


if __name__ == "__main__":
    main()
