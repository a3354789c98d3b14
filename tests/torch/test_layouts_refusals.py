"""
Tensors that are not as their format has them: one line that names the tensor, whatever is wrong with it.
"""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quant.formats.bnb_layout import STATE
from quant.formats.errors import ModelError
from quant.formats.layouts import pack, unpack
from quant.formats.scheme import Scheme
from tests.torch.every_scheme import round_as, schemes

SHAPE = (32, 192)
NAME = "model.layers.0.mlp.down_proj"
INT8 = Scheme(method="int8", bits=8)
FP8 = Scheme(method="fp8", bits=8)
GPTQ = Scheme(method="gptq", bits=4, granularity="group", group_size=64)
ASYM = Scheme(method="gptq", bits=4, granularity="group", group_size=64, symmetric=False)
ACT = Scheme(method="gptq", bits=4, granularity="group", group_size=64, desc_act=True)
PACKED = Scheme(method="packed", bits=4, granularity="group", group_size=64)
NF4 = Scheme(method="nf4", bits=4)
DOUBLE = Scheme(method="nf4", bits=4, double_quant=True)
LLM = Scheme(method="llm-int8", bits=8)
NEEDLESS = {"weight_format", "g_idx"}
ALL = [scheme for scheme in schemes() if not scheme.zeros_v2]


def tensors_of(scheme: Scheme) -> dict[str, Tensor]:
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    return pack(scheme, round_as(scheme, weight))


def state(**changes: object) -> Tensor:
    """A quant_state that is right but for the changes."""
    right = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(SHAPE)}
    return torch.tensor(list(json.dumps(right | changes).encode()), dtype=torch.uint8)


def refusal(scheme: Scheme, tensors: dict[str, Tensor], shape: tuple[int, int] = SHAPE) -> str:
    """The one line with which they are refused."""
    with pytest.raises(ModelError) as caught:
        unpack(scheme, tensors, shape, name=NAME)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.label)
def test_each_tensor_is_missed_by_its_name(scheme: Scheme) -> None:
    tensors = tensors_of(scheme)
    for suffix in tensors:
        rest = {key: tensor for key, tensor in tensors.items() if key != suffix}
        if suffix in NEEDLESS and not (scheme.desc_act and scheme.group_size in (32, 64)):
            unpack(scheme, rest, SHAPE)
        elif suffix == "weight.nested_absmax":  # then its absmax must be floats
            assert f"{NAME}.weight.absmax is uint8, expected float32" in refusal(scheme, rest)
        elif suffix == "weight_packed" and scheme.bits == 8 and scheme.symmetric:  # then it may be unpacked
            assert f"tensor {NAME}.weight is missing" in refusal(scheme, rest)
        else:
            assert f"tensor {NAME}.{suffix} is missing" in refusal(scheme, rest)


@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.label)
def test_each_tensor_that_is_cut_off_is_named(scheme: Scheme) -> None:
    tensors = tensors_of(scheme)
    for suffix, tensor in tensors.items():
        cut = tensor.reshape(-1)[: tensor.numel() // 2] if tensor.dim() != 2 else tensor[: len(tensor) // 2]
        message = refusal(scheme, tensors | {suffix: cut})
        assert f"tensor {NAME}.{suffix} " in message, message


@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.label)
def test_each_tensor_of_another_type_is_named(scheme: Scheme) -> None:
    tensors = tensors_of(scheme)
    for suffix, tensor in tensors.items():
        message = refusal(scheme, tensors | {suffix: tensor.to(torch.float64)})
        assert f"tensor {NAME}.{suffix} is float64, expected " in message


