"""
A step plan as tensors, made once per step and read by every layer.

Rows are put into an order in which slices of one shape lie together, so that a group of them is one attention call on
views.  A group's block tables are padded with the sequence's own first block: padding is masked, but 0 * NaN is NaN,
so no sequence may ever touch what belongs to another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.plan import Slice, StepPlan
from quant.formats.rope import RopeTable

QUERY_TILE = 4  # query rows of an attention call are a multiple of it: float32 products round differently below
QUERY_ROWS_MAX = 128  # query rows of one attention tile: flash attention would take other tiles for more
ROWS_MIN = 6  # rows of a step that cost no more than one
KEY_SPLIT = 512  # flash attention sums over so many keys at a time
KEY_GAP = (192, 384)  # between these, the matrix library would halve the sum over keys where it does not elsewhere
GROUP_SLOTS_MAX = 32 * 1024  # padded keys of one group: bounds the memory of a gather
GROUP_FILL_MIN = 0.75  # a sequence joins a group if it would need so much of that width by itself


@dataclass(frozen=True, slots=True)
class Group:
    """Slices with equally many tokens and about equally many blocks."""

    first_row: int
    sequences: int
    count: int  # tokens of each slice
    tiles: int  # a long slice (then the only one) is cut into so many tiles
    tile_tokens: int  # `tiles * tile_tokens >= count`
    blocks: Tensor  # [sequences * width]
    width: int  # blocks of each padded table
    query_rows: Tensor  # [rows of a padded tile]: which row of the tile each is; padding repeats the last
    masks: dict[int, Tensor]  # window -> additive mask [sequences * tiles, 1, 1 or rows of a tile, slots]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step.  `rows` are real, tensors with one entry per row are padded to `padded_rows(rows)`."""

    rows: int
    tokens: Tensor  # int64 [padded]
    cos: Tensor  # float32 [padded, 1, head_dim]
    sin: Tensor
    slots: Tensor  # int64 [rows]: where the new keys and values go
    groups: tuple[Group, ...]
    last_rows: tuple[int, ...]  # of each slice, in the order of the plan


