"""
SmoothQuant's foldings: the function stays, the error falls.
"""

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quant.formats.architecture import Architecture, Rope
from quant.formats.numbers import round_int8, round_rows_int8
from quant.forward import LINEARS, STAGES, LayerForward, Stage, layer_shapes, plain
from quant.smooth import Inputs, choose, factors_of, fold, refine, search, smooth_layer

LLAMA = Architecture(
    family="llama",
    layers=1,
    hidden=96,
    intermediate=160,
    heads=6,
    kv_heads=2,
    head_dim=16,
    vocab_size=10,
    context_max=64,
    norm_epsilon=1e-5,
    rope=Rope(),
    windows=(0,),
)
MODELS: dict[str, Architecture] = {
    "llama": LLAMA,
    "llama_biases": msgspec.structs.replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True),
    "mistral": msgspec.structs.replace(LLAMA, family="mistral", windows=(5,)),
    "qwen2": msgspec.structs.replace(LLAMA, family="qwen2", qkv_bias=True, kv_heads=6),
    "qwen3": msgspec.structs.replace(LLAMA, family="qwen3", qk_norm=True, head_dim=32),
}


def weights_of(a: Architecture) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(6)
    weights = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in layer_shapes(a).items()}
    for name, tensor in weights.items():
        if "norm" in name:
            tensor.add_(1)
            weights[name] = tensor.bfloat16().float()  # as it is stored
    return weights


def inputs_of(a: Architecture) -> Tensor:
    """Hidden states with a few large channels."""
    x = torch.randn(3, 20, a.hidden, generator=torch.Generator().manual_seed(7))
    x[..., ::17] *= 30
    return x


def stage_inputs(a: Architecture, weights: dict[str, Tensor]) -> dict[Stage, Tensor]:
    layer, x = LayerForward(a, 0), inputs_of(a)
    z = layer.begin(x, weights)
    found: dict[Stage, Tensor] = {}
    for stage in STAGES:
        found[stage] = z.flatten(0, 1)
        x, z = layer.advance(stage, x, z, weights, plain(weights))
    return found


def inputs_to(z: Tensor) -> Inputs:
    return Inputs([z], torch.device("cpu"))