@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.label)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_tensors_give_a_weight_or_one_line(scheme: Scheme, data: st.DataObject) -> None:
    tensors = tensors_of(scheme)
    dtypes = st.sampled_from((torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32))
    shapes = st.lists(st.sampled_from((0, 1, 2, 3, 16, 24, 32, 96, 192)), max_size=3)
    for suffix in data.draw(st.lists(st.sampled_from(sorted(tensors)), unique=True, min_size=1)):
        if data.draw(st.booleans()):
            shape, dtype = data.draw(shapes), data.draw(dtypes)
        else:  # right but for what is in it
            shape, dtype = list(tensors[suffix].shape), tensors[suffix].dtype
        octets = torch.tensor(data.draw(st.lists(st.integers(0, 255), min_size=8, max_size=8)), dtype=torch.uint8)
        count = torch.Size(shape).numel() * dtype.itemsize
        tensors[suffix] = octets.repeat(-(-count // 8))[:count].view(dtype).reshape(shape)
    try:
        assert unpack(scheme, tensors, SHAPE).dense(torch.float32).shape == SHAPE
    except ModelError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("shape", [(64, 192), (32, 96), (192, 32)])
@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.label)
def test_a_layer_of_another_shape_is_refused(scheme: Scheme, shape: tuple[int, int]) -> None:
    refusal(scheme, tensors_of(scheme), shape)


def test_gptq_zero_points_that_contradict_the_configuration() -> None:
    asymmetric = tensors_of(ASYM)
    assert "qzeros is not that of symmetric weights" in refusal(GPTQ, asymmetric)
    highest = asymmetric["qzeros"].clone()
    highest[0, 0] |= 0xF
    assert "every loader reads otherwise" in refusal(ASYM, asymmetric | {"qzeros": highest})
    other = torch.full_like(tensors_of(GPTQ)["qzeros"], 0x66666666)
    assert "qzeros is not that of symmetric weights" in refusal(GPTQ, tensors_of(GPTQ) | {"qzeros": other})


def test_gptq_columns_that_contradict_the_configuration() -> None:
    shuffled = tensors_of(ACT)
    assert "g_idx is out of order, though the configuration says desc_act is false" in refusal(GPTQ, shuffled)
    for wrong in (3, -1):
        columns = shuffled["g_idx"].clone()
        columns[5] = wrong
        assert "g_idx names a group beyond the 3 that there are" in refusal(ACT, shuffled | {"g_idx": columns})


def test_gptq_groups_that_do_not_divide() -> None:
    scheme = Scheme(method="gptq", bits=4, granularity="group", group_size=128)
    assert "do not divide 192 input columns: sizes that fit are 16, 32, 64, -1" in refusal(scheme, tensors_of(GPTQ))
    assert "multiples of 8, this layer is 30 x 192" in refusal(GPTQ, tensors_of(GPTQ), (30, 192))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("scheme", "suffix"),
    [
        (INT8, "weight_scale"),
        (FP8, "weight_scale"),
        (PACKED, "weight_scale"),
        (GPTQ, "scales"),
        (NF4, "weight.absmax"),
        (NF4, "weight.quant_map"),
        (DOUBLE, "weight.nested_absmax"),
        (DOUBLE, "weight.nested_quant_map"),
        (LLM, "SCB"),
    ],
    ids=str,
)
def test_scales_must_be_finite(scheme: Scheme, suffix: str, broken: float) -> None:
    tensors = tensors_of(scheme)
    tensors[suffix].view(-1)[-1] = broken
    assert f"tensor {NAME}.{suffix} holds NaN or infinities" in refusal(scheme, tensors)


@pytest.mark.parametrize("octet", [0x7F, 0xFF])
def test_fp8_must_be_numbers(octet: int) -> None:
    tensors = tensors_of(FP8)
    tensors["weight"].view(torch.uint8)[3, 4] = octet
    assert f"tensor {NAME}.weight holds NaN" in refusal(FP8, tensors)


def test_zero_points_of_symmetric_weights() -> None:
    """Zeros are harmless and some tools write them; anything else is another format."""
    for scheme in (INT8, FP8):
        tensors = tensors_of(scheme)
        zeros = torch.zeros(32, 1, dtype=torch.int8)
        unpack(scheme, tensors | {"weight_zero_point": zeros}, SHAPE)
        assert "weight_zero_point is not 0" in refusal(scheme, tensors | {"weight_zero_point": zeros + 1})
    zero_words = torch.zeros(4, 3, dtype=torch.int32)
    assert "weight_zero_point is there" in refusal(PACKED, tensors_of(PACKED) | {"weight_zero_point": zero_words})


