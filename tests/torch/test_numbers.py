"""
Rounding to each number format: how far off it may be, and what must never come out.
"""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quant.formats.bnb import round_llm_int8, round_nf4
from quant.formats.errors import ModelError
from quant.formats.numbers import (
    group_grid,
    groups_of,
    round_fp8,
    round_groups,
    round_int8,
    round_rows_fp8,
    round_rows_int8,
    round_to_grid,
)
from quant.formats.scheme import Granularity

ROUNDING = 1e-5  # relative, of float32 divisions and products; steps are far coarser
GROUP_SIZES = (-1, 32, 64, 192)
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "channel", "group")
ZERO_ROW = 3
seeds = st.integers(0, 2**31 - 1)
widths = st.sampled_from((1e-6, 1e-3, 0.02, 1.0, 300.0))
kinds = st.sampled_from(("normal", "heavy", "positive", "negative", "sparse"))


def make_weight(seed: int, width: float, kind: str, rows: int = 16, columns: int = 192) -> Tensor:
    """A seeded weight of that kind and width, with one row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    if kind == "heavy":
        weight = weight**3
    elif kind == "sparse":
        weight = weight * (torch.rand(rows, columns, generator=generator) < 0.05)
    elif kind != "normal":
        weight = weight.abs() * (1 if kind == "positive" else -1)
    weight[ZERO_ROW] = 0
    return weight * width


def off_by(weight: Tensor, dense: Tensor, step: Tensor) -> float:
    """The largest error in steps, less what float32 itself loses on numbers of that size."""
    loss = weight.abs() * ROUNDING
    return float((((weight - dense).abs() - loss) / step).max())


@given(seeds, widths, kinds, st.sampled_from(GRANULARITIES), st.sampled_from((32, 64, 192)))
@settings(max_examples=80, deadline=None)
def test_int8_is_off_by_half_a_step(
    seed: int, width: float, kind: str, granularity: Granularity, group_size: int
) -> None:
    weight = make_weight(seed, width, kind)
    rounded = round_int8(weight, granularity, group_size if granularity == "group" else -1)
    assert rounded.scale.shape == (16, 192 // group_size if granularity == "group" else 1)
    assert bool((rounded.scale > 0).all())
    assert off_by(weight, rounded.dense(torch.float32), rounded.scale[:, rounded.column_groups]) <= 0.5
    assert int(rounded.codes.min()) >= -127, "-128 has no opposite"
    assert not rounded.dense(torch.float32)[ZERO_ROW].any()
    if granularity == "tensor":
        assert bool((rounded.scale == rounded.scale[0, 0]).all())


@given(seeds, widths, kinds, st.sampled_from((4, 8)), st.sampled_from(GROUP_SIZES), st.booleans())
@settings(max_examples=120, deadline=None)
def test_groups_are_off_by_half_a_step(
    seed: int, width: float, kind: str, bits: int, group_size: int, symmetric: bool
) -> None:
    weight = make_weight(seed, width, kind)
    rounded = round_groups(weight, bits, group_size, symmetric)
    dense = rounded.dense(torch.float32)
    assert off_by(weight, dense, rounded.scale[:, rounded.column_groups]) <= 0.5
    assert torch.equal(rounded.scale.half().float(), rounded.scale), "GPTQ's files hold float16"
    assert bool((rounded.scale > 0).all())
    assert not dense[ZERO_ROW].any() and not dense[weight == 0].any()
    middle = 2 ** (bits - 1)
    assert int(rounded.codes.min()) >= -middle and int(rounded.codes.max()) < middle
    if rounded.zero is None:
        assert symmetric
    else:
        assert int(rounded.zero.min()) > -middle, "GPTQ v1 cannot store an unsigned zero point of 0"
        assert int(rounded.zero.max()) < middle


@given(seeds, widths, kinds, st.sampled_from((4, 8)))
@settings(max_examples=40, deadline=None)
def test_groups_beat_the_scale_of_auto_gptq(seed: int, width: float, kind: str, bits: int) -> None:
    """auto-gptq's step is 2 / 15 of the largest weight; ours is never coarser, float16 aside."""
    weight = make_weight(seed, width, kind)
    scale, _ = group_grid(weight, bits, True)
    theirs = 2 * weight.abs().amax(1) / (2**bits - 1)
    alive = theirs > 1e-4  # below, float16 gets coarse
    assert bool((scale <= theirs * (1 + 2**-10))[alive].all())


