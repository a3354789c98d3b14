"""
Configurations of quantized checkpoints: ours mean the same again, others' are understood or refused by name.
"""

import copy
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import BitsAndBytesConfig, CompressedTensorsConfig, GPTQConfig

from quant.formats.errors import ModelError
from quant.formats.kept import LINEARS, everywhere, is_kept
from quant.formats.layouts import quantization_config, read_scheme
from quant.formats.scheme import Method, Scheme
from tests.torch.test_layouts_round_trip import schemes

KEPT = ("model.layers.0.mlp.down_proj", "model.layers.11.self_attn.q_proj")
NAMES = [f"model.layers.{layer}.{linear}" for layer in (0, 1, 10, 11) for linear in LINEARS]
Config = dict[str, object]

AUTO_GPTQ: Config = {  # quantize_config.json of auto-gptq 0.7, with what it adds itself
    "bits": 4,
    "group_size": 128,
    "damp_percent": 0.01,
    "desc_act": True,
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": None,
    "model_file_base_name": "model",
    "is_marlin_format": False,
    "quant_method": "gptq",
    "checkpoint_format": "gptq",
    "awq_gemm_checkpoint": None,
}
OLD_AUTO_GPTQ: Config = {"bits": 8, "group_size": -1, "desc_act": False, "sym": False, "damp_percent": 0.1}
GPTQMODEL: Config = {
    "bits": 4,
    "dynamic": {"-:.*\\.mlp\\.gate.*": {}, "-:model\\.layers\\.3\\.mlp\\.up_proj$": {}, "+:.*": {}},
    "group_size": 32,
    "desc_act": False,
    "lm_head": False,
    "quant_method": "gptq",
    "checkpoint_format": "gptq_v2",
    "pack_dtype": "int32",
    "sym": True,
    "meta": {"quantizer": ["gptqmodel:7.7.0"], "act_group_aware": True},
}
TRANSFORMERS_GPTQ: Config = {
    "bits": 4,
    "group_size": 64,
    "desc_act": False,
    "sym": True,
    "quant_method": "gptq",
    "tokenizer": None,
    "dataset": "wikitext2",
    "modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.up_proj"]],
    "use_cuda_fp16": False,
    "exllama_config": {"version": 1},
}
TOKENS: Config = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
WEIGHTS: Config = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
GROUP: Config = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": TOKENS, "output_activations": None}
COMPRESSED: Config = {
    "config_groups": {"group_0": GROUP},
    "format": "int-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head", "re:.*mlp\\.gate_proj", "model.layers.2.mlp.down_proj", "model.embed_tokens"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12.2",
}
BITSANDBYTES: Config = {  # as transformers saves it
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}


def changed(config: Config, path: str, value: object) -> Config:
    """The configuration with one value, at that dotted path, changed; `...` takes it out."""
    whole = copy.deepcopy(config)
    inner = whole
    *parents, last = path.split("/")
    for parent in parents:
        step = inner[parent]
        assert isinstance(step, dict)
        inner = step
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return whole


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


