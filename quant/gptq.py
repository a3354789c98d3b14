"""
GPTQ (Frantar et al. 2022): round a linear layer column by column, each time moving what was lost to the columns left.

The loss is that of the layer's output on the calibration inputs X, tr((Q - W) H (Q - W)^T) with H = X^T X.  Columns are
taken in the order of descending diag(H), so that the ones that matter most still have all others to make up for them.
Groups keep their consecutive columns meanwhile ("static groups"): files need no `g_idx` and every loader can read them.
With `desc_act` groups are formed in that order too, which few loaders take.

Nothing in it is about integers: e4m3 floats are rounded by the same sweep.
"""

from typing import Protocol

import torch
from torch import Tensor

from quant.formats.numbers import FP8_MAX, group_grid, groups_of
from quant.formats.weights import Affine, Fp8

BLOCK = 128  # columns whose updates are gathered before the others see them
_SHRINKS = tuple(1 - step / 25 for step in range(12))  # of the widest grid, tried for each group


class Hessian:
    """X^T X of all calibration inputs of a linear layer, added up a batch at a time."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.total = torch.zeros(columns, columns, dtype=torch.float32, device=device)

    def add(self, inputs: Tensor) -> None:
        """inputs: [..., columns]"""
        rows = inputs.reshape(-1, inputs.shape[-1]).to(self.total.device, torch.float32)
        self.total.addmm_(rows.t(), rows)


def solve(
    weight: Tensor,
    hessian: Tensor,
    *,
    bits: int,
    group_size: int,
    symmetric: bool = True,
    desc_act: bool = False,
    damp: float = 0.01,
) -> Affine:
    """
    The rounding of `weight` [out, columns] for inputs with X^T X = `hessian` [columns, columns].

    Inputs that are always zero round as plainly as they would without GPTQ; so does everything if there are none.
    Raises ModelError if groups of `group_size` do not divide the columns.
    """
    columns = weight.shape[1]
    width = columns // groups_of(columns, group_size)
    importance, order = _order(hessian)
    group_of = torch.arange(columns, device=weight.device) // width
    rows = weight.float().t()[order]
    grid = _IntegerGrid(bits, symmetric, group_of[order].tolist())
    if desc_act:  # a group is a block, so that its grid is found from weights that know of all errors before it
        group_of = group_of[torch.argsort(order)]
        grid = _IntegerGrid(bits, symmetric, torch.arange(columns).div(width, rounding_mode="floor").tolist())
        grid.importance = importance[order]
    else:
        for first in range(0, columns, width):
            group = slice(first, first + width)
            grid.find(weight[:, group].float(), importance[group])
    values = _sweep(rows, _factor(hessian[order][:, order], damp), grid, width if desc_act else BLOCK)
    return grid.affine(values[torch.argsort(order)].t(), group_of, listed=desc_act and width < columns)


def solve_fp8(weight: Tensor, scale: Tensor, hessian: Tensor, *, damp: float = 0.01) -> Fp8:
    """The same in e4m3, on scales [out, 1] that are given: with them nothing may lie far beyond 448."""
    _, order = _order(hessian)
    rows = weight.float().t()[order]
    values = _sweep(rows, _factor(hessian[order][:, order], damp), _E4m3Grid(scale[:, 0]), BLOCK)
    steps = values[torch.argsort(order)].t() / scale
    return Fp8(steps.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).contiguous(), scale)


def search_grid(weight: Tensor, importance: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """
    The grid with the least squared error, columns weighing by `importance`: a narrower one may pay for what it clips.

    Args:
        weight: [rows, columns], a group each
        importance: [columns]
    Returns:
        as `group_grid`
    """
    extremes = torch.stack((weight.amin(1), weight.amax(1)), 1)
    best_scale, best_zero = group_grid(extremes, bits, symmetric)
    least = torch.full_like(best_scale, torch.inf)
    for shrink in _SHRINKS:
        scale, zero = group_grid(extremes * shrink, bits, symmetric)
        off = _steps(weight, scale[:, None], None if zero is None else zero[:, None], bits).mul_(scale[:, None])
        error = off.sub_(weight).square_() @ importance
        better = error < least
        least = torch.where(better, error, least)
        best_scale = torch.where(better, scale, best_scale)
        if best_zero is not None and zero is not None:
            best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


class _Grid(Protocol):
    """What values a weight may take.  Columns are numbered in the order of the sweep."""

    def begin(self, start: int, block: Tensor) -> None:
        """The sweep has reached these columns, [columns, out] as they are by now."""
        ...

    def nearest(self, column: int, weight: Tensor) -> Tensor:
        """The values [out] nearest to `weight` [out]."""
        ...


class _IntegerGrid:
    """Integers with a scale, and maybe a zero, for each output channel and group."""

    def __init__(self, bits: int, symmetric: bool, group_of: list[int]) -> None:
        self.importance: Tensor | None = None  # of the columns, if groups are found as the sweep reaches them
        self._bits = bits
        self._symmetric = symmetric
        self._group_of = group_of
        self._scales: list[Tensor] = []  # [out], group by group
        self._zeros: list[Tensor | None] = []

    def find(self, weight: Tensor, importance: Tensor) -> None:
        """The grid of the next group, from its weights [out, columns]."""
        # Columns that no input touched still count a little: another text may touch them.
        floor = importance.mean().clamp_min(torch.finfo(torch.float32).tiny) * 1e-3
        scale, zero = search_grid(weight, importance + floor, self._bits, self._symmetric)
        self._scales.append(scale)
        self._zeros.append(zero)

    def begin(self, start: int, block: Tensor) -> None:
        if self.importance is not None:
            self.find(block.t().contiguous(), self.importance[start : start + len(block)])

    def nearest(self, column: int, weight: Tensor) -> Tensor:
        group = self._group_of[column]
        scale = self._scales[group]
        return _steps(weight, scale, self._zeros[group], self._bits).mul_(scale)

    def affine(self, values: Tensor, group_of: Tensor, *, listed: bool) -> Affine:
        """What `values` [out, columns] on this grid are in codes; `group_of` is by their columns."""
        scale = torch.stack(self._scales, 1)
        zeros = [zero for zero in self._zeros if zero is not None]
        zero = torch.stack(zeros, 1) if zeros else None
        steps = (values / scale[:, group_of]).round()
        codes = steps if zero is None else steps + zero[:, group_of]
        return Affine(codes.to(torch.int8), scale, zero, group_of.int() if listed else None, self._bits)


class _E4m3Grid:
    """e4m3 floats with a scale for each output channel."""

    def __init__(self, scale: Tensor) -> None:
        self._scale = scale

    def begin(self, start: int, block: Tensor) -> None:
        """The scales are there from the beginning."""

    def nearest(self, column: int, weight: Tensor) -> Tensor:
        steps = (weight / self._scale).clamp_(-FP8_MAX, FP8_MAX)
        return steps.to(torch.float8_e4m3fn).float().mul_(self._scale)


def _steps(weight: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """The nearest codes less the zero point, as floats."""
    middle = 2 ** (bits - 1)
    steps = (weight / scale).round_()
    if zero is None:
        return steps.clamp_(-middle, middle - 1)
    shift = zero.float()
    return steps.clamp_(-middle - shift, middle - 1 - shift)


def _order(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """How much each column matters, and the columns, those that matter most first."""
    importance = hessian.diagonal().clamp_min(0)
    return importance, torch.argsort(importance, descending=True, stable=True)


def _factor(hessian: Tensor, damp: float) -> Tensor:
    """
    The upper Cholesky factor of the damped inverse Hessian, float32.

    Row i holds how the columns after i make up for an error in column i, once those before i are settled.
    """
    damped = hessian.double()
    assert bool(torch.isfinite(damped).all()), "the caller refuses inputs that are not finite"
    mean = damped.diagonal().mean()
    if not mean > 0:
        return torch.eye(len(hessian), device=hessian.device)
    damped /= mean  # only ratios matter
    step = max(damp, 1e-6)
    while True:  # ends: with enough on the diagonal every matrix is definite
        damped.diagonal().add_(step)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                factor: Tensor = upper.float()
                return factor
        step *= 10


def _sweep(rows: Tensor, factor: Tensor, grid: _Grid, width: int) -> Tensor:
    """Round the columns of a weight, `rows` [columns, out], in their order, in blocks of `width`; it is used up."""
    values = torch.empty_like(rows)
    diagonal = factor.diagonal().tolist()
    for start in range(0, len(rows), width):
        block = rows[start : start + width]
        end = start + len(block)
        grid.begin(start, block)
        errors = torch.empty_like(block)
        for i in range(len(block)):
            values[start + i] = grid.nearest(start + i, block[i])
            torch.sub(block[i], values[start + i], out=errors[i]).div_(diagonal[start + i])
            block[i + 1 :].addr_(factor[start + i, start + i + 1 : end], errors[i], alpha=-1)
        rows[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
    return values
