"""
SmoothQuant (Xiao et al. 2022): divide a linear layer's inputs by a factor for each channel, and multiply its columns.

A few input channels of a language model are far larger than the others, and a token that is rounded with one scale
loses the small ones.  The factors move some of that size into the weights.  Four foldings leave the function of our
architectures as it is, and need no new tensor in the file:

    stage     inputs are divided in                              why that is exact
    qkv       the weight of the input norm                       the norm's output is multiplied by it
    gate_up   the weight of the norm behind attention            the same
    o         the rows (and bias) of v_proj                      attention averages values, channel by channel
    down      the rows (and bias) of up_proj                     silu(gate) * up is linear in up
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quant.formats.architecture import Architecture
from quant.forward import LINEARS, Stage, Weights

Product = Callable[[Tensor, Tensor], Tensor]
"""(inputs [rows, in], weight [out, in]) -> outputs [rows, out] as the quantized layer would give them."""

ALPHAS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FOLD_ORDER: tuple[Stage, ...] = ("o", "down", "qkv", "gate_up")  # rows of v and up are settled before their columns
NORM_STAGES: tuple[Stage, ...] = ("qkv", "gate_up")
_NORMS: dict[Stage, str] = {"qkv": "input_layernorm.weight", "gate_up": "post_attention_layernorm.weight"}
_SOURCES: dict[Stage, str] = {"o": "self_attn.v_proj", "down": "mlp.up_proj"}
_FACTOR_MAX = 2.0**10
_STEPS, _STEP = 60, 0.03  # of the descent
SAMPLE_ROWS = 512  # of tokens, and of weights, that a search looks at


class Inputs:
    """What smoothing needs to know of the inputs of one stage."""

    def __init__(self, batches: list[Tensor], device: torch.device) -> None:
        """batches: [..., in]"""
        self.largest = torch.stack([batch.abs().flatten(0, -2).amax(0) for batch in batches]).amax(0).to(device)
        tokens = sum(batch[..., 0].numel() for batch in batches)
        step = -(-tokens // SAMPLE_ROWS)
        self.sample = torch.cat([batch.flatten(0, -2)[::step] for batch in batches]).to(device)


def smooth_layer(
    weights: Weights,
    inputs: dict[Stage, Inputs],
    a: Architecture,
    dtype: torch.dtype,
    *,
    alpha: float | None,
    product: Product,
    integers: bool,
) -> Weights:
    """The layer with the inputs of the stages in `inputs` smoothed: by `alpha`, or as `search` finds best (None)."""
    for stage in FOLD_ORDER:
        if stage not in inputs:
            continue
        if alpha is None:
            factors = search(weights, stage, inputs[stage], a, product, integers=integers)
        else:
            factors = choose(_weight(weights, stage), stage, inputs[stage].largest, alpha, a)
        weights = fold(weights, stage, factors, a, dtype)
    return weights


def fold(weights: Weights, stage: Stage, factors: Tensor, a: Architecture, dtype: torch.dtype) -> dict[str, Tensor]:
    """
    The layer with the inputs of `stage` divided by `factors` [in], and the same function.

    A norm is stored as `dtype`; the factors give way a little, so that it is rounded before and not after the columns.
    For `o`, factors of query heads that read the same key/value head must be equal.
    """
    folded = dict(weights)
    if stage in _NORMS:
        old = weights[_NORMS[stage]]
        new = (old / factors).to(dtype).float()
        usable = (new != 0) & new.isfinite()
        folded[_NORMS[stage]] = torch.where(usable, new, old)
        factors = torch.where(usable, old / new, 1.0)
    else:
        source = _SOURCES[stage]
        of_rows = factors if stage == "down" else _heads(factors, a)[:, 0].flatten()
        folded[f"{source}.weight"] = weights[f"{source}.weight"] / of_rows[:, None]
        if f"{source}.bias" in weights:
            folded[f"{source}.bias"] = weights[f"{source}.bias"] / of_rows
    for name in LINEARS[stage]:
        folded[f"{name}.weight"] = weights[f"{name}.weight"] * factors
    return folded


def factors_of(weight: Tensor, largest: Tensor, alpha: float) -> Tensor:
    """
    What divides each input channel: largest|x| ** alpha / largest|w| ** (1 - alpha), by the geometric mean of all.

    Channels that are always zero, or that no weight reads, keep 1.
    """
    columns = weight.abs().amax(0)
    alive = (largest > 0) & (columns > 0)
    logs = alpha * largest.clamp_min(1e-30).log() - (1 - alpha) * columns.clamp_min(1e-30).log()
    if not alive.any():
        return torch.ones_like(largest)
    logs = torch.where(alive, logs - logs[alive].mean(), 0.0)
    return logs.exp().clamp(1 / _FACTOR_MAX, _FACTOR_MAX)


def search(
    weights: Weights, stage: Stage, inputs: Inputs, a: Architecture, product: Product, *, integers: bool
) -> Tensor:
    """
    The factors with the least error of the outputs: all ones, those of some alpha, or for integers those refined.

    Args:
        integers: activations are rounded in even steps, which `refine` reckons with
    """
    weight = _weight(weights, stage)
    sample = inputs.sample
    expected = F.linear(sample, weight)

    def loss_of(factors: Tensor) -> float:
        """The mean over tokens of each one's relative squared error: a few huge tokens must not decide alone."""
        found = product(sample / factors, weight * factors)
        return float(((found - expected).square().sum(1) / _energy(expected)).mean())

    tried = [choose(weight, stage, inputs.largest, alpha, a) for alpha in ALPHAS]
    best = min((torch.ones_like(inputs.largest), *tried), key=loss_of)
    if not integers:
        return best
    return min((best, refine(best, weight, sample, stage, a)), key=loss_of)


