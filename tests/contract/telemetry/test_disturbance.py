"""
What disturbs a process is measured where the kernel tells, and is nothing where it does not.
"""

import gc
import os
import threading
from pathlib import Path

import pytest

from telemetry import disturbance
from telemetry.disturbance import Disturbances, GcPauses, RunDelay, host_pressure_ns, read_memory

needs_schedstat = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not say how long threads wait for a processor"
)


def test_collections_are_added_up_and_told() -> None:
    told: list[tuple[int, int]] = []
    pauses = GcPauses(lambda generation, pause_ns: told.append((generation, pause_ns)))
    pauses.start()
    gc.collect()
    pauses.stop()
    count, total_ns = len(told), pauses.total_ns
    assert (2, told[-1][1]) in told and total_ns == sum(pause_ns for _, pause_ns in told) > 0
    gc.collect()
    assert (len(told), pauses.total_ns) == (count, total_ns)


@needs_schedstat
def test_a_thread_that_shares_a_processor_is_starved() -> None:
    """Two that spin on one processor have it in turns: each waits for about half of the time."""
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    over = threading.Event()

    def spin() -> None:
        os.sched_setaffinity(0, one)
        while not over.is_set():
            pass

    delay = RunDelay()
    rivals = os.fork()
    if not rivals:
        os.sched_setaffinity(0, one)
        while os.getppid() != 1:
            pass
        os._exit(0)
    spinning = threading.Thread(target=spin)
    spinning.start()
    try:
        delay.look_for_threads()
        delay.take_ns()
        starved_ns = 0
        for _ in range(200):  # Awaits what it measures; on any machine that comes at once.
            over.wait(0.05)
            starved_ns += delay.take_ns()
            if starved_ns > 20_000_000:
                break
        assert starved_ns > 20_000_000
    finally:
        over.set()
        spinning.join()
        os.kill(rivals, 9)
        os.waitpid(rivals, 0)
        delay.close()


@needs_schedstat
def test_threads_that_end_are_forgotten() -> None:
    delay, over = RunDelay(), threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    delay.look_for_threads()
    file = delay._files[str(thread.native_id)]
    over.set()
    thread.join()
    assert delay.take_ns() >= 0
    delay.look_for_threads()
    assert str(thread.native_id) not in delay._files and file not in delay._files.values()
    delay.close()
    assert delay._files == {}


@needs_schedstat
def test_one_thread_alone_may_be_looked_at() -> None:
    delay = RunDelay()
    delay.look_at_this_thread()
    assert list(delay._files) == [str(threading.get_native_id())]
    delay.close()


def test_memory_is_read() -> None:
    before = read_memory()
    block = bytearray(os.urandom(1)) * 50_000_000
    after = read_memory()
    assert after.resident_bytes - before.resident_bytes > 40_000_000
    assert after.private_bytes - before.private_bytes > 40_000_000
    assert after.heap_used_bytes - before.heap_used_bytes > 40_000_000
    assert len(block) == 50_000_000


def test_pressure_grows_and_is_left_out_where_the_kernel_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    found = host_pressure_ns()
    assert all(spent_ns >= 0 for spent_ns in found.values())
    monkeypatch.setattr(disturbance, "PRESSURES", ("nothing",))
    assert host_pressure_ns() == {}


def test_what_is_taken_is_since_the_last_time() -> None:
    disturbances = Disturbances()
    disturbances.start()
    try:
        gc.collect()
        first = disturbances.take()
        assert first.gc_pause_ns > 0
        second = disturbances.take()
        assert second.gc_pause_ns < first.gc_pause_ns and second.starved_ns >= 0
    finally:
        disturbances.stop()
