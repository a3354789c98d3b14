"""
Configurations of quantized checkpoints: ours mean the same again, others' are understood.
"""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import BitsAndBytesConfig, CompressedTensorsConfig, GPTQConfig

from quant.formats.kept import LINEARS, everywhere, is_kept
from quant.formats.layouts import quantization_config, read_scheme
from quant.formats.scheme import Method, Scheme
from tests.torch.configurations import (
    AUTO_GPTQ,
    BITSANDBYTES,
    COMPRESSED,
    GPTQMODEL,
    GROUP,
    OLD_AUTO_GPTQ,
    TRANSFORMERS_GPTQ,
    WEIGHTS,
    changed,
)
from tests.torch.every_scheme import schemes

KEPT = ("model.layers.0.mlp.down_proj", "model.layers.11.self_attn.q_proj")
NAMES = [f"model.layers.{layer}.{linear}" for layer in (0, 1, 10, 11) for linear in LINEARS]


@pytest.mark.parametrize("kept", [(), KEPT, (everywhere("mlp.down_proj"), *KEPT), ("re:.*self_attn\\.[qk]_proj$",)])
@pytest.mark.parametrize("scheme", schemes(), ids=lambda scheme: f"{scheme.label}-v{1 + scheme.zeros_v2}")
def test_our_configurations_mean_the_same_again(scheme: Scheme, kept: tuple[str, ...]) -> None:
    whole = msgspec.structs.replace(scheme, kept=kept)
    config = json.loads(json.dumps(quantization_config(whole, layers=12)))
    assert read_scheme(config) == whole


@given(st.lists(st.sampled_from(NAMES), unique=True), st.sampled_from((None, 1, 2, 12)))
@settings(max_examples=60, deadline=None)
def test_any_names_are_kept(names: list[str], layers: int | None) -> None:
    methods: dict[Method, int] = {"int8": 8, "gptq": 4, "nf4": 4, "llm-int8": 8}
    for method, bits in methods.items():
        scheme = Scheme(method=method, bits=bits, kept=tuple(names))
        back = read_scheme(quantization_config(scheme, layers=layers))
        assert back == scheme
        assert [name for name in NAMES if is_kept(back, name)] == [name for name in NAMES if name in names]


def test_what_is_kept_in_all_layers_is_said_to_transformers() -> None:
    kept = tuple(f"model.layers.{layer}.mlp.down_proj" for layer in range(3))
    scheme = Scheme(method="gptq", bits=4, kept=kept)
    blocks = [[linear] for linear in LINEARS if linear != "mlp.down_proj"]
    config = quantization_config(scheme, layers=3)
    assert config["modules_in_block_to_quantize"] == blocks
    assert read_scheme(config) == scheme
    assert "modules_in_block_to_quantize" not in quantization_config(scheme, layers=4)
    assert "modules_in_block_to_quantize" not in quantization_config(scheme)


def test_configurations_are_the_documented_ones() -> None:
    """Keys that old loaders do not know, or forbid, must not creep in."""
    int8 = quantization_config(Scheme(method="int8", bits=8))
    assert int8 == {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
        "ignore": ["lm_head"],
    }
    assert quantization_config(Scheme(method="gptq", bits=4, granularity="group", group_size=64)) == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "desc_act": False,
        "sym": True,
        "damp_percent": 0.01,
        "static_groups": False,
        "true_sequential": True,
        "checkpoint_format": "gptq",
        "lm_head": False,
    }
    assert quantization_config(Scheme(method="llm-int8", bits=8, kept=KEPT)) == {
        "quant_method": "bitsandbytes",
        "load_in_8bit": True,
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": ["lm_head", *KEPT],
    }


@pytest.mark.parametrize("scheme", schemes(), ids=lambda scheme: f"{scheme.label}-v{1 + scheme.zeros_v2}")
def test_transformers_understands_our_configurations(scheme: Scheme) -> None:
    config = quantization_config(scheme)
    if scheme.method == "gptq":
        theirs = GPTQConfig.from_dict(config)
        assert (theirs.bits, theirs.group_size, theirs.sym) == (scheme.bits, scheme.group_size, scheme.symmetric)
    elif scheme.method in ("nf4", "llm-int8"):
        bnb = BitsAndBytesConfig.from_dict(config)
        assert (bnb.load_in_4bit, bnb.load_in_8bit) == (scheme.bits == 4, scheme.bits == 8)
        assert scheme.bits == 8 or bnb.bnb_4bit_quant_type == "nf4"
        assert read_scheme(json.loads(bnb.to_json_string())) == scheme
    else:
        compressed = CompressedTensorsConfig.from_dict(config)
        assert compressed.is_quantization_compressed
        assert read_scheme(json.loads(json.dumps(compressed.to_dict()))) == scheme