def refine(factors: Tensor, weight: Tensor, inputs: Tensor, stage: Stage, a: Architecture) -> Tensor:
    """
    Descend from `factors` on the error that rounding is expected to make.

    Rounding to steps of d adds noise of variance d^2 / 12, d being the largest value over 127: of a token for its
    inputs, of an output channel for its weights.  So with inputs x / s and weights w s the output of a token is off by
        max|x / s|^2 sum|w s|^2  +  sum|x / s|^2 sum over channels of max|w s|^2
    up to a constant, and that has a gradient in s.
    """
    sizes, squares, energy = inputs.abs(), inputs.square(), _energy(F.linear(inputs, weight))
    columns = weight.square().sum(0)
    stride = -(-len(weight) // SAMPLE_ROWS)
    some, share = weight[::stride].abs(), len(weight) / len(weight[::stride])
    with torch.enable_grad():
        logs = factors.log().requires_grad_()
        descent = torch.optim.Adam([logs], lr=_STEP)
        for _ in range(_STEPS):
            scale = _usable(logs, stage, a).exp()
            of_inputs = (sizes / scale).amax(1).square() * (columns @ scale.square())
            of_weights = (squares @ scale.square().reciprocal()) * (some * scale).amax(1).square().sum() * share
            loss = ((of_inputs + of_weights) / energy).mean().log()
            descent.zero_grad()
            loss.backward()
            descent.step()
        return _usable(logs, stage, a).exp().detach()


def choose(weight: Tensor, stage: Stage, largest: Tensor, alpha: float, a: Architecture) -> Tensor:
    """The factors for one alpha that the stage can have."""
    return _usable(factors_of(weight, largest, alpha).log(), stage, a).exp()


def _usable(logs: Tensor, stage: Stage, a: Architecture) -> Tensor:
    """Logarithms of factors as the stage can have them: one for all query heads of a key/value head, their mean."""
    if stage != "o":
        return logs
    heads = _heads(logs, a)
    return heads.mean(1, keepdim=True).expand_as(heads).flatten()


def _weight(weights: Weights, stage: Stage) -> Tensor:
    return torch.cat([weights[f"{name}.weight"] for name in LINEARS[stage]])


def _energy(outputs: Tensor) -> Tensor:
    """Of each token; never 0."""
    return outputs.square().sum(1) + torch.finfo(torch.float32).tiny


def _heads(channels: Tensor, a: Architecture) -> Tensor:
    """[query_size] -> [kv_heads, query heads of each, head_dim]"""
    return channels.view(a.kv_heads, -1, a.head_dim)
