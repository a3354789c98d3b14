"""
One contract for all kernels: the formulas, in numpy and float64, over seeded shapes, ragged lengths and edge cases.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.device.batch import Batch, BatchBuilder, Group
from engine.device.kernels import Kernels
from engine.device.kernels.reference import ReferenceKernels
from engine.device.kernels.torch_fast import TorchFastKernels, _attend_group, _spans
from engine.device.kv import FloatLayer
from engine.plan import Slice, StepPlan
from quant.formats.architecture import Rope
from quant.formats.rope import RopeTable
from tests.torch.tiny import table

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
Float64 = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def _kernels(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if name == "reference":
        return ReferenceKernels()
    if name == "torch_fast_unpacked":  # as on a machine without oneDNN
        monkeypatch.setattr("engine.device.kernels.torch_fast.packs", lambda _dtype: False)
    return TorchFastKernels(dtype)


KERNELS = ("reference", "torch_fast", "torch_fast_unpacked")
SHAPES = ((2, 8, 8), (4, 96, 64), (6, 64, 130), (34, 50, 33), (128, 33, 96))


def _exact(tensor: Tensor) -> Float64:
    exact: Float64 = tensor.double().numpy()
    return exact


def _close(found: Tensor, expected: Float64, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(_exact(found) / scale, expected / scale, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("rows", "columns", "outs"), SHAPES)
def test_linear(
    name: str, dtype: torch.dtype, rows: int, columns: int, outs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = _kernels(name, dtype, monkeypatch)
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, columns).to(dtype), (torch.randn(outs, columns) / columns**0.5).to(dtype)
    bias, add = torch.randn(outs).to(dtype), torch.randn(rows, outs).to(dtype)
    product = _exact(x) @ _exact(weight).T
    before = add.clone()
    with torch.inference_mode():
        plain, biased = kernels.prepare(weight, None), kernels.prepare(weight, bias)
        _close(plain(x), product, dtype)
        _close(plain(x, add=add), product + _exact(add), dtype)
        _close(biased(x), product + _exact(bias), dtype)
        _close(biased(x, add=add), product + _exact(bias) + _exact(add), dtype)
    assert torch.equal(add, before), "the residual must not be overwritten"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("biased", [False, True])
def test_gated(name: str, dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = _kernels(name, dtype, monkeypatch)
    torch.manual_seed(3)
    x = torch.randn(6, 40).to(dtype)
    gate, up = torch.randn(2, 72, 40).mul(0.3).to(dtype).unbind(0)
    biases = torch.randn(2, 72).to(dtype).unbind(0)
    with torch.inference_mode():
        found = kernels.gated(x, kernels.prepare(torch.cat((gate, up)), torch.cat(biases) if biased else None))
    gates = _exact(x) @ _exact(gate).T + (_exact(biases[0]) if biased else 0)
    ups = _exact(x) @ _exact(up).T + (_exact(biases[1]) if biased else 0)
    _close(found, gates / (1 + np.exp(-gates)) * ups, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_norm(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = _kernels(name, dtype, monkeypatch)
    torch.manual_seed(4)
    for shape in ((2, 96), (5, 3, 16), (130, 33)):
        for scale in (1e-4, 1.0, 300.0):
            x, weight = (torch.randn(shape) * scale).to(dtype), torch.randn(shape[1:]).to(dtype)
            mean_square = (_exact(x) ** 2).mean(-1, keepdims=True)
            with torch.inference_mode():
                _close(kernels.norm(x, weight, 1e-5), _exact(x) / np.sqrt(mean_square + 1e-5) * _exact(weight), dtype)
    with torch.inference_mode():
        assert not kernels.norm(torch.zeros(2, 8, dtype=dtype), torch.ones(8, dtype=dtype), 1e-5).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_rotate(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In complex numbers: each pair turns by position * theta ** (-2i / head_dim)."""
    kernels = _kernels(name, dtype, monkeypatch)
    torch.manual_seed(5)
    wide = torch.randn(4, 5 * 16).to(dtype)
    heads = wide[:, : 3 * 16].view(4, 3, 16)  # a view, as in the decoder: the rest must stay
    positions = torch.tensor([0, 1, 77, 900])
    pairs = _exact(heads[..., :8]) + 1j * _exact(heads[..., 8:])
    turns = np.exp(1j * positions.numpy()[:, None, None] * 100.0 ** (-np.arange(8) / 8))
    expected = np.concatenate([(pairs * turns).real, (pairs * turns).imag], -1)
    rest = wide[:, 3 * 16 :].clone()
    with torch.inference_mode():
        kernels.rotate(heads, *RopeTable(Rope(theta=100.0), head_dim=16, context_max=1024).rows(positions))
    tolerance = {torch.float32: 2e-4, torch.bfloat16: 3e-2}[dtype]  # the angle itself is float32
    np.testing.assert_allclose(_exact(heads), expected, atol=tolerance, rtol=0)
    assert torch.equal(wide[:, 3 * 16 :], rest)


QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCKS = 6, 2, 16, 64
RAGGED: tuple[tuple[tuple[int, int], ...], ...] = (  # (start, count) of each slice
    ((0, 1),),
    ((0, 1), (15, 1), (16, 1), (200, 1)),
    ((0, 50), (31, 1), (3, 3), (7, 3)),
    ((100, 90), (0, 2), (60, 1)),
    ((0, 16), (16, 16), (32, 16), (1, 17)),
)


def _builder(dtype: torch.dtype, windows: frozenset[int], *, coarse_keys: bool = False) -> BatchBuilder:
    return BatchBuilder(
        rope=RopeTable(Rope(), head_dim=HEAD_DIM, context_max=512),
        windows=windows,
        query_group=QUERY_HEADS // KV_HEADS,
        blocks_max=BLOCKS,
        block_slots=16,
        context_max=512,
        vocab_size=100,
        dtype=dtype,
        row_tile=2,
        coarse_keys=coarse_keys,
    )


def _plan(lengths: tuple[tuple[int, int], ...]) -> StepPlan:
    pieces, block = [], 1  # block 0 is nobody's
    for number, (start, count) in enumerate(lengths):
        blocks = table(block, start + count)
        block += len(blocks)
        pieces.append(Slice(sequence=number, start=start, tokens=(7,) * count, blocks=blocks[::-1]))
    return StepPlan(step_id=1, slices=tuple(pieces))


