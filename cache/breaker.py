"""
When to stop asking a server that does not answer.

    closed --`failures_max` failures within `window_ns`--> open --a probe that succeeds--> closed

While it is open nobody asks but the probe, so an outage costs a few requests one timeout each, and the others nothing.
"""

from collections import deque

NS_PER_S = 1_000_000_000


class Breaker:
    """Counts failures.  Time is an argument."""

    def __init__(self, *, failures_max: int = 5, window_ns: int = 10 * NS_PER_S) -> None:
        assert failures_max > 0 and window_ns > 0
        self.is_open = False
        self.openings = 0
        self._window_ns = window_ns
        self._failed_ns: deque[int] = deque(maxlen=failures_max)

    def failed(self, now_ns: int) -> bool:
        """One more failure.  Whether it opened the breaker."""
        self._failed_ns.append(now_ns)
        full = len(self._failed_ns) == self._failed_ns.maxlen
        if self.is_open or not full or now_ns - self._failed_ns[0] > self._window_ns:
            return False
        return self.open()

    def open(self) -> bool:
        """Whether it was closed until now."""
        if self.is_open:
            return False
        self.is_open = True
        self.openings += 1
        return True

    def close(self) -> bool:
        """A probe has succeeded: what failed before it says nothing any more.  Whether it was open until now."""
        self._failed_ns.clear()
        was_open, self.is_open = self.is_open, False
        return was_open
