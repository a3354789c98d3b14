"""
Work that the event loop waits for only so long.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable


async def done_within(seconds: float, work: Callable[[], None]) -> bool:
    """Whether `work` has ended in time.  The interpreter does not wait for its thread: it may be stuck for ever."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def run() -> None:
        try:
            work()
        finally:
            with contextlib.suppress(RuntimeError):  # We came too late: the loop is closed, and nobody waits.
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="aside", daemon=True).start()
    try:
        await asyncio.wait_for(done.wait(), seconds)
    except TimeoutError:
        return False
    return True