def _attended(cache: Tensor, queries: Tensor, piece: Slice, window: int) -> Float64:
    """Textbook attention of one slice over what the cache holds after the write."""
    total = piece.start + len(piece.tokens)
    pairs = _exact(cache)[list(piece.blocks)].reshape(-1, 2, KV_HEADS, HEAD_DIM)[:total]
    rows = []
    for position, query in zip(range(piece.start, total), _exact(queries), strict=True):
        first = max(0, position - window + 1) if window else 0
        heads = []
        for head in range(QUERY_HEADS):
            keys, values = (pairs[first : position + 1, part, head * KV_HEADS // QUERY_HEADS] for part in (0, 1))
            scores = keys @ query[head * HEAD_DIM : (head + 1) * HEAD_DIM] / HEAD_DIM**0.5
            weights = np.exp(scores - scores.max())
            heads.append(weights / weights.sum() @ values)
        rows.append(np.concatenate(heads))
    return np.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("coarse", [False, True])
def test_attend(name: str, dtype: torch.dtype, window: int, coarse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = _kernels(name, dtype, monkeypatch)
    builder = _builder(dtype, frozenset({window}), coarse_keys=coarse)
    for seed, lengths in enumerate(RAGGED):
        torch.manual_seed(seed)
        plan = _plan(lengths)
        batch = builder.build(plan)
        cache = torch.randn(BLOCKS, 16, 2, KV_HEADS, HEAD_DIM).to(dtype)
        before = cache.clone()
        qkv = torch.randn(len(batch.tokens), (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)
        with torch.inference_mode():
            out = kernels.attend(qkv, FloatLayer(cache), batch, window=window, kv_heads=KV_HEADS)
        _check_writes(before, cache, qkv, batch)
        for piece, last in zip(plan.slices, batch.last_rows, strict=True):
            rows = slice(last + 1 - len(piece.tokens), last + 1)
            queries = qkv[rows, : QUERY_HEADS * HEAD_DIM]
            _close(out[rows], _attended(cache, queries, piece, window), dtype)


def _check_writes(before: Tensor, cache: Tensor, qkv: Tensor, batch: Batch) -> None:
    """New keys and values are where they belong, and nothing else has changed."""
    expected = before.clone().view(BLOCKS * 16, -1)
    expected[batch.slots] = qkv[: batch.rows, QUERY_HEADS * HEAD_DIM :]
    assert torch.equal(cache.view(BLOCKS * 16, -1), expected)


@pytest.mark.parametrize("name", KERNELS)
def test_poison_in_anothers_block_is_not_touched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 * NaN is NaN: a padded block table must not lead to a neighbour's memory."""
    kernels = _kernels(name, torch.float32, monkeypatch)
    plan = _plan(((200, 1), (170, 1), (0, 5)))
    batch = _builder(torch.float32, frozenset({0})).build(plan)
    cache = torch.full((BLOCKS, 16, 2, KV_HEADS, HEAD_DIM), float("nan"))
    for piece in plan.slices:
        cache[list(piece.blocks)] = 1.0
    qkv = torch.randn(len(batch.tokens), (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM)
    with torch.inference_mode():
        out = kernels.attend(qkv, FloatLayer(cache), batch, window=0, kv_heads=KV_HEADS)
    assert torch.isfinite(out[: batch.rows]).all()


@pytest.fixture
def three_threads() -> Iterator[None]:
    """A number of threads that divides no usual tensor evenly."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1000, 33000])
@pytest.mark.usefixtures("three_threads")
def test_a_row_has_the_same_bits_among_others(dtype: torch.dtype, inner: int) -> None:
    """Large enough that torch divides the work among threads."""
    kernels = TorchFastKernels(dtype)
    torch.manual_seed(8)
    rows, columns = (256, 200) if inner < 10000 else (70, 24)
    x, add = torch.randn(rows, columns).to(dtype), torch.randn(rows, 96).to(dtype)
    head_dim = columns // 4
    cos, sin = RopeTable(Rope(), head_dim=head_dim, context_max=rows).rows(torch.arange(rows))
    with torch.inference_mode():
        gate_up = kernels.prepare((torch.randn(2 * inner, columns) * 0.2).to(dtype), None)
        linear = kernels.prepare(torch.randn(96, columns).to(dtype), None)
        weight = torch.randn(columns).to(dtype)

        def all_of(part: slice) -> tuple[Tensor, ...]:
            heads = x[part].clone().view(-1, 4, head_dim)
            kernels.rotate(heads, cos[part], sin[part])
            one = x[part].contiguous()
            return (
                linear(one, add=add[part].contiguous()),
                kernels.gated(one, gate_up),
                kernels.norm(one, weight, 1e-5),
                heads,
            )

        expected = all_of(slice(0, rows))
        for start, stop in ((0, 6), (10, 18), (3, 67), (rows - 34, rows), (0, rows - 2), (2, rows)):
            for found, whole in zip(all_of(slice(start, stop)), expected, strict=True):
                assert torch.equal(found, whole[start:stop]), (start, stop)


def test_spans_give_each_thread_whole_rows() -> None:
    for threads in (1, 2, 3, 7, 64):
        for columns in (1, 96, 1536, 14336, 16384):
            for rows in (1, 2, 6, 34, 128, 511, 512):
                spans = list(_spans(rows, columns, threads))
                assert [row for start, stop in spans for row in range(start, stop)] == list(range(rows))
                for start, stop in spans:
                    count = stop - start
                    shares = min(threads, -(-count * columns // 32768))
                    assert count % max(1, shares) == 0


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_lone_sequence_is_attended_to_as_in_company(kv_heads: int) -> None:
    """
    Also with one key head, where torch has a single task and would cut that up for its threads.

    Then some two in a thousand of such calls would differ, each in a few elements by one rounding.
    """
    sequences, rows, keys, head_dim = 6, 16, 16, 64
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for seed in range(1200):
            generator = torch.Generator().manual_seed(seed)
            queries = torch.randn(sequences, kv_heads * rows * head_dim, generator=generator).bfloat16()
            pairs = torch.randn(sequences, keys, 2, kv_heads, head_dim, generator=generator).bfloat16()
            mask = torch.zeros(sequences, 1, 1, keys).bfloat16()
            mask[:, :, :, 1 + seed % keys :] = float("-inf")
            found = []
            for count in (1, sequences):
                group = Group(0, count, 1, 1, 1, torch.arange(count), 1, torch.arange(rows), {0: mask[:count]})
                out = torch.empty(count, queries.shape[1], dtype=torch.bfloat16)
                _attend_group(queries[:count], pairs[:count], group, mask[:count], out)
                found.append(out[0])
            assert torch.equal(*found), seed
    finally:
        torch.set_num_threads(before)
