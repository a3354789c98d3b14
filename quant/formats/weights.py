"""
A quantized weight in memory, whatever file it came from or goes to.

    Affine    integers with a scale for each output channel or group: int8, GPTQ, compressed-tensors' packed integers
    Fp8       e4m3 floats with a scale                    LlmInt8   bitsandbytes' 8-bit rows
    Nf4       bitsandbytes' 4-bit normal floats

A weight is [out, in]: out output channels, in input columns, as torch.nn.Linear has it.  `dense` gives the numbers that
it stands for; how they lie in a file is the business of `quant.formats.layouts`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Affine:
    """`W[o, c] = scale[o, g] * (codes[o, c] - zero[o, g])`, where column c belongs to group g."""

    codes: Tensor  # int8 [out, in]; of fewer than 8 bits too: -2 ** (bits - 1) .. 2 ** (bits - 1) - 1
    scale: Tensor  # float32 [out, groups]
    zero: Tensor | None  # int16 [out, groups], on the scale of `codes`; None: symmetric, all are 0
    columns: Tensor | None  # int32 [in]: the group of each column; None: consecutive columns, equally many each
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def groups(self) -> int:
        """Scales of one output channel."""
        return self.scale.shape[1]

    @property
    def column_groups(self) -> Tensor:
        """The group of each column, int64 [in]."""
        if self.columns is not None:
            return self.columns.long()
        columns = self.codes.shape[1]
        return torch.arange(columns) // -(-columns // self.groups)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The numbers it stands for, rounded once to `dtype`: scale and difference are exact in float32."""
        values = self.codes.float()
        if self.groups == 1:
            shifted = values if self.zero is None else values - self.zero.float()
            return (shifted * self.scale).to(dtype)
        of_column = self.column_groups
        if self.zero is not None:
            values = values - self.zero.float()[:, of_column]
        return (values * self.scale[:, of_column]).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8:
    """`W = values * scale`, values being e4m3 without infinities (Micikevicius et al. 2022, E4M3)."""

    values: Tensor  # float8_e4m3fn [out, in]
    scale: Tensor  # float32 [out, 1], or [1, 1] for the whole tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.values.shape[0], self.values.shape[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The numbers it stands for."""
        return (self.values.float() * self.scale).to(dtype)


@dataclass(frozen=True, slots=True)
class Nested:
    """The scales of Nf4's blocks, quantized themselves in blocks of 256 (QLoRA, 3, "double quantization")."""

    codes: Tensor  # uint8 [blocks]
    absmax: Tensor  # float32 [ceil(blocks / 256)]
    table: Tensor  # float32 [256]
    offset: float  # the mean of the scales, taken off before and added after

    def dense(self) -> Tensor:
        """The scales, float32 [blocks].  One of a block of zeros may come out slightly below 0."""
        of_block = torch.arange(self.codes.numel(), device=self.codes.device) // NESTED_BLOCK
        return self.table[self.codes.long()] * self.absmax[of_block] + self.offset


@dataclass(frozen=True, slots=True)
class Nf4:
    """Blocks of 64 values of the flattened weight, each a code into `table` times the block's largest (QLoRA, 3)."""

    codes: Tensor  # uint8 [out * in / 2]: the high half is the earlier value
    absmax: Tensor  # float32 [ceil(out * in / 64)]
    table: Tensor  # float32 [16]
    shape: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16  # of the weight that it was made from; files say it, and give it back so
    nested: Nested | None = None  # what `absmax` comes from, if the file has it quantized: to be written as it was read

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The numbers it stands for, multiplied in float32 and rounded once."""
        halves = torch.stack((self.codes >> 4, self.codes & 15), -1).reshape(-1)
        values = self.table[halves.long()]
        blocks = torch.arange(values.numel()) // NF4_BLOCK
        return (values * self.absmax[blocks]).to(dtype).reshape(self.shape)


NF4_BLOCK = 64
NESTED_BLOCK = 256


@dataclass(frozen=True, slots=True)
class LlmInt8:
    """`W = codes * absmax / 127` (LLM.int8, Dettmers et al. 2022, 2.1: row-wise absmax)."""

    codes: Tensor  # int8 [out, in]
    absmax: Tensor  # float32 [out]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.codes.shape[0], self.codes.shape[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The numbers it stands for."""
        return (self.codes.float() * self.absmax[:, None] / 127).to(dtype)


