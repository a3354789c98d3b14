"""
The native products against exact arithmetic: what they round is rounded here too, the rest is float64 and int64.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.device.native.library import BF16, INT4, INT8
from engine.device.native.pack import GROUPS
from quant.formats.mixing import mix
from quant.formats.numbers import round_groups, round_int8
from quant.formats.weights import Affine
from tests.torch.every_scheme import shuffled
from tests.torch.kernels import every_isa, multiply, native, pack_one

STEP = 2.0**-24  # half a unit in the last place of float32, relative
SHAPES = ((1, 1, 1), (1, 32, 64), (2, 33, 65), (3, 31, 63), (5, 100, 40), (12, 64, 128), (13, 70, 200), (40, 96, 320))


def _codes(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """Rows rounded to int8 with one scale for each `group` columns: codes as float64, and the scales."""
    grouped = x.float().view(len(x), -1, group or x.shape[1])
    most = grouped.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 1e-30, torch.tensor(127.0) / most, 0.0)  # 127 / most is a reciprocal and a product
    return (grouped * inverse).round().double(), (most / 127).double()


def _random(rows: int, columns: int, seed: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp(torch.randn(rows, 1, generator=generator) * spread)
    return torch.randn(rows, columns, generator=generator) * scales


def _close(found: Tensor, exact: Tensor, size: Tensor, units: float) -> None:
    """`found` is off by no more than so many half units in the last place of `size`."""
    assert bool(torch.isfinite(found).all())
    off = ((found.double() - exact).abs() / (size * STEP).clamp_min(2.0**-140)).max()
    assert float(off) <= units, float(off)


def _check_int8(
    isa: str, weight: Affine, x: Tensor, bias: Tensor | None = None, threads: int = 1, points: int = 0
) -> None:
    codes, scales = _codes(mix(x, points))
    sums = codes[:, 0] @ weight.codes.double().T  # exact: far below 2 ** 53
    scale = (weight.scale[:, 0].float() * scales[:, 0].float()).double()  # one rounding, as the kernel has it
    exact = sums * scale + (0 if bias is None else bias.double())
    found = multiply(native(isa), weight, x, bias, threads=threads, mix=points)
    _close(found, exact, (sums * scale).abs() + exact.abs(), 2)  # an integer becomes a float; product and sum


@every_isa
@pytest.mark.parametrize(("rows", "outs", "ins"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_int8(isa: str, rows: int, outs: int, ins: int, threads: int) -> None:
    weight = round_int8(_random(outs, ins, 1), "channel")
    _check_int8(isa, weight, _random(rows, ins, 2), _random(1, outs, 3)[0] if rows % 2 else None, threads)


@every_isa
@given(rows=st.integers(1, 40), outs=st.integers(1, 100), ins=st.integers(1, 300), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_int8_of_any_shape(isa: str, rows: int, outs: int, ins: int, seed: int) -> None:
    """All codes that a file may hold, -128 too."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (outs, ins), generator=generator).to(torch.int8)
    codes[torch.rand(outs, ins, generator=generator) < 0.3] = -128
    weight = Affine(codes, torch.rand(outs, 1, generator=generator) + 1e-3, None, None, 8)
    _check_int8(isa, weight, _random(rows, ins, seed, 3.0), _random(1, outs, seed)[0], threads=1 + seed % 3)


@every_isa
@pytest.mark.parametrize("points", [2, 4, 8, 16, 32])
def test_int8_of_mixed_rows(isa: str, points: int) -> None:
    ins = points * 16 * 4  # a multiple of 64 too: the mix knows no padding
    _check_int8(isa, round_int8(_random(70, ins, 4), "channel"), _random(7, ins, 5), points=points)


@every_isa
def test_int8_at_its_limits(isa: str) -> None:
    """The largest sums: every product is -128 * 127 or 127 * 127, over more columns than any MLP here has."""
    weight = Affine(torch.full((32, 32768), -128, dtype=torch.int8), torch.ones(32, 1), None, None, 8)
    weight.codes[1::2] = 127
    _check_int8(isa, weight, torch.cat((torch.ones(2, 32768), -torch.ones(1, 32768))) * 127)


@every_isa
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-39, 1e-37, 1e-33, 1e-20, 1e20, 1e36])
def test_sizes_of_rows(isa: str, scale: float) -> None:
    """What is too small to be divided by becomes 0, with its sign lost and nothing else; no row disturbs another."""
    x = _random(4, 96, 6, 0.0)
    sizes = torch.tensor([scale, 1.0, scale, 0.0])[:, None]
    for weight in (round_int8(_random(40, 96, 7), "channel"), round_groups(_random(40, 96, 7), 4, 32, True)):
        found, plain = multiply(native(isa), weight, x * sizes), multiply(native(isa), weight, x)
        assert torch.equal(found[1], plain[1]) and not found[3].any()
        if scale > 1e-30:
            torch.testing.assert_close(found[[0, 2]] / scale, plain[[0, 2]], rtol=2e-2, atol=2e-2)
        else:
            assert float(found[[0, 2]].abs().max()) <= scale * 100


@every_isa
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_spoils_its_row_and_no_other(isa: str, poison: float) -> None:
    x = _random(15, 160, 8)
    bad = x.clone()
    bad[[0, 7], [3, 159]] = poison
    good = [row for row in range(15) if row not in (0, 7)]
    dense = _random(50, 160, 9)
    for weight in (
        round_int8(dense, "channel"),
        round_groups(dense, 4, 32, True),
        round_groups(dense, 4, 32, False),
        dense,
    ):
        found = multiply(native(isa), weight, bad)
        assert torch.equal(found[good], multiply(native(isa), weight, x)[good])
        assert not torch.isfinite(found[[0, 7]]).any()


