"""
Sums over the steps of one replica, so that minutes of them can be looked at without keeping each.

Two of them add up.  What is a share, or a fit, is computed from the sums when it is asked for.
"""

import msgspec

from telemetry.records import StepRecord

GRAIN_NS = 5_000_000_000
"""How long the shortest stretch is that sums are kept of."""


LINE_STEPS_MIN = 10
"""Fewer steps do not tell what is fixed in them."""


class StepTotals(msgspec.Struct):
    """All numbers are sums over steps, but for those whose name says otherwise."""

    steps: int = 0
    first_ns: int = 0  # the end of the first step
    parts: dict[str, int] = {}
    tokens: int = 0
    prefill_tokens: int = 0
    decode_steps: int = 0  # steps in which somebody's output grew
    decode_step_tokens: int = 0  # all rows of those
    beside_tokens: int = 0  # of them, rows of prompts
    recompute_tokens: int = 0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    evictions: int = 0
    drafted_tokens: int = 0
    draft_rejected_tokens: int = 0
    draft_rejected_ns: int = 0
    gc_pause_ns: int = 0
    starved_ns: int = 0
    late_ranks: dict[str, int] = {}  # ns that the others waited, by REPLICA:RANK that they waited for
    kv_waits: int = 0  # steps in which somebody waited for KV
    kv_wait_utilization: float = 0.0  # over those
    kv_wait_fragmentation: float = 0.0
    kv_wait_lookahead: float = 0.0  # the share of the pool that was reserved ahead
    tokens_max: int = 0  # of one step: the most
    full_tokens: int = 0  # rows in steps that had as many as that
    # The least squares line of busy time over rows.
    line_n: int = 0
    line_x: float = 0.0
    line_y: float = 0.0
    line_xx: float = 0.0
    line_xy: float = 0.0

    def add(self, step: StepRecord) -> None:
        """One step more."""
        self.first_ns = min(self.first_ns, step.ended_ns) if self.steps else step.ended_ns
        self.steps += 1
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(step, name))
        _join(self.parts, step.parts)
        book = step.interconnect
        if book.straggler >= 0 and book.wait_ns + sum(book.rank_wait_ns):
            _join(self.late_ranks, {f"{step.replica}:{book.straggler}": max(book.wait_ns, *book.rank_wait_ns)})
        if step.waits.get("queue_kv_full", 0) + step.waits.get("preempted", 0):
            self.kv_waits += 1
            self.kv_wait_utilization += step.kv.utilization
            self.kv_wait_fragmentation += step.kv.internal_fragmentation
            self.kv_wait_lookahead += step.kv.lookahead / step.kv.total if step.kv.total else 0.0
        self._full(step.tokens, step.tokens)
        if step.decode_tokens:
            self.decode_steps += 1
            self.decode_step_tokens += step.tokens
            self.beside_tokens += step.prefill_tokens + step.recompute_tokens
        if step.tokens:
            rows, busy_s = float(step.tokens), step.served_ns / 1e9
            self.line_n += 1
            self.line_x += rows
            self.line_y += busy_s
            self.line_xx += rows * rows
            self.line_xy += rows * busy_s

    def join(self, other: "StepTotals") -> None:
        """The steps of another stretch, or of another replica."""
        if not other.steps:
            return
        self.first_ns = min(self.first_ns, other.first_ns) if self.steps else other.first_ns
        for name in (*_SUMMED, "steps", *_FLOATS):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("parts", "late_ranks"):
            _join(getattr(self, name), getattr(other, name))
        self._full(other.tokens_max, other.full_tokens)

    def _full(self, most: int, full: int) -> None:
        if most > self.tokens_max:
            self.tokens_max, self.full_tokens = most, full
        elif most == self.tokens_max:
            self.full_tokens += full

    @property
    def busy_ns(self) -> int:
        """Of the time, what was not idle."""
        return sum(self.parts.values()) - self.parts.get("idle", 0)

    def fixed_share(self) -> float:
        """
        Of a step with as many rows as any had, the share that it costs whatever its rows are, 0..1.

        By the least squares line through all steps; 0 where they do not tell: too few, or all alike.
        """
        line = self._line()
        return 0.0 if line is None or not self.tokens_max else _share(line[0], line[0] + line[1] * self.tokens_max)

    def row_share(self, rows: float, of_rows: float) -> float:
        """Of a step with `of_rows` rows, the share that `rows` of them cost, 0..1; without a line, by their number."""
        line = self._line()
        if line is None:
            return _share(rows, of_rows)
        return _share(line[1] * rows, line[0] + line[1] * of_rows)

    def _line(self) -> tuple[float, float] | None:
        """What a step costs, and a row of it, in seconds."""
        spread = self.line_n * self.line_xx - self.line_x**2
        if self.line_n < LINE_STEPS_MIN or spread <= 0:
            return None
        slope = (self.line_n * self.line_xy - self.line_x * self.line_y) / spread
        return max(0.0, (self.line_y - slope * self.line_x) / self.line_n), max(0.0, slope)


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


_SUMMED = (
    "tokens", "prefill_tokens", "recompute_tokens", "running", "waiting", "preemptions", "evictions",
    "drafted_tokens", "draft_rejected_tokens", "draft_rejected_ns", "gc_pause_ns", "starved_ns",
)  # fmt: skip
_FLOATS = (
    "decode_steps", "decode_step_tokens", "beside_tokens",
    "kv_waits", "kv_wait_utilization", "kv_wait_fragmentation", "kv_wait_lookahead",
    "line_n", "line_x", "line_y", "line_xx", "line_xy",
)  # fmt: skip


def _join(into: dict[str, int], more: dict[str, int]) -> None:
    for name, amount in more.items():
        into[name] = into.get(name, 0) + amount