REFUSED: list[tuple[Config, str, object, str]] = [
    (AUTO_GPTQ, "bits", 3, "GPTQ with 3 bits"),
    (AUTO_GPTQ, "bits", 2, "GPTQ with 2 bits"),
    (AUTO_GPTQ, "bits", "4", "bits is '4', expected a whole number"),
    (AUTO_GPTQ, "bits", True, "bits is True, expected a whole number"),
    (AUTO_GPTQ, "sym", ..., "sym is missing, expected true or false"),
    (AUTO_GPTQ, "desc_act", 1, "desc_act is 1, expected true or false"),
    (AUTO_GPTQ, "group_size", 0, "group_size is 0, expected -1 or more than 0"),
    (AUTO_GPTQ, "group_size", 10**5000, "group_size is an unprintable int"),
    (AUTO_GPTQ, "checkpoint_format", "marlin", "layout 'marlin'"),
    (AUTO_GPTQ, "checkpoint_format", "bitblas", "layout 'bitblas'"),
    (AUTO_GPTQ, "is_marlin_format", True, "layout 'marlin'"),
    (AUTO_GPTQ, "lm_head", True, "quantized lm_head"),
    (AUTO_GPTQ, "pack_dtype", "int64", "packed in 'int64'"),
    (AUTO_GPTQ, "rotation", "hadamard", "rotated weights"),
    (AUTO_GPTQ, "dynamic", {"+:.*down": {"bits": 8}}, "settings of its own for '+:.*down'"),
    (AUTO_GPTQ, "dynamic", {"-:(": {}}, "'(', which is no regular expression"),
    (AUTO_GPTQ, "modules_in_block_to_quantize", ["mlp"], "expected a list of lists of names"),
    (AUTO_GPTQ, "quant_method", "awq", "quant_method 'awq'"),
    (AUTO_GPTQ, "quant_method", "fp8", "quant_method 'fp8'"),
    (AUTO_GPTQ, "quant_method", 4, "quant_method is 4, expected a string"),
    (COMPRESSED, "quantization_status", "initialized", "status 'initialized'"),
    (COMPRESSED, "sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config"),
    (COMPRESSED, "transform_config", {"config_groups": {}}, "transform_config"),
    (COMPRESSED, "config_groups", {}, "at least one group"),
    (COMPRESSED, "config_groups", [GROUP], "expected an object"),
    (COMPRESSED, "config_groups/group_0/targets", [], "expected groups with targets"),
    (COMPRESSED, "config_groups/group_0/targets", ["re:["], "no regular expression"),
    (COMPRESSED, "config_groups/group_0/weights", ..., "weights is missing"),
    (COMPRESSED, "config_groups/group_0/output_activations", TOKENS, "output_activations"),
    (COMPRESSED, "config_groups/group_0/input_activations/dynamic", False, "static activation scales"),
    (COMPRESSED, "config_groups/group_0/input_activations/dynamic", "local", "'local' activation scales"),
    (COMPRESSED, "config_groups/group_0/input_activations/symmetric", False, "asymmetric activations"),
    (
        COMPRESSED,
        "config_groups/group_0/input_activations/strategy",
        "tensor",
        "activations with the strategy 'tensor'",
    ),
    (COMPRESSED, "config_groups/group_0/input_activations/num_bits", 4, "4-bit 'int' activations"),
    (COMPRESSED, "config_groups/group_0/input_activations/type", "float", "8-bit 'float' activations with int weights"),
    (COMPRESSED, "config_groups/group_0/weights/actorder", "group", "actorder 'group'"),
    (COMPRESSED, "config_groups/group_0/weights/actorder", True, "actorder True"),
    (COMPRESSED, "config_groups/group_0/weights/strategy", "block", "the strategy 'block'"),
    (COMPRESSED, "config_groups/group_0/weights/strategy", "tensor_group", "the strategy 'tensor_group'"),
    (COMPRESSED, "config_groups/group_0/weights/strategy", "group", "group_size is missing, expected more than 0"),
    (COMPRESSED, "config_groups/group_0/weights/block_structure", [128, 128], "with 'block_structure'"),
    (COMPRESSED, "config_groups/group_0/weights/outliers", 3, "with 'outliers'"),
    (COMPRESSED, "config_groups/group_0/weights/dynamic", True, "dynamic is True, expected false"),
    (COMPRESSED, "config_groups/group_0/weights/symmetric", False, "asymmetric 8-bit int weights"),
    (COMPRESSED, "config_groups/group_0/weights/num_bits", 4, "symmetric 4-bit int weights"),
    (COMPRESSED, "config_groups/group_0/weights/type", "complex", "'complex' weights"),
    (COMPRESSED, "format", "nvfp4-pack-quantized", "in 'nvfp4-pack-quantized'"),
    (COMPRESSED, "format", "marlin-24", "in 'marlin-24'"),
    (COMPRESSED, "format", "pack-quantized", "with rounded activations in 'pack-quantized'"),
    (COMPRESSED, "ignore", "lm_head", "ignore is 'lm_head', expected a list of strings"),
    (COMPRESSED, "ignore", ["model.layers. "], "expected the name of a layer, or re:"),
    (BITSANDBYTES, "bnb_4bit_quant_type", "fp4", "bitsandbytes 'fp4'"),
    (BITSANDBYTES, "bnb_4bit_quant_type", ..., "bitsandbytes 'fp4'"),
    (BITSANDBYTES, "bnb_4bit_quant_storage", "bfloat16", "bnb_4bit_quant_storage 'bfloat16'"),
    (BITSANDBYTES, "llm_int8_has_fp16_weight", True, "llm_int8_has_fp16_weight"),
    (BITSANDBYTES, "load_in_8bit", True, "or both"),
    (BITSANDBYTES, "llm_int8_skip_modules", ["["], "no regular expression"),
    ({"quant_method": "bitsandbytes"}, "x", 1, "says neither load_in_4bit nor load_in_8bit"),
    ({}, "x", 1, "quant_method '(none)'"),
]