def test_a_weight_shape_that_contradicts_the_model() -> None:
    tensors = tensors_of(PACKED) | {"weight_shape": torch.tensor([32, 191])}
    assert "weight_shape says [32, 191], expected [32, 192]" in refusal(PACKED, tensors)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (state(quant_type="fp4"), ".quant_type is 'fp4', expected nf4"),
        (state(blocksize=128), ".blocksize is 128, expected 64"),
        (state(shape=[192, 32]), ".shape is [192, 32], expected [32, 192]"),
        (state(dtype="float64"), ".dtype is 'float64', expected float32, float16 or bfloat16"),
        (state(dtype=None), ".dtype is missing, expected a string"),
        (torch.tensor(list(b"{nonsense"), dtype=torch.uint8), " is no JSON (JSONDecodeError)"),
        (torch.tensor([0xC3, 0x28], dtype=torch.uint8), " is no JSON (UnicodeDecodeError)"),
        (torch.tensor(list(b"[1]"), dtype=torch.uint8), " is no JSON object"),
        (torch.tensor(list(b"[" * 100_000), dtype=torch.uint8), " is no JSON (RecursionError)"),
    ],
    ids=range(9),
)
def test_a_wrong_quant_state_is_named(stored: Tensor, message: str) -> None:
    assert f"{STATE}{message}" in refusal(NF4, tensors_of(NF4) | {STATE: stored})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nested_blocksize": 128}, "nested_blocksize is 128, expected 256"),
        ({"nested_dtype": "float16"}, "nested_dtype is 'float16', expected float32"),
        ({"nested_offset": float("nan")}, "nested_offset is nan, expected a finite number"),
        ({"nested_offset": 10**400}, "nested_offset is 1000"),
        ({}, "nested_offset is missing, expected a finite number"),
    ],
    ids=range(5),
)
def test_a_wrong_nested_state_is_named(changes: dict[str, object], message: str) -> None:
    right: dict[str, object] = {"nested_blocksize": 256, "nested_dtype": "float32"}
    assert message in refusal(DOUBLE, tensors_of(DOUBLE) | {STATE: state(**(right | changes))})


def test_what_bitsandbytes_leaves_behind_after_a_forward_on_cpu() -> None:
    """It repacks the weight in place for its own kernel, and a model saved then has a bfloat16 [in / 64, out]."""
    tensors = tensors_of(NF4) | {"weight.absmax": torch.ones(3, 32, dtype=torch.bfloat16)}
    assert f"{NAME}.weight.absmax is bfloat16, expected float32" in refusal(NF4, tensors)
    tensors["weight.absmax"] = torch.ones(3, 32)
    assert f"{NAME}.weight.absmax has shape [3, 32], expected [96]" in refusal(NF4, tensors)
    nested = tensors_of(DOUBLE) | {"weight.absmax": torch.ones(3, 32, dtype=torch.uint8)}
    assert "has shape [3, 32], expected [96]" in refusal(DOUBLE, nested)


def test_llm_int8_in_a_gpus_order_is_refused() -> None:
    tensors = tensors_of(LLM) | {"weight_format": torch.tensor(1, dtype=torch.uint8)}
    assert f"tensor {NAME}.weight_format is not 0" in refusal(LLM, tensors)


def test_double_quantization_is_what_the_tensors_say() -> None:
    """transformers goes by the tensors, too, so their configurations may be wrong without anybody noticing."""
    for said, stored in ((NF4, DOUBLE), (DOUBLE, NF4)):
        weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
        expected = round_as(stored, weight).dense(torch.float32)
        assert torch.equal(unpack(said, tensors_of(stored), SHAPE).dense(torch.float32), expected)
