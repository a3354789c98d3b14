"""
Products with quantized weights: the formula in float64, and a row's bits among others.
"""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from engine.device.kernels import Kernels, Product
from engine.device.kernels.products import (
    FloatProduct,
    Int4Product,
    Int8Product,
    JoinedProduct,
    RoundedProduct,
    int_mm_is_exact,
    multiply_exactly,
    takes_int4,
)
from engine.device.kernels.reference import ReferenceKernels
from engine.device.kernels.torch_fast import TorchFastKernels
from quant.formats.numbers import round_fp8, round_groups, round_int8, round_rows_fp8, round_rows_int8
from quant.formats.scheme import Activations
from quant.formats.weights import Affine, Quantized

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
ROWS, COLUMNS, OUTS = 40, 128, 48


def _weight(seed: int, outs: int = OUTS, columns: int = COLUMNS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outs, columns, generator=generator) / math.sqrt(columns)


def _act_order(weight: Affine, seed: int) -> Affine:
    """The same codes with their groups spread over the columns, as activation order leaves them."""
    generator = torch.Generator().manual_seed(seed)
    columns = weight.column_groups[torch.randperm(weight.shape[1], generator=generator)]
    return Affine(weight.codes, weight.scale, weight.zero, columns.int(), weight.bits)


QUANTIZED: dict[str, tuple[Quantized, Activations]] = {
    "int8": (round_int8(_weight(1), "channel"), "int8"),
    "int8-tensor": (round_int8(_weight(2), "tensor"), "int8"),
    "int8-group": (round_int8(_weight(3), "group", 32), "int8"),
    "fp8": (round_fp8(_weight(4), "channel"), "fp8"),
    "fp8-tensor": (round_fp8(_weight(5), "tensor"), "fp8"),
    "gptq-g32": (round_groups(_weight(6), 4, 32, True), "float"),
    "gptq-g64-asym": (round_groups(_weight(7), 4, 64, False), "float"),
    "gptq-channel": (round_groups(_weight(8), 4, -1, True), "float"),
    "gptq-act": (_act_order(round_groups(_weight(9), 4, 32, False), 9), "float"),
    "gptq-8bit": (round_groups(_weight(10), 8, 32, False), "float"),
}
FORMS: dict[str, tuple[type[Product], type[Product]]] = {  # in float32, in bfloat16
    "int8": (Int8Product, Int8Product),
    "int8-tensor": (Int8Product, Int8Product),
    "int8-group": (RoundedProduct, RoundedProduct),
    "fp8": (RoundedProduct, RoundedProduct),
    "fp8-tensor": (RoundedProduct, RoundedProduct),
    "gptq-8bit": (FloatProduct, FloatProduct),
}


def _rounded(x: Tensor, activations: Activations) -> Tensor:
    if activations == "float":
        return x.double()
    codes, scale = (round_rows_int8 if activations == "int8" else round_rows_fp8)(x)
    return codes.double() * scale.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("kind", ["reference", "fast"])
