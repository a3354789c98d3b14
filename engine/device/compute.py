"""
The seam between the runner and the models that compute: tokens in, logits out.

    torch_model    the decoder in torch: any weights, any machine
    native         the decoder in C++, one call for a whole step

Which rows of a step sample, and in which order, is said once, here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.plan import Slice, StepPlan


@dataclass(frozen=True, slots=True)
class Computed:
    """
    What came of one step.  Sampling rows are in the order (slice, row of the slice).

    The best token of a row comes with every computation; logits are written out only for the rows that need them.
    """

    best: list[int]  # of each sampling row: the lowest id of the highest logit
    highest: list[float]  # of each sampling row, the logit; minus infinity if it has no numbers
    lowest: list[float]
    logits: Tensor  # float32 [wanted rows, vocab_size], in order; the caller may write
    broken: frozenset[int]  # slices in which the numbers of a known token are none; their rows mean nothing
    batch_ns: int = 0  # of the time that it took: making arrays of the plan, and these answers
    parts: dict[str, int] = field(default_factory=dict)  # of the rest: telemetry.records.COMPUTE_PARTS, if it can tell


ALL = -1
"""So many logits of a row are wanted: all."""


class Model(Protocol):
    """Weights and KV in memory.  A plan that breaks its promises is our bug: AssertionError, and nothing written."""

    @property
    def name(self) -> str:
        """Of the kernels, for /health and logs."""
        ...

    @property
    def tiles(self) -> str:
        """What else about its numerics belongs into the fingerprint."""
        ...

    @property
    def reproducible(self) -> bool:
        """Whether a row's result was found not to depend on its neighbours."""
        ...

    def compute(self, plan: StepPlan, wanted: Sequence[int]) -> Computed:
        """
        Compute the rows of a plan that has slices, and write their keys and values.

        `wanted` says of each sampling row how many of its best logits are: 0, where the best token is enough, ALL, or a
        number, where it does not matter what becomes of the others.  Raises DeviceLost.
        """
        ...

    def logits(self, plan: StepPlan) -> Tensor:
        """The logits of every row of a plan with one slice, for tests and quality reports: [tokens, vocab_size]."""
        ...

    def reset(self) -> None:
        """Forget all KV."""
        ...


@dataclass(frozen=True, slots=True)
class Passed:
    """What one stage of a pipeline hands to the next."""

    rows: Tensor  # float32 [rows, hidden], contiguous; in an order of the model's own, which all stages share
    broken: frozenset[int]
    batch_ns: int = 0
    parts: dict[str, int] = field(default_factory=dict)


class StageModel(Model, Protocol):
    """Some of the layers, which take up rows that the layers before have computed, or hand theirs on."""

    def compute(self, plan: StepPlan, wanted: Sequence[int], rows_in: Tensor | None = None) -> Computed:
        """As a `Model`; `rows_in` are those of the stage before, None in the first."""
        ...

    def pass_on(self, plan: StepPlan, rows_in: Tensor | None) -> Passed:
        """Without the head, for the stage behind."""
        ...

    def logits(self, plan: StepPlan, rows_in: Tensor | None = None) -> Tensor:
        """As a `Model`."""
        ...


def sampling_rows(piece: Slice) -> range:
    """Which rows of a slice sample: none, or the last, or one before each draft and the last."""
    count = len(piece.tokens)
    return range(count - 1 - piece.drafts, count) if piece.sample is not None else range(0)


def from_logits(logits: Tensor, wanted: Sequence[int], broken: frozenset[int] = frozenset()) -> Computed:
    """What a model that has computed the logits of all sampling rows, float32 [rows, vocab_size], says of them."""
    if not wanted:
        return Computed([], [], [], logits, broken)
    lowest, highest = torch.aminmax(logits, dim=-1)
    keep = torch.tensor([bool(count) for count in wanted])
    asked = logits if bool(keep.all()) else logits[keep]
    return Computed(logits.argmax(-1).tolist(), highest.tolist(), lowest.tolist(), asked, broken)
