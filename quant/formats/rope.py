"""
Rotary positions: the frequencies of each scheme, in the float32 steps in which transformers computes them.
"""

import math

import torch
from torch import Tensor

from quant.formats.architecture import Rope


class RopeTable:
    """
    Cosines and sines of every position, laid out for the half-rotation form: (first half, second half).

    A table and not a function of the step: vectorized sines differ in the last bit between the body and the tail of a
    tensor, so a row's angle would depend on how many neighbours it has.
    """

    def __init__(self, rope: Rope, *, head_dim: int, context_max: int) -> None:
        inverse, scale = frequencies(rope, head_dim)
        angles = torch.arange(context_max, dtype=torch.float32)[:, None] * inverse[None, :]
        self._cos, self._sin = angles.cos() * scale, angles.sin() * scale

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """
        Cosine and signed sine, float32 [rows, 1, head_dim], for positions [rows].

        The first half of the sine is negated, so that `x * cos + swap_halves(x) * sin` is the rotation.
        """
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)

    def halves(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position and pair, float32 [context_max, head_dim / 2]."""
        return self._cos.contiguous(), self._sin.contiguous()


def frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position, float32 [head_dim / 2], and the factor on cosine and sine."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / torch.pow(rope.theta, exponents)
    if rope.divisors:
        inverse = inverse / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inverse, head_dim)
    return inverse, 1.0


def _llama3(rope: Rope, inverse: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    context = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > context / low, inverse / rope.factor, inverse)
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = ~(wavelength < context / high) & ~(wavelength > context / low)
    return torch.where(between, blended, scaled)


def _yarn(rope: Rope, inverse: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate what turns seldom, keep what turns often, ramp between."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001  # no ramp of width zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return (inverse / rope.factor) * (1 - keep) + inverse * keep, _yarn_scale(rope)


def _yarn_scale(rope: Rope) -> float:
    """The factor on cosine and sine that makes up for longer sums."""

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