def _check_int4(isa: str, weight: Affine, x: Tensor, bias: Tensor | None = None, threads: int = 1) -> None:
    """The scales of `weight` are float16 numbers, so that the kernel holds them exactly."""
    order = torch.argsort(weight.column_groups, stable=True)
    size = weight.shape[1] // weight.groups
    group = next(g for g in GROUPS if size % g == 0)
    codes, scales = _codes(x[:, order], group)
    grid = weight.codes.double() - (0 if weight.zero is None else weight.zero.double()[:, weight.column_groups])
    sums = torch.einsum("rgc,ogc->rog", codes, grid[:, order].reshape(len(grid), -1, group))
    terms = sums * weight.scale.double().repeat_interleave(size // group, 1) * scales[:, :, 0][:, None]
    exact = terms.sum(-1) + (0 if bias is None else bias.double())
    found = multiply(native(isa), weight, x, bias, threads=threads)
    _close(found, exact, terms.abs().sum(-1) + exact.abs(), 4 + terms.shape[-1])  # one rounding for each group


@every_isa
@pytest.mark.parametrize("group", [32, 64, 96, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [False, True])
def test_int4(isa: str, group: int, symmetric: bool, act_order: bool) -> None:
    for rows, outs, ins in ((1, 33, 384), (2, 64, 384), (5, 20, 384), (13, 100, 768), (40, 33, 384)):
        dense = _random(outs, ins, rows)
        weight = round_groups(dense, 4, group, symmetric)
        weight = shuffled(weight, dense) if act_order and weight.groups > 1 else weight
        assert (pack_one(native(isa), weight)[1].form, weight.bits) == (INT4, 4)
        _check_int4(isa, weight, _random(rows, ins, 1), _random(1, outs, 2)[0], threads=1 + rows % 2)


@every_isa
@given(
    rows=st.integers(1, 40), outs=st.integers(1, 70), groups=st.integers(1, 7),
    group=st.sampled_from([32, 64, 128]), symmetric=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_int4_of_any_shape(isa: str, rows: int, outs: int, groups: int, group: int, symmetric: bool, seed: int) -> None:
    """All codes and zero points, and scales far apart."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (outs, groups * group), generator=generator).to(torch.int8)
    zero = None if symmetric else torch.randint(-8, 9, (outs, groups), generator=generator).to(torch.int16)
    scale = torch.exp(torch.randn(outs, groups, generator=generator)).half().float()
    weight = Affine(codes, scale, zero, None, 4)
    _check_int4(isa, weight, _random(rows, groups * group, seed, 3.0), threads=1 + seed % 3)


@every_isa
@pytest.mark.parametrize("size", [1e-30, 1e-20, 3e-7, 1e5, 1e20])
def test_int4_scales_beyond_float16(isa: str, size: float) -> None:
    """A power of two of each channel takes them; what is left is float16, relative to the channel's largest."""
    weight = round_groups(_random(48, 128, 3), 4, 32, True)
    x = _random(5, 128, 4, 0.0)
    scaled = Affine(weight.codes, weight.scale * size, None, None, 4)
    off = (multiply(native(isa), scaled, x).double() / size - multiply(native(isa), weight, x)).abs()
    assert float((off / (x.abs() @ weight.dense(torch.float32).abs().T)).max()) < 2.0**-11


@every_isa
@given(rows=st.integers(1, 40), outs=st.integers(1, 100), ins=st.integers(1, 300), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_bf16(isa: str, rows: int, outs: int, ins: int, seed: int) -> None:
    """Products of bfloat16 are exact in float32; sums run along the input."""
    weight, x, bias = _random(outs, ins, seed).bfloat16(), _random(rows, ins, seed + 1, 3.0), _random(1, outs, seed)[0]
    rounded = x.bfloat16().double()
    exact = rounded @ weight.double().T + bias.double()
    size = rounded.abs() @ weight.double().abs().T + bias.abs().double()
    assert pack_one(native(isa), weight)[1].form == BF16
    _close(multiply(native(isa), weight, x, bias, threads=1 + seed % 3), exact, size, 4 + ins)


@every_isa
def test_a_row_does_not_know_its_neighbours(isa: str) -> None:
    """Bit by bit, for every number of rows, of threads, and every place of a row."""
    library, x = native(isa), _random(41, 320, 10, 2.0)
    dense = _random(77, 320, 11)
    shapes = (round_int8(dense, "channel"), round_groups(dense, 4, 32, True), round_groups(dense, 4, 64, False), dense)
    for weight in shapes:
        whole = multiply(library, weight, x)
        for count in range(1, 41):
            first = count * 7 % (42 - count)
            part = multiply(library, weight, x[first : first + count], threads=1 + count % 3)
            assert torch.equal(part, whole[first : first + count]), count


@every_isa
def test_forms(isa: str) -> None:
    """What the weights of a model become."""
    library, dense = native(isa), _random(40, 192, 12)
    assert pack_one(library, round_int8(dense, "channel"))[1].form == INT8
    for size, form, group in ((16, BF16, 0), (32, INT4, 32), (64, INT4, 64), (192, INT4, 64), (-1, INT4, 64)):
        found = pack_one(library, round_groups(dense, 4, size, True))[1]
        assert (found.form, found.group) == (form, group), size
    assert pack_one(library, dense)[1].form == BF16
