"""
Whole quantized models: the engine against transformers on the same files, and against the floats they stand for.
"""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import EngineOptions
from engine.device.errors import ModelError
from engine.device.runner import Runner
from quant.formats.weights import Affine, Quantized
from tests.torch.rounded import SCHEMES, with_kept, write_rounded
from tests.torch.tiny import generate, generate_all, load, logits, write_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and bitsandbytes warn about themselves

PROMPT = tuple(range(3, 43))
SIZES: dict[str, object] = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
WEIGHTS_ONLY = [name for name, scheme in SCHEMES.items() if scheme.activations == "float"]
# GPTQ there needs gptqmodel, which needs CUDA; compressed-tensors 0.20 cannot load its own asymmetric 4-bit files.
IN_TRANSFORMERS = [name for name in SCHEMES if not name.startswith("gptq") and name != "packed-asym"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose sizes all formats take."""
    return write_model(tmp_path_factory.mktemp("float") / "llama", seed=5, **SIZES)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _rms(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _dense_logits(source: Path, directory: Path, dense: dict[str, Tensor]) -> Tensor:
    shutil.copytree(source, directory)
    save_file(dense, directory / "model.safetensors", metadata={"format": "pt"})
    return logits(load(directory), PROMPT)


@pytest.mark.parametrize("name", WEIGHTS_ONLY)
def test_the_engine_computes_what_the_numbers_stand_for(name: str, source: Path, tmp_path: Path) -> None:
    dense = write_rounded(source, tmp_path / "model", SCHEMES[name])
    found = logits(load(tmp_path / "model"), PROMPT)
    assert _error(found, _dense_logits(source, tmp_path / "dense", dense)) < 1e-5
    assert _error(found, logits(load(source), PROMPT)) > 1e-4, "rounding must have changed something"


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_transformers_agrees(name: str, source: Path, tmp_path: Path) -> None:
    """
    Up to the order of float32 sums, but where activations are rounded to int8: transformers divides their largest by
    127.5 and we by 127, so nearly every code may differ, and only the size of that noise can be compared.
    """
    scheme = SCHEMES[name]
    dense = write_rounded(source, tmp_path / "model", scheme)
    found = logits(load(tmp_path / "model"), PROMPT)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for module in oracle.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # bitsandbytes would compute in bfloat16
            module.__dict__.update(support_avx512bf16_for_cpu=False, compute_dtype=torch.float32)
    with torch.inference_mode():
        expected = oracle(torch.tensor([PROMPT])).logits[0].float()
    error = _rms(found, expected)
    if scheme.method not in ("int8", "llm-int8"):
        assert error < 1e-5
        return
    weights_only = _dense_logits(source, tmp_path / "dense", dense)
    noise = _rms(expected, weights_only)
    assert 0.01 < noise < 0.1
    assert error < 1.5 * noise  # two independent noises of that size are 1.41 of it apart
    assert _rms(found, weights_only) < 1.5 * noise


@pytest.mark.parametrize("name", SCHEMES)
def test_kept_layers_stay_what_they_are(name: str, source: Path, tmp_path: Path) -> None:
    """One of three projections that are computed together, and a whole pair."""
    kept = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")
    scheme = with_kept(SCHEMES[name], *kept)
    dense = write_rounded(source, tmp_path / "model", scheme)
    for prefix in kept:
        assert torch.equal(dense[f"{prefix}.weight"], load_file(source / "model.safetensors")[f"{prefix}.weight"])
    tolerance = {"float": 1e-5, "int8": 0.06, "fp8": 0.25}[scheme.activations]  # activations are rounded, too
    error = _error(logits(load(tmp_path / "model"), PROMPT), _dense_logits(source, tmp_path / "dense", dense))
    assert error < tolerance


@pytest.mark.parametrize("name", ["int8", "gptq", "gptq-asym", "gptq-act"])
def test_tokens_do_not_depend_on_the_company(name: str, source: Path, tmp_path: Path) -> None:
    """In bfloat16, where the 4-bit kernel runs."""

    def by_activation(prefix: str, weight: Quantized) -> Quantized:
        assert isinstance(weight, Affine)
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(prefix) % 5))
        return Affine(weight.codes, weight.scale, weight.zero, weight.column_groups[order].int(), weight.bits)

    if name == "gptq-act":
        scheme = msgspec.structs.replace(SCHEMES["gptq-asym"], desc_act=True)
        write_rounded(source, tmp_path / "model", scheme, by_activation)
    else:
        write_rounded(source, tmp_path / "model", SCHEMES[name])
    runner = load(tmp_path / "model", dtype="bfloat16")
    assert runner.facts.reproducible
    prompts = [PROMPT[:count] for count in (1, 2, 17, 40)]
    alone = [generate(runner, prompt, 12) for prompt in prompts]
    assert generate_all(runner, prompts, 12) == alone


def test_zero_biases_that_a_converter_invented_are_dropped_and_others_are_added(source: Path, tmp_path: Path) -> None:
    dense = write_rounded(source, tmp_path / "model", SCHEMES["gptq"])
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    rows = tensors["model.layers.0.self_attn.q_proj.scales"].shape[1]
    plain = logits(load(tmp_path / "model"), PROMPT)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(rows)
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(logits(load(tmp_path / "model"), PROMPT), plain)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(rows)
    save_file(tensors, file, metadata={"format": "pt"})
    assert _error(logits(load(tmp_path / "model"), PROMPT), plain) > 1e-3
    assert dense


@pytest.mark.parametrize("quantization", ["fp8", "nf4"])  # int8 is rotated before: tests/torch/test_rotation.py
def test_rounding_at_load_is_what_the_file_would_hold(quantization: str, source: Path, tmp_path: Path) -> None:
    write_rounded(source, tmp_path / "model", SCHEMES[quantization])
    options = EngineOptions(
        model=str(source), model_name="m", listen="", dtype="float32", threads=1, kv_memory_bytes=4 << 20,
        quantization=quantization,
    )  # fmt: skip
    runner, stored = Runner.load(options), load(tmp_path / "model")
    assert torch.equal(logits(runner, PROMPT), logits(stored, PROMPT))
    assert runner.facts.weights.label == stored.facts.weights.label == quantization


def test_a_configuration_beside_config_json_is_found(source: Path, tmp_path: Path) -> None:
    """Where auto-gptq alone used to write it."""
    write_rounded(source, tmp_path / "model", SCHEMES["gptq"])
    expected = logits(load(tmp_path / "model"), PROMPT)
    config = json.loads((tmp_path / "model/config.json").read_bytes())
    (tmp_path / "model/quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    assert torch.equal(logits(load(tmp_path / "model"), PROMPT), expected)


def test_what_is_quantized_is_not_quantized_again(source: Path, tmp_path: Path) -> None:
    write_rounded(source, tmp_path / "model", SCHEMES["gptq"])
    options = EngineOptions(model=str(tmp_path / "model"), model_name="m", listen="", quantization="int8")
    with pytest.raises(ModelError, match=r"quantized already \(gptq-4bit-g32\): leave --quantization out"):
        Runner.load(options)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_keys_and_values_in_8_bits(kv_dtype: str, source: Path) -> None:
    """Close to the floats, and the same in any company."""
    options = EngineOptions(
        model=str(source), model_name="m", listen="", dtype="bfloat16", threads=1, kv_memory_bytes=4 << 20,
        quantization="none", kv_dtype=kv_dtype,
    )  # fmt: skip
    runner = Runner.load(options)
    assert runner.facts.reproducible
    assert runner.facts.fingerprint != load(source, dtype="bfloat16").facts.fingerprint
    error = _error(logits(runner, PROMPT), logits(load(source, dtype="bfloat16"), PROMPT))
    assert 0 < error < {"int8": 0.08, "fp8": 0.15}[kv_dtype]  # random models: int8 0.02 to 0.065, whichever the kernels
    prompts = [PROMPT[:count] for count in (1, 5, 33)]
    assert generate_all(runner, prompts, 10) == [generate(runner, prompt, 10) for prompt in prompts]


def test_the_fingerprint_names_the_numbers(source: Path, tmp_path: Path) -> None:
    write_rounded(source, tmp_path / "model", SCHEMES["gptq-asym"])
    facts = load(tmp_path / "model").facts
    assert (facts.weights.method, facts.weights.bits, facts.weights.group_size) == ("gptq", 4, 64)
    assert facts.fingerprint.startswith(f"fp_gptq-4bit-g64-asym_{facts.weights.origin}_")
