"""
Rotation: the same function, whatever the architecture and its sizes, and one that is easier to round.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.device.kernels import Kernels
from engine.device.kernels.reference import ReferenceKernels
from engine.device.kernels.torch_fast import TorchFastKernels
from engine.device.model import load_decoder
from engine.device.torch_model import assemble
from engine.device.weights import Weights
from engine.plan import Slice, StepPlan
from quant.formats.checkpoint import Checkpoint, open_checkpoint
from quant.formats.errors import ModelError
from quant.formats.mixing import LANES, hadamard, mix, mix_points
from quant.formats.numbers import round_fp8, round_int8
from quant.formats.rotation import Orthogonal, for_loading, hartley, rotated
from quant.formats.rounding import AT_LOAD
from quant.formats.scheme import Activations, Scheme
from quant.formats.weights import Quantized
from tests.torch.rounded import SCHEMES, write_rounded
from tests.torch.test_forward import logits_of
from tests.torch.tiny import generate, generate_all, load, logits, write_any_model, write_model

MODELS: dict[str, dict[str, object]] = {
    "llama_odd": {
        "hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 3, "num_key_value_heads": 1,
        "head_dim": 24, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    },
    "llama_one_head": {
        "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": 64,
    },
    "mistral_window": {
        "architectures": ["MistralForCausalLM"], "hidden_size": 48, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 7,
    },
    "qwen2_biases": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 80, "intermediate_size": 272,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 80, "tie_word_embeddings": True,
    },
    "qwen3_norms": {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 66, "intermediate_size": 160,
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "attention_bias": True,
    },
}  # fmt: skip
POINTS = {"llama_odd": 0, "llama_one_head": 32, "mistral_window": 2, "qwen2_biases": 0, "qwen3_norms": 2}
TOLERANCE = 1e-4  # relative, float32
PROMPT = [3, 1, 4, 1, 5, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71, 69]


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _rms(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _logits(checkpoint: Checkpoint, kernels: Kernels, rounding: Scheme | None = None) -> Tensor:
    """Of the prompt, by a model that is not loaded from a file."""
    decoder = load_decoder(Weights(checkpoint, torch.float32, rounding), kernels)
    model = assemble(decoder, dtype=torch.float32, kv_dtype="auto", context_max=32, blocks_max=2)
    return model.logits(StepPlan(step_id=1, slices=(Slice(sequence=1, start=0, tokens=tuple(PROMPT), blocks=(0, 1)),)))


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_function_is_the_same(tmp_path: Path, name: str, online: bool) -> None:
    checkpoint = open_checkpoint(write_any_model(tmp_path / "model", 1, **MODELS[name]))
    points = mix_points(checkpoint.architecture.intermediate)
    assert points == POINTS[name]
    tokens = torch.randint(0, 259, (2, 33), generator=torch.Generator().manual_seed(2))
    expected = logits_of(checkpoint, tokens)
    for seed in (0, 7):
        turned = rotated(checkpoint, seed=seed, online=online)
        assert not turned.tied and turned.scheme is None and turned.origin == checkpoint.origin
        assert _error(logits_of(turned, tokens, points if online else 0), expected) < TOLERANCE
        name_of_value = "model.layers.1.self_attn.v_proj.weight"
        shape = (checkpoint.architecture.kv_size, checkpoint.architecture.hidden)
        changed = turned.read(name_of_value, shape, torch.float32)
        assert _rms(changed, checkpoint.read(name_of_value, shape, torch.float32)) > 0.5, "nothing was rotated"


def test_a_mixed_weight_is_wrong_without_the_mixing(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_any_model(tmp_path / "model", 0, **MODELS["mistral_window"]))
    tokens = torch.arange(20)[None]
    assert _error(logits_of(rotated(checkpoint, online=True), tokens), logits_of(checkpoint, tokens)) > 0.05


def test_biases_that_no_configuration_mentions_are_rotated_too(tmp_path: Path) -> None:
    model = write_any_model(tmp_path / "model", 0, **MODELS["mistral_window"])
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    for linear in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        rows = len(tensors[f"model.layers.0.{linear}.weight"])
        tensors[f"model.layers.0.{linear}.bias"] = torch.randn(rows, generator=generator)
    expected = logits(load(model), PROMPT)
    save_file(tensors, model / "model.safetensors")
    biased = logits(load(model), PROMPT)
    assert _error(biased, expected) > 0.05
    turned = rotated(open_checkpoint(model), online=False)
    assert _error(_logits(turned, TorchFastKernels(torch.float32)), biased) < TOLERANCE


@pytest.mark.parametrize("size", [1, 2, 9, 16, 24, 45, 80, 128, 576, 1022, 8192])
def test_orthogonal(size: int) -> None:
    matrix = Orthogonal(size, seed=3)
    some = torch.eye(size)[:: max(1, size // 200)]
    rows = matrix.columns(some)
    assert torch.allclose(rows.double() @ rows.double().T, torch.eye(len(some)).double(), atol=1e-6)
    torch.testing.assert_close(matrix.rows(rows.T.contiguous()).T, matrix.columns(rows))  # Q.T @ (s Q).T = (s Q Q).T
    odd = size // (size & -size)
    most = (1 if odd == 1 else 2) / size  # of the square of an entry: no channel stays more than root 2 above the rest
    assert float(rows.square().max()) <= most * (1 + 1e-5)
    for square in (hartley(odd), hadamard(size & -size if size < 1000 else 64)):
        assert torch.allclose(square @ square, torch.eye(len(square)).double(), atol=1e-12)
    assert size < 5 or not torch.equal(Orthogonal(size, seed=4).columns(some), rows)
    assert torch.equal(Orthogonal(size, seed=3).columns(some), rows)


@pytest.mark.parametrize("points", [0, 2, 8, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixing_is_the_formula_and_its_own_inverse(points: int, dtype: torch.dtype) -> None:
    columns = 3 * LANES * max(points, 1)
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(points)).to(dtype)
    mixed = mix(x, points)
    if points == 0:
        assert mixed is x
        return
    split = x.double().view(5, 3, points, LANES)
    expected = torch.einsum("rgil,ij->rgjl", split, hadamard(points)).reshape(x.shape)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mix(mixed, points), x.float(), rtol=1e-6, atol=1e-6)
    for row in range(5):
        assert torch.equal(mix(x[row], points), mixed[row]), "a row knows of its neighbours"


def test_how_many_points() -> None:
    expected = {1536: 32, 512: 32, 256: 16, 96: 2, 48: 0, 16: 0, 100: 0, 8192: 32, 4864: 16, 18944: 32, 8960: 16, 1: 0}
    assert {size: mix_points(size) for size in expected} == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", ["float", "int8", "fp8"])
def test_products_that_mix(activations: Activations, dtype: torch.dtype) -> None:
    """Fast against reference, for weights that have a kernel of their own and those that are dequantized."""
    generator = torch.Generator().manual_seed(6)
    x, dense = torch.randn(7, 256, generator=generator).to(dtype), torch.randn(48, 256, generator=generator)
    weights: dict[str, list[Tensor | Quantized]] = {
        "float": [dense.to(dtype)],
        "int8": [round_int8(dense, "channel"), round_int8(dense, "group", 32)],
        "fp8": [round_fp8(dense, "channel")],
    }
    add = torch.randn(7, 48, generator=generator).to(dtype)
    for weight in weights[activations]:
        found, expected = (
            kernels.prepare(weight, None, activations, mix=8)(x, add=add)
            for kernels in (TorchFastKernels(dtype), ReferenceKernels())
        )
        assert found.dtype == dtype
        assert _error(found.float(), expected.float()) < (2e-3 if dtype == torch.float32 else 3e-2)
        unmixed = TorchFastKernels(dtype).prepare(weight, None, activations)(x, add=add)
        assert _error(unmixed.float(), expected.float()) > 0.2


def _with_outliers(model: Path) -> Path:
    """One channel of the residual stream and one of the MLP sixteen times as large as the others."""
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if "embed_tokens" in name:
            tensor[:, 5] *= 16
        if "up_proj" in name:
            tensor[70] *= 16
    save_file(tensors, model / "model.safetensors")
    return model


@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_int8_loses_less(tmp_path: Path, kernels: str) -> None:
    model = _with_outliers(write_model(tmp_path / "model", seed=3, hidden_size=256, intermediate_size=512))
    expected = logits(load(model), PROMPT)
    write_rounded(model, tmp_path / "plain", SCHEMES["int8"])
    plain = _rms(logits(load(tmp_path / "plain"), PROMPT), expected)
    if kernels == "fast":
        found = logits(load(model, quantization="int8"), PROMPT)
    else:
        checkpoint, scheme = for_loading(open_checkpoint(model), AT_LOAD["int8"])
        found = _logits(checkpoint, ReferenceKernels(), scheme)
    better = _rms(found, expected)
    assert 0 < better < 0.75 * plain, f"{better:.4f} of {plain:.4f}"


def test_loading_is_reproducible_and_says_so(tmp_path: Path) -> None:
    """The probe passes, tokens do not depend on their company, and what is rotated has another fingerprint."""
    model = write_model(tmp_path / "model", seed=3, intermediate_size=192)
    runner = load(model, quantization="int8", dtype="bfloat16")
    assert runner.facts.reproducible and runner.facts.weights.label == "int8"
    prompts = [PROMPT[:count] for count in (1, 2, 17, 24)]
    assert generate_all(runner, prompts, 10) == [generate(runner, prompt, 10) for prompt in prompts]
    checkpoint = open_checkpoint(model)
    identities = {checkpoint.identity}
    identities |= {rotated(checkpoint, seed=s, online=o).identity for s in (0, 1) for o in (False, True)}
    assert len(identities) == 5
    write_rounded(model, tmp_path / "plain", SCHEMES["int8"])
    assert load(tmp_path / "plain", dtype="bfloat16").facts.fingerprint != runner.facts.fingerprint
    assert for_loading(checkpoint, AT_LOAD["fp8"]) == (checkpoint, AT_LOAD["fp8"])


def test_a_missing_or_misshapen_tensor_is_told(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    for tensor, match in ((None, "lacks the tensor"), (torch.zeros(3, 3), "has shape")):
        broken = tmp_path / match.replace(" ", "-")
        shutil.copytree(model, broken)
        tensors = load_file(model / "model.safetensors")
        name = "model.layers.1.input_layernorm.weight"
        del tensors[name]
        if tensor is not None:
            tensors[name] = tensor
        save_file(tensors, broken / "model.safetensors")
        with pytest.raises(ModelError, match=match):
            load(broken, quantization="int8")
