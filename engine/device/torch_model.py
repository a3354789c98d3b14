"""
The decoder in torch as a `Model`: plans become batches, batches hidden rows, some of these logits.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.device.batch import Batch, BatchBuilder, padded_rows
from engine.device.compute import Computed, Passed, from_logits, sampling_rows
from engine.device.kv import BLOCK_SLOTS, KvCache
from engine.device.model import Decoder
from engine.device.probe import PROBE_BLOCKS, ROW_TILES, Probe, probe_layers
from engine.device.ranks.book import Interconnect
from engine.device.ranks.seat import Seat
from engine.plan import StepPlan
from quant.formats.rope import RopeTable


class TorchModel:
    """Implements `engine.device.compute.StageModel`."""

    def __init__(
        self,
        decoder: Decoder,
        builder: BatchBuilder,
        kv: KvCache,
        *,
        row_tile: int,
        tiles: str,
        reproducible: bool,
        ranks: Interconnect | None = None,
    ) -> None:
        """`ranks` have the other parts of these layers; this one says what it finds in its part of the vocabulary."""
        self.name = decoder.kernels.name
        self.tiles = tiles
        self.reproducible = reproducible
        self._decoder = decoder
        self._builder = builder
        self._kv = kv
        self._row_tile = row_tile
        self._ranks = ranks

    def compute(self, plan: StepPlan, wanted: Sequence[int], rows_in: Tensor | None = None) -> Computed:
        """Forward, then the head for the rows that sample."""
        with torch.inference_mode():
            batch, x, broken, batch_ns = self._forward(plan, rows_in)
            rows = []
            for piece, last in zip(plan.slices, batch.last_rows, strict=True):
                rows += [last + 1 - len(piece.tokens) + row for row in sampling_rows(piece)]
            return replace(from_logits(self._logits(x, rows), wanted, broken), batch_ns=batch_ns)

    def pass_on(self, plan: StepPlan, rows_in: Tensor | None) -> Passed:
        """Forward alone; rows in the order of the batch, which is the same in all stages."""
        with torch.inference_mode():
            batch, x, broken, batch_ns = self._forward(plan, rows_in)
            return Passed(x[: batch.rows].float().contiguous(), broken, batch_ns)

    def logits(self, plan: StepPlan, rows_in: Tensor | None = None) -> Tensor:
        """All rows."""
        assert len(plan.slices) == 1
        with torch.inference_mode():
            batch, x, _, _ = self._forward(plan, rows_in)
            return self._logits(x, list(range(batch.rows)))

    def _forward(self, plan: StepPlan, rows_in: Tensor | None) -> tuple[Batch, Tensor, frozenset[int], int]:
        """The batch, its rows behind the layers, the slices that are broken, and what making the batch took."""
        began_ns = time.monotonic_ns()
        batch = self._builder.build(plan)
        batch_ns = time.monotonic_ns() - began_ns
        x = self._decoder.forward(batch, self._kv, self._ranks, rows_in)
        return batch, x, self._broken(plan, batch, x), batch_ns

    def reset(self) -> None:
        """Forget all KV."""
        self._kv.reset()

    def _logits(self, x: Tensor, rows: list[int]) -> Tensor:
        """Float32 logits of some rows of `x`, padded by repeating one of them."""
        if not rows:
            return torch.zeros(0, self._decoder.head_rows)
        padding = padded_rows(len(rows), self._row_tile) - len(rows)
        return self._decoder.logits(x[rows + rows[-1:] * padding])[: len(rows)]

    def _broken(self, plan: StepPlan, batch: Batch, x: Tensor) -> frozenset[int]:
        """
        Slices whose numbers are none.  One bad token spoils all later ones of its sequence: the last known one tells.

        Their blocks are cleaned, and those of bad drafts: who reads them next would find the poison behind its mask.
        """
        known = [last - piece.drafts for piece, last in zip(plan.slices, batch.last_rows, strict=True)]
        drafted = [i for i, piece in enumerate(plan.slices) if piece.drafts]
        rows = known + [batch.last_rows[i] for i in drafted]
        finite = torch.isfinite(x[rows].float().sum(-1)).tolist()
        broken = frozenset(i for i in range(len(known)) if not finite[i])
        for i in broken.union(i for i, fine in zip(drafted, finite[len(known) :], strict=True) if not fine):
            self._kv.scrub(plan.slices[i].blocks)
        return broken


def assemble(
    decoder: Decoder, *, dtype: torch.dtype, kv_dtype: str, context_max: int, blocks_max: int, seat: Seat | None = None
) -> TorchModel:
    """Find the row tile by probing, each rank its own part, on which all agree; then put the parts together."""
    a = decoder.architecture
    rope = RopeTable(a.rope, head_dim=a.head_dim, context_max=context_max)

    def builder(row_tile: int, blocks: int, *, coarse_keys: bool) -> BatchBuilder:
        return BatchBuilder(
            rope=rope,
            windows=frozenset(a.windows),
            query_group=a.heads // a.kv_heads,
            blocks_max=blocks,
            block_slots=BLOCK_SLOTS,
            context_max=context_max,
            vocab_size=a.vocab_size,
            dtype=dtype,
            row_tile=row_tile,
            coarse_keys=coarse_keys,
        )

    row_tile, coarse_keys, reproducible = ROW_TILES[0], False, False
    for coarse_keys, row_tile in itertools.product((False, True), ROW_TILES):
        trial = builder(row_tile, PROBE_BLOCKS, coarse_keys=coarse_keys)
        kv = KvCache(a, layers=probe_layers(a), blocks_max=PROBE_BLOCKS, dtype=dtype, kv_dtype=kv_dtype)
        reproducible = Probe(decoder, trial, kv, row_tile=row_tile, context_max=context_max).passes()
        if seat is not None:
            reproducible = seat.agree(reproducible)
        if reproducible:
            break
    tiles = f"{row_tile}{' coarse' if coarse_keys else ''}"
    kv = KvCache(a, layers=a.layers, blocks_max=blocks_max, dtype=dtype, kv_dtype=kv_dtype)
    chosen = builder(row_tile, blocks_max, coarse_keys=coarse_keys)
    ranks = seat.sums if seat is not None else None
    return TorchModel(decoder, chosen, kv, row_tile=row_tile, tiles=tiles, reproducible=reproducible, ranks=ranks)