Quantized = Affine | Fp8 | Nf4 | LlmInt8


def stack(weights: Sequence[Quantized]) -> Quantized | None:
    """Weights of the same input, one below the other.  None if no common form holds them exactly as they are."""
    affine = [weight for weight in weights if isinstance(weight, Affine)]
    if len(affine) == len(weights):
        return _stack_affine(affine)
    fp8 = [weight for weight in weights if isinstance(weight, Fp8)]
    if len(fp8) == len(weights):
        scales = [weight.scale.expand(weight.shape[0], 1) for weight in fp8]
        return Fp8(torch.cat([weight.values for weight in fp8]), torch.cat(scales))
    return None


def _stack_affine(weights: Sequence[Affine]) -> Affine | None:
    first = weights[0]
    for weight in weights:
        if (weight.bits, weight.groups) != (first.bits, first.groups):
            return None
        if not torch.equal(weight.column_groups, first.column_groups):
            return None
    zero = None
    if any(weight.zero is not None for weight in weights):
        none = torch.zeros(1, dtype=torch.int16)
        zeros = [none.expand_as(weight.scale) if weight.zero is None else weight.zero for weight in weights]
        zero = torch.cat(zeros)
    scale = torch.cat([weight.scale for weight in weights])
    return Affine(torch.cat([weight.codes for weight in weights]), scale, zero, first.columns, first.bits)


def cut(weight: Tensor | Quantized, rows: slice, columns: slice) -> Tensor | Quantized:
    """
    Part of a weight, contiguous, with the same numbers: what `dense` gives is that part of what it gave.

    Groups that straddle an end of `columns` keep their scale for what is left of them.
    """
    if isinstance(weight, Tensor):
        return weight[rows, columns].contiguous()
    if isinstance(weight, Affine):
        return _cut_affine(weight, rows, columns)
    if isinstance(weight, Fp8):
        scale = weight.scale if weight.scale.shape[0] == 1 else weight.scale[rows]
        return Fp8(weight.values[rows, columns].contiguous(), scale.contiguous())
    if isinstance(weight, LlmInt8):
        return LlmInt8(weight.codes[rows, columns].contiguous(), weight.absmax[rows].contiguous())
    return weight.dense(weight.dtype)[rows, columns].contiguous()  # its blocks run on from row to row


SMALL_GROUP = 32  # columns; groups below it are better told apart by their numbers, as no kernel knows them


def _cut_affine(weight: Affine, rows: slice, columns: slice) -> Affine:
    codes = weight.codes[rows, columns].contiguous()
    scale, zero, of_column = weight.scale[rows], None if weight.zero is None else weight.zero[rows], None
    if weight.groups > 1:
        start, stop, _ = columns.indices(weight.shape[1])
        size, odd = divmod(weight.shape[1], weight.groups)
        common = math.gcd(size, start, stop - start)
        if weight.columns is None and not odd and common >= min(size, SMALL_GROUP):
            used = torch.arange(start, stop, common) // size  # finer groups, several with one scale
        else:
            groups = weight.column_groups[columns]
            used = torch.unique(groups)
            of_column = torch.searchsorted(used, groups).int()
        scale = scale[:, used]
        zero = None if zero is None else zero[:, used]
        if len(used) == 1:
            of_column = None
    return Affine(codes, scale.contiguous(), None if zero is None else zero.contiguous(), of_column, weight.bits)