@given(seeds, widths, kinds, st.sampled_from(("tensor", "channel")))
@settings(max_examples=80, deadline=None)
def test_fp8_is_off_by_half_of_the_last_of_three_bits(
    seed: int, width: float, kind: str, granularity: Granularity
) -> None:
    weight = make_weight(seed, width, kind)
    rounded = round_fp8(weight, granularity)
    dense = rounded.dense(torch.float32)
    relative, smallest = 2.0**-4, 2.0**-10  # half a unit in the last place; half of the smallest subnormal number
    assert bool(((weight - dense).abs() <= weight.abs() * (relative + ROUNDING) + smallest * rounded.scale).all())
    assert not dense[ZERO_ROW].any()


@pytest.mark.parametrize("largest", [1e30, 3e38, 65504.0, 448.0, 464.0, 1e-40])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_fp8_never_becomes_nan(largest: float, granularity: Granularity) -> None:
    weight = torch.linspace(-1, 1, 64).repeat(4, 1) * largest
    rounded = round_fp8(weight, granularity)
    rows, row_scale = round_rows_fp8(weight)
    for values, scale in ((rounded.values, rounded.scale), (rows, row_scale)):
        assert bool(torch.isfinite(values.float() * scale).all())
    if largest > 1e-30:
        assert float(rounded.values.float().abs().max()) == 448


def test_a_scale_does_not_vanish_under_subnormal_weights() -> None:
    weight = torch.tensor([[1e-44, 0.0]])
    for rounded in (round_int8(weight, "channel"), round_fp8(weight, "channel")):
        assert bool((rounded.scale > 0).all())
        assert not rounded.dense(torch.float32).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extremes_reach_the_last_code(dtype: torch.dtype) -> None:
    weight = torch.tensor([[65504.0, -1.0], [-65504.0, 1.0]]).to(dtype)
    assert round_int8(weight, "channel").codes.tolist() == [[127, 0], [-127, 0]]
    codes, scale = round_rows_int8(weight)
    assert codes.tolist() == [[127, 0], [-127, 0]] and scale.dtype == torch.float32
    assert round_fp8(weight, "tensor").values.float()[:, 0].tolist() == [448, -448]


def test_weights_beyond_float16_saturate() -> None:
    for symmetric in (True, False):
        rounded = round_groups(torch.tensor([[1e30, -1e30], [1e30, 1e30], [-1e30, 0]]), 4, -1, symmetric)
        assert bool((rounded.scale == 65504).all())
        assert bool(torch.isfinite(rounded.dense(torch.float32)).all())


def test_weights_below_float16_have_the_smallest_step() -> None:
    for value in (1e-9, -1e-9, 1e-40, -1e-40):
        for symmetric in (True, False):
            rounded = round_groups(torch.tensor([[value, 0.0], [value, value]]), 4, -1, symmetric)
            assert bool((rounded.scale == 2.0**-24).all())
            assert not rounded.dense(torch.float32).any()


def test_a_grid_clamps_what_lies_beyond() -> None:
    scale, zero = torch.tensor([1.0]), torch.tensor([-3], dtype=torch.int16)
    assert round_to_grid(torch.tensor([[-99.0, 0.4, 99.0]]), scale, None, 4).tolist() == [[-8, 0, 7]]
    assert round_to_grid(torch.tensor([[-99.0, 0.4, 99.0]]), scale, zero, 4).tolist() == [[-8, -3, 7]]


@given(seeds, widths, kinds)
@settings(max_examples=40, deadline=None)
def test_rows_are_off_by_half_a_step(seed: int, width: float, kind: str) -> None:
    rows = make_weight(seed, width, kind)
    codes, scale = round_rows_int8(rows)
    assert int(codes.min()) >= -127 and scale.shape == (16, 1)
    assert not codes[ZERO_ROW].any() and float(scale[ZERO_ROW]) == 0
    assert bool(((rows - codes.float() * scale).abs() <= scale * 0.5 + rows.abs() * ROUNDING).all())
    values, scale = round_rows_fp8(rows)
    assert not values.float()[ZERO_ROW].any() and float(scale[ZERO_ROW]) == 0
    error = (rows - values.float() * scale).abs()
    assert bool((error <= rows.abs() * (2.0**-4 + ROUNDING) + 2.0**-10 * scale).all())


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_row_stays_broken_and_alone(broken: float) -> None:
    rows = torch.ones(3, 32)
    rows[1, 5] = broken
    for codes, scale in (round_rows_int8(rows), round_rows_fp8(rows)):
        product = codes.float() @ torch.ones(32, 1) * scale
        assert not bool(torch.isfinite(product[1]).any())
        assert product[[0, 2], 0].tolist() == pytest.approx([32, 32])


