"""
auto-gptq itself, in an environment of its own (`make test-auto-gptq`): it reads what we write, and solves as a backend.
"""

import importlib.util
import json
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from quant.auto_gptq_backend import solve_with_auto_gptq
from quant.formats.layouts import pack, unpack
from quant.formats.rounding import round_weight
from quant.formats.scheme import Scheme
from quant.formats.weights import Affine, Quantized
from quant.gptq import solve
from tests.torch.rounded import SCHEMES, write_rounded
from tests.torch.tiny import load, logits, write_model

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("auto_gptq") is None,
        reason="auto-gptq is not here; it needs an environment of its own: make test-auto-gptq",
    ),
    pytest.mark.filterwarnings("ignore"),  # it and its old companions warn about themselves
]

PROMPT = tuple(range(3, 43))
SIZES: dict[str, object] = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
FAMILIES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
FORMS = ("gptq", "gptq-asym", "gptq-8bit", "gptq-channel", "gptq-act")


def _scattered(prefix: str, weight: Quantized) -> Quantized:
    """Groups spread over the columns, as activation order leaves them; alike for projections of one input."""
    assert isinstance(weight, Affine)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    return Affine(weight.codes, weight.scale, weight.zero, weight.column_groups[order].int(), weight.bits)


def _theirs(directory: Path) -> Tensor:
    from auto_gptq import AutoGPTQForCausalLM

    model = AutoGPTQForCausalLM.from_quantized(
        str(directory), device="cpu", use_safetensors=True, torch_dtype=torch.float32, use_triton=False,
        disable_exllama=True, disable_exllamav2=True,
    )  # fmt: skip
    with torch.inference_mode():
        answer: Tensor = model.model(torch.tensor([PROMPT])).logits[0].float()
    return answer


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_it_computes_what_we_compute(form: str, family: str, tmp_path: Path) -> None:
    changes = SIZES | {"model_type": family, "architectures": [FAMILIES[family]]}
    source = write_model(tmp_path / "float", seed=6, **changes)
    scheme = SCHEMES["gptq" if form == "gptq-act" else form]
    directory = tmp_path / "model"
    if form == "gptq-act":
        scheme = msgspec.structs.replace(scheme, desc_act=True)
        write_rounded(source, directory, scheme, _scattered)
    else:
        write_rounded(source, directory, scheme)
    config = json.loads((directory / "config.json").read_bytes())["quantization_config"]
    (directory / "quantize_config.json").write_text(json.dumps(config))
    ours, theirs = logits(load(directory), PROMPT), _theirs(directory)
    error = float((ours - theirs).norm() / theirs.norm())
    assert error < 2e-3, f"relative error {error:.1e}: its kernels compute in float16"
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize(("symmetric", "desc_act"), [(True, False), (False, False), (True, True)])
def test_as_a_backend_it_beats_rounding_and_not_us(
    symmetric: bool, desc_act: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it needs CUDA for is to wait for it."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(128, 128, generator=generator)
    inputs = torch.randn(2000, 128, generator=generator) @ mixing
    weight = torch.randn(64, 128, generator=generator)
    hessian = inputs.T @ inputs
    scheme = Scheme(method="gptq", bits=4, granularity="group", group_size=32, symmetric=symmetric, desc_act=desc_act)

    def error(found: Affine) -> float:
        return float((inputs @ (found.dense(torch.float32) - weight).T).norm() / (inputs @ weight.T).norm())

    rounded = round_weight(weight, scheme)
    assert isinstance(rounded, Affine)
    theirs, ours = (
        solver(weight, hessian, bits=4, group_size=32, symmetric=symmetric, desc_act=desc_act)
        for solver in (solve_with_auto_gptq, solve)
    )
    assert error(theirs) < 0.9 * error(rounded)
    assert error(ours) < 1.05 * error(theirs)
    stored = unpack(scheme, pack(scheme, theirs), theirs.shape)
    assert torch.equal(stored.dense(torch.float32), theirs.dense(torch.float32))
