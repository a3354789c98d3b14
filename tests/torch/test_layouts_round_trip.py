"""
Every scheme, granularity and group on seeded matrices: what is packed is what is unpacked, to the last bit.
"""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quant.formats.bnb import round_nf4
from quant.formats.errors import ModelError
from quant.formats.layouts import pack, suffixes, unpack
from quant.formats.numbers import round_groups
from quant.formats.scheme import Scheme
from quant.formats.weights import Affine, LlmInt8, Nf4, Quantized
from tests.torch.every_scheme import round_as, schemes

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def same(found: Quantized, expected: Quantized) -> bool:
    """Whether two weights are the same in every field, bit for bit."""
    assert type(found) is type(expected)
    for field in type(found).__dataclass_fields__:
        one, other = getattr(found, field), getattr(expected, field)
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            whole = (one.dtype, one.shape) == (other.dtype, other.shape)
            if not whole or not torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
                return False
        elif field == "nested" and one is not None and other is not None:
            if not torch.equal(one.codes, other.codes) or not torch.equal(one.dense(), other.dense()):
                return False
        elif one is not other and one != other:
            return False
    return True


@pytest.mark.parametrize("scheme", schemes(), ids=lambda scheme: f"{scheme.label}-v{1 + scheme.zeros_v2}")
@given(seed=st.integers(0, 2**31 - 1), rows=st.sampled_from((32, 96, 160)), dtype=st.sampled_from(FLOATS))
@settings(max_examples=5, deadline=None)
def test_what_is_packed_is_unpacked(scheme: Scheme, seed: int, rows: int, dtype: torch.dtype) -> None:
    weight = torch.randn(rows, 192, generator=torch.Generator().manual_seed(seed)) * 0.02
    weight[1] = 0
    weight = weight.to(dtype)
    rounded = round_as(scheme, weight)
    tensors = pack(scheme, rounded)
    assert set(tensors) <= set(suffixes(scheme))
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    back = unpack(scheme, tensors, (rows, 192))
    assert same(back, rounded)
    assert back.shape == rounded.shape == (rows, 192)
    again = pack(scheme, back)
    assert all(torch.equal(_octets(again[key]), _octets(tensor)) for key, tensor in tensors.items())


def _octets(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("scheme", [scheme for scheme in schemes() if scheme.method in ("int8", "fp8", "packed")])
def test_scales_of_other_types_are_read(scheme: Scheme) -> None:
    """llm-compressor writes scales in the model's type."""
    tensors = pack(scheme, round_as(scheme, torch.randn(32, 192, generator=torch.Generator().manual_seed(1))))
    for dtype in (torch.bfloat16, torch.float16):
        stored = tensors["weight_scale"].to(dtype)
        back = unpack(scheme, tensors | {"weight_scale": stored}, (32, 192))
        assert not isinstance(back, Nf4 | LlmInt8)
        assert torch.equal(back.scale[0].reshape(-1), stored.float().reshape(-1)[: back.scale.shape[1]])


@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (33, 65), (1, 1), (8, 30)])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_of_any_size(rows: int, columns: int, bits: int) -> None:
    scheme = Scheme(method="packed", bits=bits, symmetric=False)
    rounded = round_groups(torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)), bits, -1, False)
    assert same(unpack(scheme, pack(scheme, rounded), (rows, columns)), rounded)


def test_blocks_of_nf4_may_cross_rows_and_end_short() -> None:
    weight = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    for double_quant in (False, True):
        scheme = Scheme(method="nf4", bits=4, double_quant=double_quant)
        rounded = round_nf4(weight, double_quant)
        back = unpack(scheme, pack(scheme, rounded), (3, 50))
        assert same(back, rounded) and float((back.dense(torch.float32) - weight).abs().max()) < 0.6


def test_a_last_group_may_be_short_with_act_order() -> None:
    """auto-gptq runs this, so it is read: 96 columns are two groups of 64, of whatever columns."""
    scheme = Scheme(method="gptq", bits=4, granularity="group", group_size=64, desc_act=True)
    weight = torch.randn(32, 96, generator=torch.Generator().manual_seed(4))
    grids = round_groups(weight[:, :64].repeat(1, 2), 4, 64, True)
    for columns in (torch.arange(96) // 64, (torch.arange(96) // 64).flip(0)):
        given_columns = columns.to(torch.int32)
        rounded = Affine(grids.codes[:, :96], grids.scale, None, given_columns, 4)
        back = unpack(scheme, pack(scheme, rounded), (32, 96))
        assert isinstance(back, Affine) and torch.equal(back.column_groups, columns)
        assert torch.equal(back.dense(torch.float32), rounded.dense(torch.float32))


@pytest.mark.parametrize("stored", range(1, 16))
def test_every_zero_point_of_gptq_v1(stored: int) -> None:
    scheme = Scheme(method="gptq", bits=4, symmetric=False)
    zero = torch.full((32, 1), stored - 8, dtype=torch.int16)
    zero[::2] = -7  # neighbours in a word must not touch each other
    rounded = Affine(torch.zeros(32, 32, dtype=torch.int8), torch.ones(32, 1), zero, None, 4)
    tensors = pack(scheme, rounded)
    assert int(tensors["qzeros"][0, 0]) & 0xFFFFFFFF == int(f"{stored - 1:x}0" * 4, 16)
    assert same(unpack(scheme, tensors, (32, 32)), rounded)


def test_gptq_refuses_what_its_files_cannot_hold() -> None:
    scheme = Scheme(method="gptq", bits=4, symmetric=False)
    codes = torch.zeros(32, 32, dtype=torch.int8)
    lowest = Affine(codes, torch.ones(32, 1), torch.full((32, 1), -8, dtype=torch.int16), None, 4)
    with pytest.raises(ModelError, match="zero point is 0"):
        pack(scheme, lowest)
    v2 = msgspec.structs.replace(scheme, zeros_v2=True)
    assert same(unpack(v2, pack(v2, lowest), (32, 32)), lowest)
    with pytest.raises(ModelError, match="beyond float16"):
        pack(scheme, Affine(codes, torch.full((32, 1), 1e6), None, None, 4))
    for rows, columns in ((40, 64), (64, 72)):
        rounded = round_groups(torch.ones(rows, columns), 4, -1, True)
        with pytest.raises(ModelError, match=f"multiples of 32, this is {rows} x {columns}"):
            pack(Scheme(method="gptq", bits=4), rounded)


def test_a_code_that_runs_over_is_our_own_mistake() -> None:
    rounded = Affine(torch.full((32, 32), 8, dtype=torch.int8), torch.ones(32, 1), None, None, 4)
    for scheme in (Scheme(method="gptq", bits=4), Scheme(method="packed", bits=4)):
        with pytest.raises(AssertionError, match="neighbour"):
            pack(scheme, rounded)
    with pytest.raises(AssertionError, match="no weight of nf4"):
        pack(Scheme(method="nf4", bits=4), rounded)