@pytest.mark.parametrize(("config", "path", "value", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_supported_is_refused_by_name(config: Config, path: str, value: object, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_scheme(changed(config, path, value))
    line = str(caught.value)
    assert message in line and "\n" not in line and len(line) < 250
    assert ": " in line, "after the colon comes a way out"


def test_weight_only_fp8_and_mixed_formats_are_refused() -> None:
    fp8 = WEIGHTS | {"type": "float"}
    only = COMPRESSED | {"format": "float-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": fp8}}}
    with pytest.raises(ModelError, match=r"8-bit float weights \(channel\) with float activations"):
        read_scheme(only)
    both = {"a": GROUP, "b": {"targets": ["re:x"], "weights": fp8, "input_activations": TOKENS | {"type": "float"}}}
    with pytest.raises(ModelError, match="several number formats"):
        read_scheme(COMPRESSED | {"config_groups": both})


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(method="int8", bits=4),
        Scheme(method="int8", bits=8, symmetric=False),
        Scheme(method="int8", bits=8, granularity="group"),
        Scheme(method="int8", bits=8, group_size=64),
        Scheme(method="fp8", bits=8, granularity="group", group_size=64),
        Scheme(method="gptq", bits=3),
        Scheme(method="gptq", bits=4, granularity="tensor"),
        Scheme(method="packed", bits=4, desc_act=True),
        Scheme(method="nf4", bits=8),
        Scheme(method="llm-int8", bits=8, double_quant=True),
        Scheme(method="gptq", bits=4, kept=("no name",)),
        Scheme(method="gptq", bits=4, kept=("re:*",)),
    ],
    ids=str,
)
def test_schemes_that_no_format_has_are_not_written(scheme: Scheme) -> None:
    with pytest.raises(ModelError):
        quantization_config(scheme)


_TEXTS = st.text(st.characters(exclude_characters="/"), max_size=8)  # which `changed` splits at
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    _TEXTS,
    st.sampled_from(("gptq", "compressed-tensors", "bitsandbytes", "group", "re:(", "int", "float", "nf4", "Linear")),
)
_JSON = st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3))


def paths(config: Config, prefix: str = "") -> list[str]:
    """Of every value, at any depth."""
    found = []
    for key, value in config.items():
        found.append(prefix + key)
        if isinstance(value, dict):
            found += paths(value, f"{prefix}{key}/")
    return found


@given(st.dictionaries(_TEXTS, _JSON, max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_any_json_gives_a_scheme_or_one_line(extra: Config, data: st.DataObject) -> None:
    config = data.draw(st.sampled_from((AUTO_GPTQ, GPTQMODEL, TRANSFORMERS_GPTQ, COMPRESSED, BITSANDBYTES, extra)))
    for _ in range(data.draw(st.integers(0, 3))):
        places = paths(config)
        if places:
            config = changed(config, data.draw(st.sampled_from(places)), data.draw(_JSON | st.just(...)))
    try:
        scheme = read_scheme(config | extra)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert read_scheme(quantization_config(scheme)) is not None
        is_kept(scheme, NAMES[0])
