"""
Configurations that are not supported: refused by name, with a way out; and any JSON at all.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.formats.errors import ModelError
from quant.formats.kept import is_kept
from quant.formats.layouts import quantization_config, read_scheme
from quant.formats.scheme import Scheme
from tests.torch.configurations import (
    AUTO_GPTQ,
    BITSANDBYTES,
    COMPRESSED,
    GPTQMODEL,
    GROUP,
    TOKENS,
    TRANSFORMERS_GPTQ,
    WEIGHTS,
    Config,
    changed,
)

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
    (COMPRESSED, "config_groups", {"\n": False}, "config_groups.\\n is False, expected an object"),
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
        is_kept(scheme, "model.layers.0.mlp.down_proj")
