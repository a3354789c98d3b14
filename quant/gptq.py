"""
GPTQ (Frantar et al. 2022): round a linear layer column by column, each time moving what was lost to the columns left.

The loss is that of the layer's output on the calibration inputs X, tr((Q - W) H (Q - W)^T) with H = X^T X.  Columns are
taken in the order of descending diag(H), so that the ones that matter most still have all others to make up for them.
Groups keep their consecutive columns meanwhile ("static groups"): files need no `g_idx` and every loader can read them.
With `desc_act` groups are formed in that order too, which few loaders take.
"""

import torch
from torch import Tensor

from quant.formats.numbers import group_grid, groups_of, round_to_grid
from quant.formats.weights import Affine

BLOCK = 128  # columns whose updates are gathered before the others see them
_SHRINKS = tuple(1 - step / 40 for step in range(23))  # of the widest grid, tried for each group


class Hessian:
    """X^T X of all calibration inputs of a linear layer, added up a batch at a time."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.total = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self.tokens = 0

    def add(self, inputs: Tensor) -> None:
        """inputs: [..., columns]"""
        rows = inputs.reshape(-1, inputs.shape[-1]).to(self.total.device, torch.float32)
        self.total.addmm_(rows.t(), rows)
        self.tokens += rows.shape[0]

    def error(self, difference: Tensor) -> Tensor:
        """The squared error of each output channel if the weight is off by `difference` [out, columns]: [out]."""
        return ((difference @ self.total) * difference).sum(1)


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
    groups = groups_of(columns, group_size)
    width = columns // groups
    importance = hessian.diagonal().clamp_min(0)
    order = torch.argsort(importance, descending=True, stable=True)
    group_of = torch.arange(columns, device=weight.device) // width
    if desc_act:
        group_of = group_of[torch.argsort(order)]
    factor = _factor(hessian[order][:, order], damp)
    rows = weight.float()[:, order].t().contiguous()  # [columns, out]: a column of the weight lies together
    grids = None if desc_act else _grids(weight.float(), importance, groups, bits, symmetric)
    codes, scale, zero = _sweep(rows, factor, group_of[order], grids, importance[order], bits, symmetric)
    restored = torch.empty_like(codes)
    restored[order] = codes
    columns_of_groups = group_of.int() if desc_act and groups > 1 else None
    return Affine(restored.t().contiguous(), scale, zero, columns_of_groups, bits)


def search_grid(weight: Tensor, importance: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """
    The grid with the least squared error, columns weighing by `importance`: a narrower one may pay for what it clips.

    Args:
        weight: [rows, columns], a group each
        importance: [rows, columns] or broadcastable
    Returns:
        as `group_grid`
    """
    best_scale, best_zero = group_grid(weight, bits, symmetric)
    least = torch.full_like(best_scale, torch.inf)
    for shrink in _SHRINKS:
        scale, zero = group_grid(weight * shrink, bits, symmetric)
        off = _on_grid(weight, scale, zero, bits)[1] - weight
        error = (off.square() * importance).sum(1)
        better = error < least
        least = torch.where(better, error, least)
        best_scale = torch.where(better, scale, best_scale)
        if best_zero is not None and zero is not None:
            best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _grids(weight: Tensor, importance: Tensor, groups: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Grids of all groups of consecutive columns: [out, groups]."""
    out = weight.shape[0]
    weigh = importance.view(1, groups, -1).expand(out, -1, -1).reshape(out * groups, -1)
    scale, zero = search_grid(weight.reshape(out * groups, -1), _positive(weigh), bits, symmetric)
    return scale.view(out, groups), None if zero is None else zero.view(out, groups)


def _positive(importance: Tensor) -> Tensor:
    """Columns that no input touched still count a little: another text may touch them."""
    return importance + importance.mean().clamp_min(torch.finfo(torch.float32).tiny) * 1e-3


def _factor(hessian: Tensor, damp: float) -> Tensor:
    """
    The upper Cholesky factor of the damped inverse Hessian, float32.

    Row i holds how the columns after i make up for an error in column i, once those before i are settled.
    """
    damped = hessian.double()
    mean = damped.diagonal().mean()
    if not mean > 0:
        return torch.eye(len(hessian), device=hessian.device)
    step = max(damp, 1e-6) * mean
    while True:  # ends: with enough on the diagonal every matrix is definite
        damped.diagonal().add_(step)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                factor: Tensor = upper.float()
                return factor
        step *= 10


def _sweep(
    rows: Tensor,
    factor: Tensor,
    group_of: Tensor,
    grids: tuple[Tensor, Tensor | None] | None,
    importance: Tensor,
    bits: int,
    symmetric: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """
    Round all columns in their order; `rows` [columns, out] is used up.

    Without `grids` columns of a group follow each other, and its grid is found when its first one is reached: from
    weights that have taken up the errors so far.
    """
    columns, out = rows.shape
    codes = torch.empty(columns, out, dtype=torch.int8, device=rows.device)
    groups = int(group_of.max()) + 1
    width = columns // groups
    if grids is None:
        scale = torch.empty(out, groups, device=rows.device)
        zero = None if symmetric else torch.empty(out, groups, dtype=torch.int16, device=rows.device)
    else:
        scale, zero = grids
    numbers = group_of.tolist()
    for start in range(0, columns, BLOCK):
        block = rows[start : start + BLOCK]
        end = start + len(block)
        errors = torch.empty_like(block)
        for i in range(len(block)):
            column = start + i
            group = numbers[column]
            if grids is None and column % width == 0:
                # What this block has not yet told the columns behind it, they hear now.
                ahead = rows[column : column + width].clone()
                behind = max(end - column, 0)
                if behind < width:
                    ahead[behind:] -= factor[start:column, end : column + width].t() @ errors[:i]
                weigh = _positive(importance)[column : column + width]
                found, found_zero = search_grid(ahead.t().contiguous(), weigh, bits, symmetric)
                scale[:, group] = found
                if zero is not None and found_zero is not None:
                    zero[:, group] = found_zero
            settled = block[i]
            chosen, value = _on_grid(settled[:, None], scale[:, group], None if zero is None else zero[:, group], bits)
            codes[column] = chosen[:, 0]
            errors[i] = (settled - value[:, 0]) / factor[column, column]
            block[i + 1 :] -= factor[column, column + 1 : end, None] * errors[i]
        rows[end:] -= factor[start:end, end:].t() @ errors
    return codes, scale, zero


def _on_grid(weight: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """Codes, and what they stand for, [out, columns]."""
    codes = round_to_grid(weight, scale, zero, bits)
    steps = codes.float() if zero is None else codes.float() - zero.float()[:, None]
    return codes, steps * scale[:, None]
