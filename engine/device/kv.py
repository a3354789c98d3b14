"""
The paged cache: keys and values of every layer, in blocks of `block_slots` tokens.

Each layer is [blocks, block_slots, 2, kv_heads, head_dim]: keys and values of a token lie together as they leave the
fused projection, so a step writes them with one copy, and a block is one contiguous piece to gather.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.device.errors import MemoryShort
from quant.formats.architecture import Architecture

BLOCK_SLOTS = 16


class KvCache:
    """Memory for all layers.  It starts as zeros: what is masked is multiplied by 0, and 0 * NaN would be NaN."""

    def __init__(self, architecture: Architecture, *, layers: int, blocks_max: int, dtype: torch.dtype) -> None:
        assert blocks_max > 0 and layers > 0
        self.blocks_max = blocks_max
        shape = (layers, blocks_max, BLOCK_SLOTS, 2, architecture.kv_heads, architecture.head_dim)
        try:
            self._all = torch.zeros(shape, dtype=dtype)  # touched now, so that memory cannot run out later
        except RuntimeError as error:
            raise MemoryShort("the KV cache does not fit into memory: choose a smaller --kv-memory") from error
        self.layers: tuple[Tensor, ...] = self._all.unbind(0)

    def reset(self) -> None:
        """Forget everything."""
        with torch.inference_mode():
            self._all.zero_()

    def scrub(self, blocks: Sequence[int]) -> None:
        """Replace what is no number in `blocks`, whose next owner would otherwise read it behind its mask."""
        index = torch.tensor(blocks)
        for layer in self.layers:
            layer[index] = torch.nan_to_num(layer[index], nan=0.0, posinf=0.0, neginf=0.0)


def block_bytes(architecture: Architecture, dtype: torch.dtype) -> int:
    """Memory of one block over all layers."""
    return architecture.layers * BLOCK_SLOTS * 2 * architecture.kv_size * dtype.itemsize