def rounded(inputs: Tensor, weight: Tensor) -> Tensor:
    """W8A8, per token and per channel."""
    codes, scale = round_rows_int8(inputs)
    return F.linear(codes.float() * scale, round_int8(weight, "channel").dense(torch.float32))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_folding_leaves_the_function(model: str, stage: Stage) -> None:
    a = MODELS[model]
    weights, x = weights_of(a), inputs_of(a)
    columns = weights[f"{LINEARS[stage][0]}.weight"].shape[1]
    factors = torch.exp(torch.randn(columns, generator=torch.Generator().manual_seed(9)))
    if stage == "o":
        factors = factors.view(a.kv_heads, -1, a.head_dim)[:, :1].expand(-1, a.heads // a.kv_heads, -1).flatten()
    folded = fold(weights, stage, factors, a, torch.bfloat16)
    layer = LayerForward(a, 0)
    torch.testing.assert_close(layer.whole(x, folded), layer.whole(x, weights), rtol=1e-4, atol=1e-4)
    # Norms keep the function although they are rounded to what is stored; something did move.
    for name, tensor in folded.items():
        assert "norm" not in name or torch.equal(tensor, tensor.bfloat16().float())
    before, after = stage_inputs(a, weights)[stage], stage_inputs(a, folded)[stage]
    torch.testing.assert_close(after * factors, before, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("model", MODELS)
def test_all_foldings_together(model: str, alpha: float | None) -> None:
    a = MODELS[model]
    weights, x = weights_of(a), inputs_of(a)
    inputs = {stage: inputs_to(z) for stage, z in stage_inputs(a, weights).items()}
    folded = smooth_layer(weights, inputs, a, torch.bfloat16, alpha=alpha, product=rounded, integers=True)
    assert any(not torch.equal(folded[name], weights[name]) for name in weights)
    layer = LayerForward(a, 0)
    torch.testing.assert_close(layer.whole(x, folded), layer.whole(x, weights), rtol=1e-4, atol=1e-3)


def test_a_norm_of_zero_stays() -> None:
    """A channel whose norm weight is 0 carries nothing: no factor may turn it into NaN."""
    weights = weights_of(LLAMA)
    weights["input_layernorm.weight"][3] = 0
    folded = fold(weights, "qkv", torch.full((96,), 8.0), LLAMA, torch.bfloat16)
    assert all(torch.isfinite(tensor).all() for tensor in folded.values())
    layer, x = LayerForward(LLAMA, 0), inputs_of(LLAMA)
    torch.testing.assert_close(layer.whole(x, folded), layer.whole(x, weights), rtol=1e-4, atol=1e-4)


def error_of(factors: Tensor, weight: Tensor, inputs: Tensor) -> float:
    expected = F.linear(inputs, weight)
    return float((rounded(inputs / factors, weight * factors) - expected).norm() / expected.norm())


@pytest.mark.parametrize("stage", STAGES)
def test_search_pays_where_channels_are_large(stage: Stage) -> None:
    weights = weights_of(LLAMA)
    inputs = stage_inputs(LLAMA, weights)[stage]
    inputs[:, ::17] *= 20  # of all stages
    weight = torch.cat([weights[f"{name}.weight"] for name in LINEARS[stage]])
    plainly = error_of(torch.ones(inputs.shape[1]), weight, inputs)
    by_alpha = search(weights, stage, inputs_to(inputs), LLAMA, rounded, integers=False)
    refined = search(weights, stage, inputs_to(inputs), LLAMA, rounded, integers=True)
    assert error_of(by_alpha, weight, inputs) < (0.8 if stage != "o" else 1) * plainly
    assert error_of(refined, weight, inputs) < 1.02 * error_of(by_alpha, weight, inputs)


def test_refining_descends_on_the_error_itself() -> None:
    """From no smoothing at all; the estimate that it follows has to be one of the real error."""
    weights = weights_of(LLAMA)
    inputs = stage_inputs(LLAMA, weights)["qkv"]
    weight = torch.cat([weights[f"{name}.weight"] for name in LINEARS["qkv"]])
    ones = torch.ones(96)
    found = refine(ones, weight, inputs, "qkv", LLAMA)
    assert not found.requires_grad
    assert error_of(found, weight, inputs) < 0.7 * error_of(ones, weight, inputs)


def test_search_leaves_alone_what_is_even() -> None:
    """Inputs of one size and weights without error: nothing is better than nothing."""
    weights = weights_of(LLAMA)
    inputs = torch.sign(torch.randn(64, 160, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(search(weights, "down", inputs_to(inputs), LLAMA, F.linear, integers=False), torch.ones(160))


def test_factors() -> None:
    weight = torch.tensor([[2.0, 1.0, 0.0, 1.0], [-8.0, 0.5, 0.0, 1.0]])
    largest = torch.tensor([4.0, 1.0, 5.0, 0.0])
    factors = factors_of(weight, largest, 0.5)
    assert factors[2] == factors[3] == 1  # that nothing reads, and that is always zero
    torch.testing.assert_close(factors[0] / factors[1], torch.tensor((4 / 8) ** 0.5))
    torch.testing.assert_close(factors[0] * factors[1], torch.tensor(1.0))


def test_factors_of_heads_are_shared() -> None:
    weight = torch.randn(96, 96, generator=torch.Generator().manual_seed(2))
    found = choose(weight, "o", torch.rand(96, generator=torch.Generator().manual_seed(3)) + 0.1, 0.5, LLAMA)
    heads = found.view(2, 3, 16)
    assert torch.equal(heads, heads[:, :1].expand(-1, 3, -1))
    assert heads[0, 0].std() > 0
