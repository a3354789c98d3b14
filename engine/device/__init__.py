"""
Ring 2: the device.  It turns a `StepPlan` into a `StepResult` and knows nothing of queues, clients or time-outs.

    runner   load a model, run a step                fake     the same contract without torch, for tests and simulation
    batch    plan -> tensors, once per step           kernels  the arithmetic, behind one Protocol
    model    the decoder                              sampler  logits -> tokens
    kv       the paged cache                          drafting a second device that guesses for the first
    ranks    several processes that compute one model together

Files and number formats are the business of `quant.formats`.

This file stays free of torch, so that the shell and the simulation can speak of a device without loading one.
"""

from typing import Protocol

import msgspec

from engine.api import WeightFacts
from engine.plan import DraftPlan, DraftResult, StepPlan, StepResult


class DeviceLost(Exception):
    """The device can compute no step any more, whatever the request: its process ends, and is started again."""


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a device says of itself once it has loaded its model; `engine.api.Hello` passes it on."""

    vocab_size: int
    context_max: int
    block_slots: int
    blocks_max: int
    eos_ids: tuple[int, ...]
    fingerprint: str  # weights + precision + build: same fingerprint and seed, same output
    reproducible: bool  # a row's result was found not to depend on its neighbours
    details: dict[str, str]  # dtype, kernels, threads: for /health and logs
    weights: WeightFacts = WeightFacts()
    first_token_ns: int = 0  # of the monotonic clock: when the warm-up had computed its first token


class Device(Protocol):
    """Computes steps, one at a time, in the order in which they come."""

    @property
    def facts(self) -> DeviceFacts:
        """What was loaded."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """
        Compute one step.  One slice's bad numbers are that slice's fault; a broken plan is an assertion.

        Raises DeviceLost.
        """
        ...

    def reset(self) -> None:
        """Forget all KV."""
        ...


class Drafting(Protocol):
    """A draft model: it guesses what another one will say."""

    def draft(self, plan: DraftPlan) -> DraftResult:
        """Read, then guess token by token; may raise whatever it likes."""
        ...
