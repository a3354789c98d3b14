"""
The gateway's half of a request's latency book, and how it is joined with the engine's.

    auth | parse | tokenize | limit | route | dispatch | <the engine's states> | deliver | detokenize, limit, send ...
                                            ^ sent     ^ accepted              ^ finished  ^ last news here

An engine that is gone has taken its book with it.  All that is known of such a life is when we sent the request, heard
that it was taken, and lost it; what follows, until the next engine has it, is no dispatch but a resume:

    ... | dispatch | lost | resume | <the next engine's states> | deliver ...

While the engine has the request its book counts, whatever the gateway does meanwhile.  Both read one clock on one host;
where they do not, only the engine's durations are used and the difference counts as dispatch.
"""

from collections.abc import Sequence
from typing import NamedTuple

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

    def overhead(self, sent_ns: int) -> dict[str, str]:
        """A header: our own time before the request was sent on."""
        return {"x-pellucid-overhead-ms": f"{(sent_ns - self.opened_ns) / 1e6:.3f}"}

    def guess(self, state: str, now_ns: int) -> None:
        """What the engine seems to be doing, for the live view."""
        if self._tail is None:
            self._show(state, now_ns)

    def engine_done(self, now_ns: int) -> None:
        """The engine's last news arrived at `now_ns`."""
        if self._dispatched_ns is not None and self._tail is None:
            self._tail = Ledger("detokenize", now_ns)
            self._show("detokenize", now_ns)

    def wrote(self, began_ns: int, ended_ns: int, *, blocked: bool) -> None:
        """A write to the client took this long; `blocked` if it had to wait for the client to read."""
        if self._tail is not None:
            began_ns = max(began_ns, self._tail.opened_ns)
        elif self._dispatched_ns is not None:
            return
        self.enter("send_blocked" if blocked else "send", began_ns)
        self.enter("detokenize" if self._tail is not None else "send", ended_ns)

    def close(self, now_ns: int, told: "Told | None") -> dict[str, int]:
        """
        All states up to `now_ns`; they sum to `now_ns - opened_ns`.  Changes nothing: it may be asked for meanwhile.

        `told` is of the sequence that finished last.  Where its engine's book is missing, all after it has taken the
        request counts as deliver.
        """
        ledger = self._ledger.copy()
        if self._dispatched_ns is None or told is None:
            return ledger.spent(now_ns)
        received_ns = self._tail.opened_ns if self._tail else now_ns
        record = told.record
        if record is not None and record.imbalance() == 0:
            _splice(ledger, told, record.states, self._lose(ledger, told.lives), received_ns)
        else:
            self._lose(ledger, told.lives)
            if told.accepted_ns:
                ledger.enter("deliver", min(told.accepted_ns, received_ns))
        ledger.enter("finalize", received_ns)
        if self._tail is not None:
            ledger.splice(self._tail.spent(now_ns), now_ns)
        return ledger.spent(now_ns)

    def until_first_token(self, heard_ns: int, told: "Told") -> dict[str, int]:
        """The same up to the first token, of which we heard at `heard_ns`; `told` is of the sequence that had it."""
        assert self._dispatched_ns is not None, "a token came before the request was sent"
        ledger = self._ledger.copy()
        earlier = next((index for index, life in enumerate(told.lives) if heard_ns <= life.lost_ns), None)
        if earlier is not None:
            self._lose(ledger, told.lives[:earlier])
            ledger.enter("lost", min(told.lives[earlier].accepted_ns or heard_ns, heard_ns))
            return ledger.spent(heard_ns)
        started_ns = self._lose(ledger, told.lives)
        record = told.record
        if record is not None and record.first_token_ns and record.part_imbalance() == 0:
            _splice(ledger, told, record.first_token_states, started_ns, heard_ns)
        elif told.accepted_ns:
            ledger.enter("deliver", min(told.accepted_ns, heard_ns))
        return ledger.spent(heard_ns)

    def _lose(self, ledger: Ledger, lives: Sequence[Life]) -> int:
        """Book the lives that are lost.  Returns since when the sequence was on its way to the engine after them."""
        assert self._dispatched_ns is not None
        started_ns = self._dispatched_ns
        for life in lives:
            if life.accepted_ns:
                ledger.enter("lost", life.accepted_ns)
            ledger.enter("resume", life.lost_ns)
            started_ns = life.lost_ns
        return started_ns


class Told(NamedTuple):
    """What an engine has said of a sequence, and what is known of those that had it before."""

    record: RequestRecord | None
    """Its book; None: it did not come."""
    accepted_ns: int
    """When we heard that it took the sequence; 0: never."""
    one_clock: bool
    lives: Sequence[Life]


def _splice(ledger: Ledger, told: Told, states: dict[str, int], started_ns: int, received_ns: int) -> None:
    """What the engine's book says from its beginning on; what is left of the time until `received_ns` is deliver."""
    assert told.record is not None
    start_ns = told.record.accepted_ns
    end_ns = start_ns + sum(states.values())
    if not told.one_clock or not started_ns <= start_ns <= end_ns <= received_ns:
        start_ns, end_ns = received_ns - (end_ns - start_ns), received_ns
    if start_ns >= started_ns:
        ledger.enter("deliver", start_ns)
        ledger.splice(states, end_ns)
