"""
The step on paper: what the device is told to compute, and what it answers.

`run(plan) -> result` is a function of the plan and of the KV that earlier plans wrote.  A follower rank or a replay
needs nothing else: positions, block tables, uniforms and token histories all travel here.
"""

import msgspec

from engine.api import Sampling, TokenLogprobs


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose the token that follows a slice."""

    sampling: Sampling
    uniform: float  # in [0, 1), from (seed, position)
    banned: tuple[int, ...] = ()  # not to be sampled: stop ids before tokens_min
    prompt: tuple[int, ...] = ()  # the histories, only where a penalty needs them
    outputs: tuple[int, ...] = ()


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """
    `len(tokens)` consecutive tokens of one sequence: positions start .. start + len(tokens) - 1.

    Position p lives in slot `blocks[p // block_slots] * block_slots + p % block_slots`.
    """

    sequence: int  # the engine's own number of the sequence, never reused
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]  # block table, long enough for the last position
    sample: SampleSpec | None = None  # None: the slice ends inside the known tokens, nothing to choose


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step.  No sequence appears twice; no block is written by two slices."""

    step_id: int
    slices: tuple[Slice, ...]

    @property
    def tokens(self) -> int:
        """Rows to compute."""
        return sum(len(piece.tokens) for piece in self.slices)


class SliceResult(msgspec.Struct, frozen=True):
    """What came of one slice: the tokens that follow it, or why there are none."""

    emitted: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    fault: str = ""  # not empty: why this sequence cannot go on
    degenerate: str = ""  # of telemetry.records.DEGENERATE_KINDS: with a fault that is the model's


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Answers in the order of the plan's slices, and where the device's time went, in ns."""

    step_id: int
    slices: tuple[SliceResult, ...]
    sample_ns: int = 0
    interconnect_wait_ns: int = 0
    interconnect_transfer_ns: int = 0
    interconnect_bytes: int = 0
    straggler: int = -1
