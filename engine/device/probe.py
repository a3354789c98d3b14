"""
The start-up probe: does a row's result depend on its neighbours, on this machine, for this model's shapes?

One sequence goes through the first layers and the head in several ways: as one chunk, in ragged chunks, token by token
at its end, alone and among others, through another block table.  All must agree in every bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.api import Sampling
from engine.device.batch import BatchBuilder, padded_rows
from engine.device.kv import BLOCK_SLOTS, KvCache
from engine.device.model import Decoder
from engine.plan import SampleSpec, Slice, StepPlan
from quant.formats.architecture import Architecture

PROBE_LAYERS = 2
PROBE_TOKENS = 560  # more than flash attention's tile of 512 keys
PROBE_BLOCKS = 160
ROW_TILES = (2, 4, 8, 16, 32)
_NEIGHBOURS = ((3, 1), (0, 1), (40, 1), (17, 1), (90, 1), (88, 1), (0, 33), (100, 1), (64, 1), (5, 5))  # start, count


class Probe:
    """Runs one pseudo-random sequence in different company."""

    def __init__(
        self, decoder: Decoder, builder: BatchBuilder, kv: KvCache, *, row_tile: int, context_max: int
    ) -> None:
        a = decoder.architecture
        self._decoder = decoder
        self._builder = builder
        self._row_tile = row_tile
        self._kv = kv
        count = min(PROBE_TOKENS, context_max)
        generator = torch.Generator().manual_seed(1)
        self._tokens: list[int] = torch.randint(0, a.vocab_size, (count,), generator=generator).tolist()

    def passes(self) -> bool:
        """Whether all ways agree."""
        total = len(self._tokens)
        table = tuple(range(-(-total // BLOCK_SLOTS)))
        expected = self._states((total,), table, crowded=False)
        tail = min(total - 1, 6)
        ways = (
            (_ragged(total), table, True),
            ((total // 2, total - total // 2), table, False),
            ((total - tail,) + (1,) * tail, table[::-1], False),
            ((total - tail,) + (1,) * tail, table, True),
        )
        for counts, blocks, crowded in ways:
            if not torch.equal(self._states(counts, blocks, crowded=crowded), expected):
                return False
        return self._head_agrees(expected)

    def _head_agrees(self, states: Tensor) -> bool:
        if not self._decoder.head_rows:
            return True
        rows = states[: padded_rows(min(20, len(states)), self._row_tile)]
        if len(rows) % self._row_tile:
            return True  # a context so short that there is nothing to compare
        logits = self._decoder.logits(rows)
        few = self._decoder.logits(rows[-self._row_tile :])
        return torch.equal(few, logits[-self._row_tile :])

    def _states(self, counts: Sequence[int], blocks: tuple[int, ...], *, crowded: bool) -> Tensor:
        """The sequence's rows after the probed layers, computed in slices of `counts` tokens."""
        self._kv.reset()
        rows, start = [], 0
        for step, count in enumerate(filter(None, counts)):  # half of one token is none
            tokens = tuple(self._tokens[start : start + count])
            pieces = [Slice(sequence=0, start=start, tokens=tokens, blocks=blocks)]
            if crowded:
                pieces += self._neighbours(first_block=len(blocks))
                pieces.append(pieces.pop(0))
            batch = self._builder.build(StepPlan(step_id=step, slices=tuple(pieces)))
            last = batch.last_rows[-1]
            rows.append(self._decoder.forward(batch, self._kv)[last + 1 - count : last + 1])
            start += count
        return torch.cat(rows)

    def _neighbours(self, *, first_block: int) -> list[Slice]:
        """Other sequences, as far as the model's context lets them be so long."""
        pieces = []
        for number, (start, count) in enumerate(_NEIGHBOURS, 1):
            if start + count <= len(self._tokens):
                end_block = first_block - (-(start + count) // BLOCK_SLOTS)
                blocks, first_block = tuple(range(first_block, end_block)), end_block
                tokens = tuple(self._tokens[start : start + count])
                pieces.append(Slice(sequence=number, start=start, tokens=tokens, blocks=blocks))
        return pieces


def probe_layers(architecture: Architecture) -> int:
    """How many layers' cache a probe needs; it computes no more of them."""
    return min(PROBE_LAYERS, architecture.layers)


def _ragged(total: int) -> tuple[int, ...]:
    """1, 2, 3, 5, 8, ... up to `total` tokens."""
    counts, size, following = [], 1, 2
    while total > 0:
        counts.append(min(size, total))
        total -= counts[-1]
        size, following = following, size + following
    return tuple(counts)


def warm_up_plans(*, rows_max: int, blocks_max: int) -> list[StepPlan]:
    """Steps of the usual sizes, so that the first clients do not wait for code to be generated.  They overwrite KV."""
    spec = SampleSpec(sampling=Sampling(temperature=0), uniforms=(0.0,))
    sizes = [size for size in (rows_max, 256, 64, 16) if 0 < size <= min(rows_max, (blocks_max - 1) * BLOCK_SLOTS)]
    chunks = [
        (Slice(sequence=0, start=0, tokens=(0,) * size, blocks=tuple(range(-(-size // BLOCK_SLOTS))), sample=spec),)
        for size in sizes
    ]
    decodes = [
        tuple(Slice(sequence=i, start=0, tokens=(0,), blocks=(i,), sample=spec) for i in range(count))
        for count in (1, 2, 3, 4, 8, 16)
        if count <= blocks_max
    ]
    return [StepPlan(step_id=0, slices=slices) for slices in (*chunks, *decodes)]
