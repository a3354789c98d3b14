"""
The paged cache: keys and values of every layer, in blocks of `block_slots` tokens.

Each layer is [blocks, block_slots, 2, kv_heads, head_dim]: keys and values of a token lie together as they leave the
fused projection, so a step writes them with one copy, and a block is one contiguous piece to gather.

    float  in the dtype of the activations
    int8   codes -127 .. 127, and one float32 scale for each (token, key or value, head)
    fp8    e4m3, with the same scales

A token is rounded when it is written and by itself, so what a sequence reads does not depend on its neighbours.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.device.errors import MemoryShort
from quant.formats.architecture import Architecture
from quant.formats.numbers import round_rows_fp8, round_rows_int8

BLOCK_SLOTS = 16
KV_DTYPES = ("auto", "int8", "fp8")
_SCALE_BYTES = torch.float32.itemsize
_FP8_BITS = -0x7810  # 0x87f0 as int16: sign, and exponent and mantissa after a shift by 4


class KvLayer(Protocol):
    """The cache of one layer.  Slot `s` is the token `s % BLOCK_SLOTS` of block `s // BLOCK_SLOTS`."""

    head_dim: int

    def write(self, slots: Tensor, pairs: Tensor) -> None:
        """Keep `pairs` [rows, 2 * kv_heads * head_dim] in `slots` [rows]."""
        ...

    def read(self, blocks: Tensor) -> Tensor:
        """[blocks, BLOCK_SLOTS, 2, kv_heads, head_dim], in the dtype of the activations."""
        ...


class KvCache:
    """Memory for all layers.  It starts as zeros: what is masked is multiplied by 0, and 0 * NaN would be NaN."""

    def __init__(
        self, architecture: Architecture, *, layers: int, blocks_max: int, dtype: torch.dtype, kv_dtype: str = "auto"
    ) -> None:
        assert blocks_max > 0 and layers > 0 and kv_dtype in KV_DTYPES
        self.blocks_max = blocks_max
        shape = (layers, blocks_max, BLOCK_SLOTS, 2, architecture.kv_heads, architecture.head_dim)
        rounds = kv_dtype != "auto"
        try:
            # Touched now, so that memory cannot run out later.
            values = torch.zeros(shape, dtype=torch.int8 if rounds else dtype)
            scales = torch.zeros(shape[:-1] if rounds else (0,), dtype=torch.float32)
        except RuntimeError as error:
            raise MemoryShort("the KV cache does not fit into memory: choose a smaller --kv-memory") from error
        # What holds the floats of a slot: in them a number that is none can be, and there it is scrubbed.
        self._all = (values, scales)
        self._floats: tuple[Tensor, ...] = (scales if rounds else values).unbind(0)
        self.layers: tuple[KvLayer, ...]
        if rounds:
            pairs = zip(values.unbind(0), scales.unbind(0), strict=True)
            self.layers = tuple(RoundedLayer(*pair, dtype=dtype, fp8=kv_dtype == "fp8") for pair in pairs)
        else:
            self.layers = tuple(FloatLayer(layer) for layer in values.unbind(0))

    def reset(self) -> None:
        """Forget everything."""
        with torch.inference_mode():
            for tensor in self._all:
                tensor.zero_()

    def scrub(self, blocks: Sequence[int]) -> None:
        """Replace what is no number in `blocks`, whose next owner would otherwise read it behind its mask."""
        index = torch.tensor(blocks)
        for layer in self._floats:
            layer[index] = torch.nan_to_num(layer[index], nan=0.0, posinf=0.0, neginf=0.0)


class FloatLayer:
    """Implements `KvLayer` as it comes."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.head_dim = values.shape[-1]
        self._rows = values.view(values.shape[0] * values.shape[1], -1)

    def write(self, slots: Tensor, pairs: Tensor) -> None:
        """One copy."""
        self._rows.index_copy_(0, slots, pairs)

    def read(self, blocks: Tensor) -> Tensor:
        """One gather."""
        return self.values.index_select(0, blocks)


class RoundedLayer:
    """Implements `KvLayer` in 8 bits and a scale for each head of a token."""

    def __init__(self, codes: Tensor, scales: Tensor, *, dtype: torch.dtype, fp8: bool) -> None:
        self.codes = codes
        self.scales = scales
        self.head_dim = codes.shape[-1]
        self._fp8 = fp8
        self._dtype = dtype
        slots = codes.shape[0] * codes.shape[1]
        self._code_rows, self._scale_rows = codes.view(slots, -1), scales.view(slots, -1)

    def write(self, slots: Tensor, pairs: Tensor) -> None:
        """Round each head by its own scale, then two copies."""
        codes, scales = (round_rows_fp8 if self._fp8 else round_rows_int8)(pairs.reshape(-1, self.head_dim))
        self._code_rows.index_copy_(0, slots, codes.view(torch.int8).view(len(slots), -1))
        self._scale_rows.index_copy_(0, slots, scales.view(len(slots), -1))

    def read(self, blocks: Tensor) -> Tensor:
        """Gather, multiply in float32, round once."""
        codes, scales = self.codes.index_select(0, blocks), self.scales.index_select(0, blocks)
        values = e4m3_values(codes) if self._fp8 else codes
        return (values.float() * scales.unsqueeze(-1)).to(self._dtype)


def e4m3_values(bits: Tensor) -> Tensor:
    """
    What e4m3 `bits`, held in int8, stand for, in bfloat16, which holds all of them.

    Exponent and mantissa are moved to bfloat16's place, and the difference of the exponents' biases, 127 - 7, is made
    up for by a product: three passes of vector instructions, where torch's own conversion looks at one value at a time.
    NaN is not kept: here it would be in the scale.
    """
    return ((bits.to(torch.int16) << 4) & _FP8_BITS).view(torch.bfloat16) * 2.0**120


def block_bytes(architecture: Architecture, dtype: torch.dtype, kv_dtype: str) -> int:
    """Memory of one block over all layers."""
    head_bytes = architecture.head_dim * dtype.itemsize
    if kv_dtype != "auto":
        head_bytes = architecture.head_dim + _SCALE_BYTES
    return architecture.layers * BLOCK_SLOTS * 2 * architecture.kv_heads * head_bytes
