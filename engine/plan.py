"""
The step on paper: what the device is told to compute, and what it answers.

`run(plan) -> result` is a function of the plan and of the KV that earlier plans wrote.  A follower rank or a replay
needs nothing else: positions, block tables, uniforms and token histories all travel here.
"""

import msgspec

from engine.api import Sampling, TokenLogprobs
from telemetry.records import InterconnectBook


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """
    How to choose the tokens that follow a slice: one for each sampling row, of which a slice has `drafts + 1`.

    Row r stands behind the first r drafts.  They are output there: its history is `outputs` and these drafts.
    """

    sampling: Sampling
    uniforms: tuple[float, ...]  # one a row, in [0, 1), from (seed, position)
    banned: tuple[int, ...] = ()  # not to be sampled: stop ids before tokens_min
    unbanned_rows: int = 0  # the last so many rows are past tokens_min: nothing is banned there
    prompt: tuple[int, ...] = ()  # the histories, only where a penalty needs them
    outputs: tuple[int, ...] = ()


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """
    `len(tokens)` consecutive tokens of one sequence: positions start .. start + len(tokens) - 1.

    Position p lives in slot `blocks[p // block_slots] * block_slots + p % block_slots`.  The last `drafts` tokens are
    guesses: the row before each of them and the very last one sample, and a guess counts if it is what was sampled.
    """

    sequence: int  # the engine's own number of the sequence, never reused
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]  # block table, long enough for the last position
    sample: SampleSpec | None = None  # None: the slice ends inside the known tokens, nothing to choose
    drafts: int = 0  # 0 <= drafts < len(tokens); 0 where nothing is sampled


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step.  No sequence appears twice; no block is written by two slices."""

    step_id: int
    slices: tuple[Slice, ...]

    @property
    def tokens(self) -> int:
        """Rows to compute."""
        return sum(len(piece.tokens) for piece in self.slices)


class SliceResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of one slice: the tokens that follow it, or why there are none."""

    emitted: tuple[int, ...] = ()  # the drafts that were right, and the token after them: 1 .. drafts + 1
    logprobs: tuple[TokenLogprobs, ...] = ()
    fault: str = ""  # not empty: why this sequence cannot go on
    degenerate: str = ""  # of telemetry.records.DEGENERATE_KINDS: with a fault that is the model's


class StepResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answers in the order of the plan's slices, and where the device's time went, in ns."""

    step_id: int
    slices: tuple[SliceResult, ...]
    batch_ns: int = 0
    sample_ns: int = 0
    interconnect: InterconnectBook = InterconnectBook()
    compute_parts: dict[str, int] = {}  # of telemetry.records.COMPUTE_PARTS


class DraftPlan(msgspec.Struct, frozen=True):
    """
    What a draft model is to read, and how many tokens it is to guess behind each slice, greedily, in its own KV.

    A block table is long enough for the slice and for all guesses but the last.  A count of 0: only read.
    """

    slices: tuple[Slice, ...] = ()
    counts: tuple[int, ...] = ()

    def rows(self, number: int) -> int:
        """Rows of the draft model's pass of that number, if all goes well."""
        return sum(len(piece.tokens) for piece in self.slices) if not number else sum(c > number for c in self.counts)


class DraftResult(msgspec.Struct, frozen=True):
    """The guesses behind each slice; fewer than were asked for where the draft model's numbers are none."""

    drafts: tuple[tuple[int, ...], ...] = ()
    pass_ns: tuple[int, ...] = ()  # what each pass of the draft model took
    failed: bool = False  # it is not to be asked again
