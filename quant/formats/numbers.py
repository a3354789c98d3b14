"""
Rounding to each number format, from nothing but the numbers themselves; all in float32.

    int8    symmetric, the largest value becomes 127     integers in groups   a scale, and maybe a zero, for each group
    fp8     e4m3, the largest value becomes 448          rows                 activations, token by token

Weights are [out, in].  What depends on activations (GPTQ, SmoothQuant) is built on these, elsewhere.
"""

import torch
from torch import Tensor

from quant.formats.errors import ModelError
from quant.formats.scheme import Granularity
from quant.formats.weights import Affine, Fp8

INT8_MAX = 127  # and its negative: -128 has no opposite, so symmetric int8 leaves it out
FP8_MAX = 448.0  # the largest e4m3; beyond it lies NaN, there is no infinity
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # what other loaders take
_DEAD = torch.finfo(torch.float32).eps  # the scale of a row of zeros, as compressed-tensors has it: never 0
_TINY = torch.finfo(torch.float32).tiny  # keeps a scale from vanishing under subnormal weights
_DEAD_GROUP = 2.0**-14  # the same for scales that are stored as float16: its smallest normal number
_HALF_MAX = torch.finfo(torch.float16).max


def round_int8(weight: Tensor, granularity: Granularity, group_size: int = -1) -> Affine:
    """The nearest symmetric int8; one scale for the tensor, each row or each group.  Codes are -127..127."""
    values = weight.float()
    out, columns = values.shape
    groups = groups_of(columns, group_size) if granularity == "group" else 1
    blocks = values.reshape(out, groups, columns // groups)
    largest = values.abs().amax().expand(out, 1) if granularity == "tensor" else blocks.abs().amax(2)
    scale = _scale(largest, INT8_MAX)
    codes = (blocks / scale[:, :, None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return Affine(codes.reshape(out, columns), scale, None, None, 8)


def round_fp8(weight: Tensor, granularity: Granularity) -> Fp8:
    """The nearest e4m3; one scale for the tensor or each row.  Finite weights never become NaN.  Raises ModelError."""
    if granularity == "group":
        raise ModelError("fp8 has no scales for groups of columns: take granularity channel or tensor")
    values = weight.float()
    largest = values.abs().amax().reshape(1, 1) if granularity == "tensor" else values.abs().amax(1, keepdim=True)
    scale = _scale(largest, FP8_MAX)
    # Clamped first: older torch turns what is beyond 448 into NaN, and the quotient may lie an ulp beyond.
    return Fp8((values / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale)


def round_groups(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> Affine:
    """The nearest integers, group by group: the baseline that GPTQ must beat.  Raises ModelError."""
    out, columns = weight.shape
    groups = groups_of(columns, group_size)
    blocks = weight.float().reshape(out * groups, columns // groups)
    scale, zero = group_grid(blocks, bits, symmetric)
    codes = round_to_grid(blocks, scale, zero, bits).reshape(out, columns)
    zeros = None if zero is None else zero.reshape(out, groups)
    return Affine(codes, scale.reshape(out, groups), zeros, None, bits)


def group_grid(weight: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """
    The grid of one group: the smallest on which no weight is off by more than half a step.  It always includes 0.

    Scales are float16 numbers, rounded up to the next, so that GPTQ's files hold them exactly.  Beyond 65504 they
    saturate.  A zero point is on the scale of the signed codes and never the lowest one, which GPTQ's first layout
    cannot store: -7..7 of 4 bits, -127..127 of 8.

    Args:
        weight: [out, columns], finite
    Returns:
        scale float32 [out], and zero int16 [out], or None if symmetric
    """
    values = weight.float()
    high, low = values.amax(1).clamp_min(0), values.amin(1).clamp_max(0)
    middle, levels = 2 ** (bits - 1), 2**bits - 1
    dead = (high == 0) & (low == 0)
    if symmetric:
        # Codes reach from -middle to middle - 1, and half a step farther.
        widest = torch.maximum(high / (middle - 0.5), -low / (middle + 0.5))
        return _half_up(widest.masked_fill(dead, _DEAD_GROUP)), None
    scale = _half_up(((high - low) / levels).masked_fill(dead, _DEAD_GROUP))
    zero = (-low / scale).round()
    lifted = (zero < 1) & ~dead  # no negative weights worth a step: 0 moves to the second code, and costs one
    scale = torch.where(lifted, torch.maximum(scale, _half_up(high / (levels - 1))), scale)
    zero = zero.clamp(1, levels).masked_fill(dead, middle)
    return scale, (zero - middle).to(torch.int16)


def round_to_grid(weight: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """The nearest codes, int8 [out, columns], of a [out, columns] weight on a grid of `group_grid`; clamped."""
    steps = (weight.float() / scale[:, None]).round()
    if zero is not None:
        steps = steps + zero.float()[:, None]
    middle = 2 ** (bits - 1)
    return steps.clamp(-middle, middle - 1).to(torch.int8)


def round_rows_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """
    Activations, token by token: int8 [rows, in] and float32 scale [rows, 1].  A row of zeros has the scale 0.

    A row with NaN or infinities has such a scale, so that every product with it is NaN or infinite and gets noticed.
    """
    values = rows.float()
    scale = values.abs().amax(1, keepdim=True) / INT8_MAX
    steps = (values / torch.where(scale > 0, scale, 1.0)).nan_to_num(0.0, 0.0, 0.0)
    return steps.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def round_rows_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same in e4m3: float8_e4m3fn [rows, in] and float32 scale [rows, 1]."""
    values = rows.float()
    scale = values.abs().amax(1, keepdim=True) / FP8_MAX
    quotients = values / torch.where(scale > 0, scale, 1.0)
    return quotients.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def groups_of(columns: int, group_size: int) -> int:
    """How many groups of `group_size` (-1: all) `columns` are.  Raises ModelError, naming sizes that fit."""
    if group_size == -1:
        return 1
    if group_size < 1 or columns % group_size:
        fitting = [str(size) for size in GROUP_SIZES if columns % size == 0]
        sizes = ", ".join([*fitting, "-1 (one group)"])
        raise ModelError(f"groups of {group_size} do not divide {columns} input columns: sizes that fit are {sizes}")
    return columns // group_size


def _scale(largest: Tensor, steps: float) -> Tensor:
    """`largest` over `steps`, never 0.  What is no number stays none, so that a broken weight gets noticed."""
    return torch.where(largest == 0, _DEAD, (largest / steps).clamp_min(_TINY)).contiguous()


def _half_up(scale: Tensor) -> Tensor:
    """The next float16 at or above a positive `scale`, as float32.  Above the largest float16: that."""
    wanted = scale.clamp_max(_HALF_MAX)
    half = wanted.half()
    below = half.float() < wanted
    return (half.view(torch.int16) + below.to(torch.int16)).view(torch.float16).float()
