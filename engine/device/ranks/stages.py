"""
One stage of a pipeline as a model: rows come from the stage before and go to the stage behind.

    stage 0   embed, layers 0 .. k       | batch 1 | batch 2 |         |  bubble  |
    stage 1   layers k ..                |         | batch 1 | batch 2 |
                                                             | gather

A step is cut into micro-batches, so that the stages compute at the same time (Huang et al. 2019, GPipe, 2.3): by rows,
and between the rows of one prompt too, for a later chunk only needs the keys and values of the earlier ones in the same
stage.  Few rows stay together: a stage reads all its weights for each micro-batch, and with few rows that is what takes
the time.  No row's bits depend on its neighbours (DESIGN 5), so the cut changes none.
"""

from collections.abc import Iterator, Sequence

import msgspec
import torch
from torch import Tensor

from engine.device.compute import Computed, StageModel, sampling_rows
from engine.device.ranks.book import Interconnect
from engine.plan import Slice, StepPlan

MICRO_ROWS_MIN = 32  # rows of a micro-batch, below which weights take the time, and not products


class PipelineModel:
    """Implements `engine.device.compute.Model`, as far as it goes: only the last stage knows logits."""

    def __init__(self, own: StageModel, interconnect: Interconnect, *, hidden: int) -> None:
        self._own = own
        self._interconnect = interconnect
        self._hidden = hidden

    @property
    def name(self) -> str:
        """Of the kernels."""
        return self._own.name

    @property
    def tiles(self) -> str:
        """A pipeline changes no bit."""
        return self._own.tiles

    @property
    def reproducible(self) -> bool:
        """The ranks have agreed on it."""
        return self._own.reproducible

    def compute(self, plan: StepPlan, wanted: Sequence[int]) -> Computed:
        """Micro-batch by micro-batch."""
        results, batch_ns, first = [], 0, 0
        parts: dict[str, int] = {}
        broken: set[int] = set()
        for micro, slices in micro_batches(plan, self._interconnect.stages):
            rows_in = self._receive(micro)
            if self._is_last:
                count = sum(len(sampling_rows(piece)) for piece in micro.slices)
                passed: Computed = self._own.compute(micro, wanted[first : first + count], rows_in)
                results.append(passed)
                first += count
                spoilt, spent_ns, own_parts = passed.broken, passed.batch_ns, passed.parts
            else:
                handed = self._own.pass_on(micro, rows_in)
                self._interconnect.send(handed.rows)
                spoilt, spent_ns, own_parts = handed.broken, handed.batch_ns, handed.parts
            broken.update(slices[index] for index in spoilt)
            batch_ns += spent_ns
            parts = {part: parts.get(part, 0) + spent for part, spent in own_parts.items()}
        return Computed(
            [best for one in results for best in one.best],
            [highest for one in results for highest in one.highest],
            [lowest for one in results for lowest in one.lowest],
            torch.cat([one.logits for one in results]) if results else torch.zeros(0, 0),
            frozenset(broken),
            batch_ns,
            parts,
        )

    def logits(self, plan: StepPlan) -> Tensor:
        """All rows; nothing but in the last stage."""
        rows_in = self._receive(plan)
        if self._is_last:
            return self._own.logits(plan, rows_in)
        self._interconnect.send(self._own.pass_on(plan, rows_in).rows)
        return torch.zeros(0)

    def reset(self) -> None:
        """Of this stage."""
        self._own.reset()

    @property
    def _is_last(self) -> bool:
        return self._interconnect.stage == self._interconnect.stages - 1

    def _receive(self, plan: StepPlan) -> Tensor | None:
        if self._interconnect.stage == 0:
            return None
        rows = torch.empty(plan.tokens, self._hidden)
        self._interconnect.receive(rows)
        return rows


def micro_batches(plan: StepPlan, stages: int) -> Iterator[tuple[StepPlan, list[int]]]:
    """
    The plan in at most `stages` parts of about equally many rows, and which of its slices those of each part belong to.

    Rows that sample stay with those that sample of the same slice.
    """
    count = max(1, min(stages, plan.tokens // MICRO_ROWS_MIN))
    room = -(-plan.tokens // count)
    pieces: list[Slice] = []
    slices: list[int] = []
    rows = 0
    for index, whole in enumerate(plan.slices):
        piece: Slice | None = whole
        while piece is not None:
            head, piece = _parted(piece, room - rows)
            pieces.append(head)
            slices.append(index)
            rows += len(head.tokens)
            if rows >= room:
                yield StepPlan(step_id=plan.step_id, slices=tuple(pieces)), slices
                pieces, slices, rows = [], [], 0
    if pieces:
        yield StepPlan(step_id=plan.step_id, slices=tuple(pieces)), slices


def _parted(piece: Slice, rows: int) -> tuple[Slice, Slice | None]:
    """The first `rows` of a slice and the rest; all of it if the rest would be no more than what samples."""
    if rows >= len(piece.tokens) - piece.drafts:
        return piece, None
    head = msgspec.structs.replace(piece, tokens=piece.tokens[:rows], sample=None, drafts=0)
    return head, msgspec.structs.replace(piece, start=piece.start + rows, tokens=piece.tokens[rows:])