def test_the_formula(name: str, dtype: torch.dtype, kind: str) -> None:
    weight, activations = QUANTIZED[name]
    kernels: Kernels = ReferenceKernels() if kind == "reference" else TorchFastKernels(dtype)
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
    bias, add = (torch.randn(shape, generator=generator).to(dtype) for shape in ((OUTS,), (ROWS, OUTS)))
    expected = _rounded(x, activations) @ weight.dense(torch.float64).T
    before = add.clone()
    with torch.inference_mode():
        plain, biased = kernels.prepare(weight, None, activations), kernels.prepare(weight, bias, activations)
        found = {
            "plain": (plain(x), expected),
            "residual": (plain(x, add=add), expected + add.double()),
            "bias": (biased(x), expected + bias.double()),
            "both": (biased(x, add=add), expected + bias.double() + add.double()),
        }
    for what, (y, wanted) in found.items():
        assert y.dtype == dtype
        error = (y.double() - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCE[dtype], f"{what}: {error:.1e}"
    assert torch.equal(add, before), "the residual must not be overwritten"
    if kind == "fast":
        form = FORMS.get(name, (FloatProduct, Int4Product))[dtype == torch.bfloat16]
        assert isinstance(plain, form), f"{name} became {type(plain).__name__}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in QUANTIZED if name not in ("int8-group", "fp8", "fp8-tensor")])
def test_a_row_has_the_same_bits_among_others(name: str, dtype: torch.dtype) -> None:
    weight, activations = QUANTIZED[name]
    x = torch.randn(70, COLUMNS, generator=torch.Generator().manual_seed(12)).to(dtype)
    with torch.inference_mode():
        product = TorchFastKernels(dtype).prepare(weight, None, activations)
        whole = product(x)
        for start, stop in ((0, 2), (5, 11), (33, 67), (64, 70)):
            assert torch.equal(product(x[start:stop].contiguous()), whole[start:stop]), (start, stop)


def test_a_row_that_is_no_number_stays_none_and_alone() -> None:
    weight, activations = QUANTIZED["int8"]
    x = torch.randn(6, COLUMNS)
    x[2, 5], x[4, 7] = float("nan"), float("inf")
    with torch.inference_mode():
        y = TorchFastKernels(torch.float32).prepare(weight, None, activations)(x)
    finite = torch.isfinite(y).all(1).tolist()
    assert finite == [True, True, False, True, False, True]


def test_int8_sums_are_exact_where_float32_is_not() -> None:
    """3000 products of 127 * 127 are beyond 2 ** 24."""
    x, weight = torch.full((3, 3000), 127, dtype=torch.int8), torch.full((32, 3000), 127, dtype=torch.int8)
    weight[::2, ::3] = -126
    expected = (x.long() @ weight.long().T).int()
    assert expected.abs().max() > 2**24
    assert torch.equal(multiply_exactly(x, weight.T), expected)
    if int_mm_is_exact():
        assert torch.equal(torch._int_mm(x, weight.T), expected)


EXACT = """
import torch
from engine.device.kernels.products import Int8Product, int_mm_is_exact
from quant.formats.weights import Affine
codes = torch.full((32, 96), 127, dtype=torch.int8)
with torch.inference_mode():
    y = Int8Product(Affine(codes, torch.ones(32, 1), None, None, 8), None)(torch.full((4, 96), 127.0))
print(int_mm_is_exact(), bool((y == 96 * 127 * 127).all()))
"""


def test_a_machine_without_vnni_gives_the_same_integers() -> None:
    """Its library saturates in 16 bits on the way: that has to be found out, and avoided."""
    environ = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-c", EXACT]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[1] == "True", done.stdout


def test_joined_products_are_side_by_side() -> None:
    first, second = _weight(20, 16), _weight(21, 48)
    x, add = torch.randn(5, COLUMNS), torch.randn(5, 64)
    kernels = TorchFastKernels(torch.float32)
    with torch.inference_mode():
        joined = JoinedProduct([kernels.prepare(first, None), kernels.prepare(round_int8(second, "channel"), None)])
        expected = torch.cat((x @ first.T, x @ round_int8(second, "channel").dense(torch.float32).T), 1)
        torch.testing.assert_close(joined(x), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(joined(x, add=add), expected + add, atol=1e-5, rtol=0)


def test_what_the_4_bit_kernel_does_not_take_is_dequantized() -> None:
    odd = round_groups(_weight(30, outs=40, columns=96), 4, 48, True)
    assert not takes_int4(odd)
    lopsided = Affine(odd.codes[:32], odd.scale[:32], None, torch.tensor([0] * 90 + [1] * 6, dtype=torch.int32), 4)
    assert not takes_int4(lopsided)
    x = torch.randn(3, 96).bfloat16()
    with torch.inference_mode():
        y = TorchFastKernels(torch.bfloat16).prepare(odd, None)(x)
    torch.testing.assert_close(y.float(), x.float() @ odd.dense(torch.float32).T, atol=0.05, rtol=0)
