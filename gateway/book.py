"""
The gateway's half of a request's latency book, and how it is joined with the engine's.

    parse | tokenize | dispatch | <the engine's states> | deliver | send, send_blocked | finalize
                     ^ sent     ^ accepted              ^ finished  ^ last news here

An engine that is gone has taken its book with it.  All that is known of such a life is when we sent the request, heard
that it was taken, and lost it; what follows, until the next engine has it, is no dispatch but a resume:

    ... | dispatch | lost | resume | <the next engine's states> | deliver ...

While the engine has the request its book counts, whatever the gateway does meanwhile.  Both read one clock on one host;
where they do not, only the engine's durations are used and the difference counts as dispatch.
"""

from collections.abc import Sequence

from gateway.calls import Life
from telemetry.ledger import Ledger
from telemetry.records import RequestRecord


class Book:
    """Exactly one state at any time, from the first byte to the end of the response."""

    def __init__(self, now_ns: int) -> None:
        self.opened_ns = now_ns
        self.shown = Ledger("parse", now_ns)
        """For the list of live requests: engine states are guessed from the news until its book arrives."""
        self._shown_ns = now_ns
        self._ledger = Ledger("parse", now_ns)
        self._tail: Ledger | None = None  # from the engine's last news on
        self._dispatched_ns: int | None = None

    def enter(self, state: str, now_ns: int) -> None:
        """The gateway does something else now; it does not count while the engine has the request."""
        if self._tail is not None:
            self._tail.enter(state, now_ns)
        elif self._dispatched_ns is None:
            self._ledger.enter(state, now_ns)
        else:
            return
        self._show(state, now_ns)

    def _show(self, state: str, now_ns: int) -> None:
        """Guesses about several sequences may come out of order."""
        self._shown_ns = max(self._shown_ns, now_ns)
        self.shown.enter(state, self._shown_ns)

    def dispatched(self, now_ns: int) -> None:
        """The engine has been sent the request."""
        self.enter("dispatch", now_ns)
        self._dispatched_ns = now_ns

    def timing(self, sent_ns: int, now_ns: int, states: Sequence[str]) -> dict[str, str]:
        """Headers: our own time before the request was sent on, and what these states have taken so far."""
        spent = self.shown.spent(now_ns)
        return {
            "x-pellucid-overhead-ms": f"{(sent_ns - self.opened_ns) / 1e6:.3f}",
            "server-timing": ", ".join(f"{state};dur={spent.get(state, 0) / 1e6:.3f}" for state in states),
        }

    def guess(self, state: str, now_ns: int) -> None:
        """What the engine seems to be doing, for the live view."""
        if self._tail is None:
            self._show(state, now_ns)

    def engine_done(self, now_ns: int) -> None:
        """The engine's last news arrived at `now_ns`."""
        if self._dispatched_ns is not None and self._tail is None:
            self._tail = Ledger("send", now_ns)
            self._show("send", now_ns)

    def wrote(self, began_ns: int, ended_ns: int, *, blocked: bool) -> None:
        """A write to the client took this long; `blocked` if it had to wait for the client to read."""
        if self._tail is not None:
            began_ns = max(began_ns, self._tail.opened_ns)
        elif self._dispatched_ns is not None:
            return
        self.enter("send_blocked" if blocked else "send", began_ns)
        self.enter("send", ended_ns)

    def close(
        self,
        now_ns: int,
        record: RequestRecord | None,
        *,
        accepted_ns: int,
        one_clock: bool,
        lives: Sequence[Life] = (),
    ) -> dict[str, int]:
        """
        All states up to `now_ns`; they sum to `now_ns - opened_ns`.

        `record` is the engine's book, of the sequence that finished last; without one, all after `accepted_ns` (when
        we heard that the engine took the request) counts as deliver.  `lives` are those that it lost before.
        """
        ledger = self._ledger
        if self._dispatched_ns is None:
            return ledger.spent(now_ns)
        received_ns = self._tail.opened_ns if self._tail else now_ns
        started_ns = self._dispatched_ns
        for life in lives:
            if life.accepted_ns:
                ledger.enter("lost", life.accepted_ns)
            ledger.enter("resume", life.lost_ns)
            started_ns = life.lost_ns
        if record is not None and record.imbalance() == 0:
            self._splice(record, started_ns, received_ns, one_clock=one_clock)
        elif accepted_ns:
            ledger.enter("deliver", min(accepted_ns, received_ns))
        ledger.enter("finalize", received_ns)
        if self._tail is not None:
            ledger.splice(self._tail.spent(now_ns), now_ns)
        return ledger.spent(now_ns)

    def _splice(self, record: RequestRecord, dispatched_ns: int, received_ns: int, *, one_clock: bool) -> None:
        start_ns, end_ns = record.accepted_ns, record.finished_ns
        if not one_clock or not dispatched_ns <= start_ns <= end_ns <= received_ns:
            start_ns, end_ns = received_ns - (end_ns - start_ns), received_ns
        if start_ns >= dispatched_ns:
            self._ledger.enter("deliver", start_ns)
            self._ledger.splice(record.states, end_ns)
