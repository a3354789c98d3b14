"""
When an upstream is asked, and when it is left alone.

    closed --`failures_max` in a row--> open --the pause is over, or a probe succeeds--> open, one request tries
      ^                                  ^                                                  |
      |                                  '---- it fails, or says nothing: a longer pause ---|
      '---------------------------------------- it is answered -----------------------------'

An answer that has begun closes it; one that is complete forgets the failures.  So an upstream that begins well and
breaks off every time is left alone as well.

The pause begins when a request is sent to try, and again when that has failed: an answer may take minutes, and
meanwhile the others must neither all be refused nor all be sent to somebody who is silent.
"""

NS_PER_S = 1_000_000_000


class Breaker:
    """Pure: time is an argument.  A trial is the number of a request that tries, 0 for all others."""

    def __init__(
        self, *, failures_max: int = 3, pause_min_ns: int = NS_PER_S, pause_max_ns: int = 30 * NS_PER_S
    ) -> None:
        assert failures_max > 0 and 0 < pause_min_ns <= pause_max_ns
        self.is_open = False
        self._trials = 0
        self._failures_max = failures_max
        self._failures = 0  # in a row
        self._pause_min_ns = pause_min_ns
        self._pause_max_ns = pause_max_ns
        self._pause_ns = pause_min_ns
        """From the next trial to the one after it."""
        self._until_ns = 0

    def admits(self, now_ns: int) -> bool:
        """Whether a request may be sent."""
        return not self.is_open or now_ns >= self._until_ns

    def began(self, now_ns: int) -> int:
        """A request is sent.  The trial that it is; whoever sent it tells of its end with that number."""
        assert self.admits(now_ns), "nobody asks where it is open"
        if not self.is_open:
            return 0
        self._trials += 1
        self._until_ns = now_ns + self._pause_ns
        self._pause_ns = min(self._pause_ns * 2, self._pause_max_ns)
        return self._trials

    def answered(self) -> bool:
        """An answer has begun, to whichever request.  Whether it was open until now."""
        was_open, self.is_open = self.is_open, False
        if was_open:
            self._failures = self._failures_max - 1  # The next failure opens it again.
        return was_open

    def completed(self) -> None:
        """An answer is complete."""
        if not self.is_open:
            self._failures = 0
            self._pause_ns = self._pause_min_ns

    def failed(self, now_ns: int, trial: int = 0) -> bool:
        """A request or a probe has failed.  Whether that opened it."""
        if self.is_open:
            if trial and trial == self._trials:
                self._until_ns = now_ns + self._pause_ns
            return False
        self._failures += 1
        if self._failures < self._failures_max:
            return False
        self.is_open = True
        self._until_ns = now_ns + self._pause_ns
        return True

    def abandoned(self, trial: int) -> None:
        """A request was given up for reasons of its client: that says nothing of the upstream."""
        if trial and trial == self._trials:
            self._until_ns = 0

    def probed(self, now_ns: int) -> None:
        """A probe has succeeded: it is there, which does not say that it works."""
        self._until_ns = min(self._until_ns, now_ns)
