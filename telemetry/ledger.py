"""
The latency book of one request: exactly one state at any time, so the intervals sum to the whole by construction.

Pure: time is an argument.  The engine's core keeps one per sequence, the gateway one per HTTP request.
"""


class Ledger:
    """Adds up integer nanoseconds per state."""

    __slots__ = ("_since_ns", "_spent_ns", "opened_ns", "state")

    def __init__(self, state: str, now_ns: int) -> None:
        self.opened_ns = now_ns
        self.state = state
        self._since_ns = now_ns
        self._spent_ns: dict[str, int] = {}

    def copy(self) -> "Ledger":
        """Another one that says the same, and goes its own way."""
        twin = Ledger(self.state, self._since_ns)
        twin.opened_ns, twin._spent_ns = self.opened_ns, dict(self._spent_ns)
        return twin

    def enter(self, state: str, now_ns: int) -> None:
        """Leave the present state at `now_ns` for `state`; the same state again changes nothing."""
        if state != self.state:
            self._settle(now_ns)
            self.state = state

    def splice(self, states: dict[str, int], until_ns: int) -> None:
        """
        Take over what another book of the same clock says about the time that ends at `until_ns`.

        What lies between our last stamp and the other book's beginning stays with our present state.
        """
        start_ns = until_ns - sum(states.values())
        assert start_ns >= self._since_ns, "the other book reaches back into what is settled here"
        self._settle(start_ns)
        for state, spent_ns in states.items():
            self._spent_ns[state] = self._spent_ns.get(state, 0) + spent_ns
        self._since_ns = until_ns

    def spent(self, now_ns: int) -> dict[str, int]:
        """Nanoseconds per state up to `now_ns`; they sum to `now_ns - opened_ns`.  States without time are left out."""
        assert now_ns >= self._since_ns, "time ran backwards"
        spent_ns = dict(self._spent_ns)
        if now_ns > self._since_ns:
            spent_ns[self.state] = spent_ns.get(self.state, 0) + now_ns - self._since_ns
        return spent_ns

    def _settle(self, now_ns: int) -> None:
        self._spent_ns = self.spent(now_ns)
        self._since_ns = now_ns
