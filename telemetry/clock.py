"""
The one clock.

Every stamp is `CLOCK_MONOTONIC` in integer nanoseconds.  Processes of one boot of one host read the same clock, so
their stamps may be subtracted from each other; `CLOCK_ID` says whether two processes do.
"""

import time
from pathlib import Path

now_ns = time.monotonic_ns


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # No way to tell: never equal to another clock, so stamps stay inside this process.


CLOCK_ID = _boot_id()


def shares_clock(clock_id: str) -> bool:
    """Whether stamps of a process that announced `clock_id` may be compared with ours."""
    return bool(CLOCK_ID) and clock_id == CLOCK_ID