@pytest.mark.parametrize(
    "skip", ["down_proj", "model.layers.1", "model.layers.1.mlp", r"model.layers.\d.mlp", "mlp.up"]
)
def test_skipped_modules_mean_what_they_mean_to_transformers(skip: str) -> None:
    scheme = read_scheme(BITSANDBYTES | {"llm_int8_skip_modules": ["lm_head", skip]})
    for name in NAMES:
        assert is_kept(scheme, name) == (not should_convert_module(name, [skip])), name
    again = read_scheme(quantization_config(scheme))
    assert [is_kept(again, name) for name in NAMES] == [is_kept(scheme, name) for name in NAMES]


def test_auto_gptq() -> None:
    act = Scheme(method="gptq", bits=4, granularity="group", group_size=128, desc_act=True)
    assert read_scheme(AUTO_GPTQ) == act
    assert read_scheme(AUTO_GPTQ | {"checkpoint_format": None}) == act
    assert read_scheme(OLD_AUTO_GPTQ) == Scheme(method="gptq", bits=8, symmetric=False)


def test_gptqmodel() -> None:
    scheme = read_scheme(GPTQMODEL)
    assert (scheme.bits, scheme.group_size, scheme.zeros_v2) == (4, 32, True)
    assert scheme.kept == ("re:.*\\.mlp\\.gate.*", "model.layers.3.mlp.up_proj")
    assert is_kept(scheme, "model.layers.7.mlp.gate_proj") and not is_kept(scheme, "model.layers.7.mlp.up_proj")
    assert read_scheme({key: value for key, value in GPTQMODEL.items() if key != "dynamic"}).kept == ()
    renamed = {key: value for key, value in GPTQMODEL.items() if key != "checkpoint_format"} | {"format": "gptq_v2"}
    assert read_scheme(renamed) == scheme


def test_gptq_of_transformers() -> None:
    scheme = read_scheme(TRANSFORMERS_GPTQ)
    missing = ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    assert [linear for linear in LINEARS if is_kept(scheme, f"model.layers.12.{linear}")] == list(missing)
    assert read_scheme(quantization_config(scheme)) == scheme


def test_llm_compressor() -> None:
    scheme = read_scheme(COMPRESSED)
    assert scheme == Scheme(method="int8", bits=8, kept=("re:.*mlp\\.gate_proj", "model.layers.2.mlp.down_proj"))
    assert is_kept(scheme, "model.layers.9.mlp.gate_proj") and not is_kept(scheme, "model.layers.9.mlp.down_proj")
    for harmless in ({"quantization_status": "frozen"}, {"kv_cache_scheme": {"num_bits": 8}}, {"version": "9"}):
        assert read_scheme(COMPRESSED | harmless) == scheme
    nulls = dict.fromkeys(("actorder", "block_structure", "group_size", "observer", "scale_dtype", "zp_dtype"))
    with_nulls = changed(COMPRESSED, "config_groups/group_0/weights", WEIGHTS | nulls | {"observer_kwargs": {}})
    assert read_scheme(with_nulls) == scheme
    newer = changed(COMPRESSED, "config_groups/group_0/format", "int-quantized")
    assert read_scheme(newer | {"format": "dense"}) == scheme
    two = changed(COMPRESSED, "config_groups/group_1", GROUP)
    assert read_scheme(two) == scheme


@pytest.mark.parametrize("order", ["weight", "static", None, False])
def test_act_order_that_leaves_no_trace(order: object) -> None:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": 128,
        "actorder": order,
    }
    group = {"targets": ["Linear"], "weights": weights}
    config = COMPRESSED | {"format": "pack-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    assert read_scheme(config) == Scheme(method="packed", bits=4, granularity="group", group_size=128, symmetric=False)


def test_targets_that_are_not_all_layers() -> None:
    config = changed(COMPRESSED, "config_groups/group_0/targets", ["re:.*self_attn.*", "model.layers.1.mlp.up_proj"])
    scheme = read_scheme(config | {"ignore": ["lm_head"]})
    quantized = [name for name in NAMES if "self_attn" in name or name == "model.layers.1.mlp.up_proj"]
    assert [name for name in NAMES if not is_kept(scheme, name)] == quantized
    assert read_scheme(quantization_config(scheme)) == scheme


def test_bitsandbytes() -> None:
    assert read_scheme(BITSANDBYTES) == Scheme(method="nf4", bits=4, double_quant=True)
    assert read_scheme({"load_in_8bit": True}) == Scheme(method="llm-int8", bits=8)
    assert read_scheme({"quant_method": "bitsandbytes", "_load_in_8bit": True}).method == "llm-int8"