def padded_rows(rows: int, tile: int) -> int:
    """
    The row count to compute with.

    Coarser where it costs little: the matrix library builds and keeps code for each count that it meets.  And not below
    `ROWS_MIN`: with few rows a product only waits for the weights, and is measurably slower with one or two.
    """
    rows = max(rows, ROWS_MIN)
    step = tile
    while step < 64 and step * 8 <= rows:
        step *= 2
    return -(-rows // step) * step


def padded_slots(slots: int, *, coarse: bool) -> int:
    """
    How many keys to attend over, so that the sum over `slots` of them does not depend on how many are masked.

    `coarse` is for machines where the finer rule does not hold: always the whole split.
    """
    whole, rest = divmod(slots, KEY_SPLIT)
    if rest and coarse:
        rest = KEY_SPLIT
    elif KEY_GAP[0] < rest < KEY_GAP[1]:
        rest = KEY_GAP[1]
    return whole * KEY_SPLIT + rest


class BatchBuilder:
    """Turns plans into batches for one model and one cache."""

    def __init__(
        self,
        *,
        rope: RopeTable,
        windows: frozenset[int],
        query_group: int,
        blocks_max: int,
        block_slots: int,
        context_max: int,
        vocab_size: int,
        dtype: torch.dtype,
        row_tile: int,
        coarse_keys: bool,
    ) -> None:
        self._rope = rope
        self._windows = windows
        self._query_group = query_group
        self._blocks_max = blocks_max
        self._block_slots = block_slots
        self._context_max = context_max
        self._vocab_size = vocab_size
        self._dtype = dtype
        self._row_tile = row_tile
        self._coarse_keys = coarse_keys

    def build(self, plan: StepPlan) -> Batch:
        """The batch of a plan that has slices.  A plan that breaks its promises is our bug: AssertionError."""
        pieces = plan.slices
        assert pieces, f"step {plan.step_id}: nothing to compute"
        self._check(plan)
        members = self._grouped(pieces)
        order = [index for group in members for index in group]
        counts = np.array([len(pieces[index].tokens) for index in order])
        starts = np.array([pieces[index].start for index in order])
        ends = np.cumsum(counts)
        rows = int(ends[-1])
        padded = padded_rows(rows, self._row_tile)
        tokens, positions = np.zeros(padded, np.int64), np.zeros(padded, np.int64)
        np.concatenate([pieces[index].tokens for index in order], out=tokens[:rows])
        positions[:rows] = np.arange(rows) + np.repeat(starts - (ends - counts), counts)
        cos, sin = self._rope.rows(torch.from_numpy(positions))
        last_rows = [0] * len(pieces)
        for index, end in zip(order, ends.tolist(), strict=True):
            last_rows[index] = end - 1
        groups, first_row = [], 0
        for group in members:
            groups.append(self._group([pieces[index] for index in group], first_row))
            first_row += groups[-1].sequences * groups[-1].count
        slots = np.concatenate([self._slots(pieces[index]) for index in order])
        return Batch(rows, torch.from_numpy(tokens), cos, sin, torch.from_numpy(slots), tuple(groups), tuple(last_rows))

    def _blocks_used(self, piece: Slice) -> int:
        return -(-(piece.start + len(piece.tokens)) // self._block_slots)

    def _width(self, piece: Slice) -> int:
        """Blocks of its padded table."""
        slots = padded_slots(self._blocks_used(piece) * self._block_slots, coarse=self._coarse_keys)
        return -(-slots // self._block_slots)

    def _slots(self, piece: Slice) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        positions = np.arange(piece.start, piece.start + len(piece.tokens))
        blocks = np.array(piece.blocks, np.int64)[positions // self._block_slots]
        slots: np.ndarray[tuple[int], np.dtype[np.int64]] = blocks * self._block_slots + positions % self._block_slots
        return slots

    def _grouped(self, pieces: Sequence[Slice]) -> list[list[int]]:
        """Indices of slices, group by group: equal counts, longest context first."""
        order = sorted(range(len(pieces)), key=lambda i: (len(pieces[i].tokens), -self._blocks_used(pieces[i])))
        groups: list[list[int]] = []
        for index in order:
            if groups and self._joins(pieces[groups[-1][0]], pieces[index], len(groups[-1])):
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    def _joins(self, head: Slice, piece: Slice, members: int) -> bool:
        width, count = self._width(head), len(head.tokens)
        return (
            count == len(piece.tokens)
            and count * self._query_group <= QUERY_ROWS_MAX
            and self._width(piece) >= GROUP_FILL_MIN * width - 1
            and (members + 1) * width * self._block_slots <= GROUP_SLOTS_MAX
        )

    def _group(self, pieces: list[Slice], first_row: int) -> Group:
        width, count = self._width(pieces[0]), len(pieces[0].tokens)
        tiles = -(-count // max(1, QUERY_ROWS_MAX // self._query_group))
        tile_tokens = -(-count // tiles)
        blocks = np.empty((len(pieces), width), np.int64)
        for row, piece in zip(blocks, pieces, strict=True):
            used = self._blocks_used(piece)
            row[:used] = piece.blocks[:used]
            row[used:] = piece.blocks[0]
        firsts = torch.tensor([piece.start for piece in pieces])[:, None] + torch.arange(tiles) * tile_tokens
        lasts = torch.tensor([piece.start + count - 1 for piece in pieces])[:, None].expand_as(firsts)
        rows = 1 if count == 1 else -(-tile_tokens * self._query_group // QUERY_TILE) * QUERY_TILE
        positions = firsts.reshape(-1, 1) + torch.arange(rows) // self._query_group
        positions = torch.minimum(positions, lasts.reshape(-1, 1))  # rows that only pad repeat the last one
        masks = {window: self._mask(positions, width, window) for window in self._windows}
        table = torch.from_numpy(blocks.reshape(-1))
        tile_rows = tile_tokens * self._query_group
        query_rows = torch.arange(-(-tile_rows // QUERY_TILE) * QUERY_TILE).clamp_(max=tile_rows - 1)
        return Group(first_row, len(pieces), count, tiles, tile_tokens, table, width, query_rows, masks)

    def _mask(self, positions: Tensor, width: int, window: int) -> Tensor:
        """0 where a query row at `positions` [tiles, rows] may look, -inf elsewhere."""
        queries = positions[:, None, :, None]
        keys = torch.arange(width * self._block_slots)
        hidden = keys > queries
        if window:
            hidden |= keys <= queries - window
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))

    def _check(self, plan: StepPlan) -> None:
        """The promises that a plan makes.  They are asserted here because a bad index would corrupt a neighbour."""
        written: set[int] = set()
        sequences: set[int] = set()
        for piece in plan.slices:
            end = piece.start + len(piece.tokens)
            used = self._blocks_used(piece)
            assert piece.tokens and piece.start >= 0, f"step {plan.step_id}: an empty slice"
            assert end <= self._context_max, f"step {plan.step_id}: a slice beyond the context"
            assert len(piece.blocks) >= used, f"step {plan.step_id}: a block table that is too short"
            assert min(piece.tokens) >= 0 and max(piece.tokens) < self._vocab_size, "a token beyond the vocabulary"
            assert min(piece.blocks) >= 0 and max(piece.blocks) < self._blocks_max, "a block beyond the pool"
            assert 0 <= piece.drafts < len(piece.tokens) and (piece.sample or not piece.drafts), "drafts beside a slice"
            writes = piece.blocks[piece.start // self._block_slots : used]
            assert written.isdisjoint(writes) and len(set(writes)) == len(writes), "a block written twice"
            written.update(writes)
            sequences.add(piece.sequence)
        assert len(sequences) == len(plan.slices), f"step {plan.step_id}: a sequence appears twice"