def test_a_row_alone_is_rounded_like_in_a_batch() -> None:
    rows = make_weight(1, 1.0, "heavy")
    codes, scale = round_rows_int8(rows)
    for row in range(len(rows)):
        alone, alone_scale = round_rows_int8(rows[row : row + 1])
        assert torch.equal(alone[0], codes[row]) and torch.equal(alone_scale[0], scale[row])


@given(seeds, widths, kinds, st.booleans(), st.sampled_from((torch.float32, torch.float16, torch.bfloat16)))
@settings(max_examples=40, deadline=None)
def test_nf4_is_off_by_half_a_gap(seed: int, width: float, kind: str, double_quant: bool, dtype: torch.dtype) -> None:
    weight = make_weight(seed, width, kind).to(dtype)
    rounded = round_nf4(weight, double_quant)
    plain = round_nf4(weight)
    assert torch.equal(plain.codes, rounded.codes) and rounded.dtype == dtype
    gap = float(plain.table.diff().max()) / 2
    largest = plain.absmax.repeat_interleave(64).reshape(weight.shape)
    exact = weight.float()
    error = (exact - plain.dense(torch.float32)).abs()
    assert bool((error <= largest * gap + exact.abs() * ROUNDING).all())
    assert not plain.dense(torch.float32)[ZERO_ROW].any()
    assert (rounded.nested is not None) == double_quant
    if rounded.nested is not None:  # 8 bits, dynamic: the coarsest gap of its table, of the largest deviation
        assert torch.equal(rounded.absmax, rounded.nested.dense())
        coarsest = float(rounded.nested.table.diff().max()) / 2 * float(rounded.nested.absmax.max())
        assert float((rounded.absmax - plain.absmax).abs().max()) <= coarsest * 1.01
        assert not rounded.dense(torch.float32)[ZERO_ROW].any()  # its code stands for 0, whatever the scale


@given(seeds, widths, kinds)
@settings(max_examples=40, deadline=None)
def test_llm_int8_is_off_by_half_a_step_of_float16(seed: int, width: float, kind: str) -> None:
    weight = make_weight(seed, width, kind).half()
    rounded = round_llm_int8(weight)
    assert int(rounded.codes.min()) >= -127
    assert not rounded.dense(torch.float32)[ZERO_ROW].any()
    step = rounded.absmax[:, None] / 127
    error = (weight.float() - rounded.dense(torch.float32)).abs()
    assert bool((error <= step * 0.5 + weight.float().abs() * ROUNDING).all())


def test_bitsandbytes_refusals() -> None:
    with pytest.raises(ModelError, match=r"beyond 65504"):
        round_llm_int8(torch.full((2, 4), 1e6))
    with pytest.raises(ModelError, match=r"3 x 5 has an odd number"):
        round_nf4(torch.ones(3, 5))


def test_without_bitsandbytes_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ModelError, match=r"pip install 'pellucid\[bnb\]'"):
        round_nf4(torch.ones(2, 32))


@pytest.mark.parametrize("group_size", [128, 0, -2, 7, 577])
def test_a_group_size_that_does_not_fit_names_those_that_do(group_size: int) -> None:
    with pytest.raises(ModelError) as caught:
        groups_of(576, group_size)
    assert str(caught.value).endswith("576 input columns: sizes that fit are 16, 32, 64, -1 (one group)")
    with pytest.raises(ModelError, match="do not divide 576"):
        round_int8(torch.ones(2, 576), "group", group_size)
    with pytest.raises(ModelError, match="do not divide 576"):
        round_groups(torch.ones(2, 576), 4, group_size, True)


def test_fp8_has_no_groups() -> None:
    with pytest.raises(ModelError, match="granularity channel or tensor"):
        round_fp8(torch.ones(2, 64), "group")


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_broken_weight_stays_broken(poison: float) -> None:
    """Its row, and no other: rounded at load, it would else become a row of zeros that nobody notices."""
    weight = torch.randn(4, 32)
    weight[2, 5] = poison
    for rounded in (round_int8(weight, "channel"), round_fp8(weight, "channel")):
        assert torch.isfinite(rounded.scale[:, 0]).tolist() == [True, True, False, True]
        assert torch.isfinite(rounded.dense(torch.float32)[[0, 1, 3]]).all()
