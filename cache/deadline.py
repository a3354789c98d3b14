"""
Deadlines to which the server is held, and our own event loop is not.

Where a flood of requests keeps it busy, the loop is behind by more than a command may take, and replies lie there
unread.  Taken for the server's silence they would open the breaker, and the flood would lift the limits that are meant
for it.  So a deadline that has passed is believed only once the loop has been at its sockets since, and was not late.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from telemetry import clock

STALL_MS = 10
"""A loop that comes so much too late is behind."""
AGAIN_MS = 1
"""Until the next look; each lets the loop go round once, past its sockets."""


class Deadline:
    """Calls `late`, once, unless it is cancelled before."""

    __slots__ = ("_late", "_timer")

    def __init__(self, timeout_s: float, late: Callable[[], object]) -> None:
        self._late = late
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._passed, 0)

    def cancel(self) -> None:
        """It was kept."""
        self._timer.cancel()

    def _passed(self, due_ns: int) -> None:
        now_ns = clock.now_ns()
        if now_ns - due_ns <= STALL_MS * 1_000_000:
            self._late()
            return
        again_ns = now_ns + AGAIN_MS * 1_000_000
        self._timer = asyncio.get_running_loop().call_later(AGAIN_MS / 1000, self._passed, again_ns)


@contextlib.asynccontextmanager
async def patience(timeout_s: float) -> AsyncIterator[None]:
    """`asyncio.timeout` with such a deadline."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        deadline = Deadline(timeout_s, lambda: limit.reschedule(loop.time()))
        try:
            yield
        finally:
            deadline.cancel()
