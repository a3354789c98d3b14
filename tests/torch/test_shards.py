"""
Which part of a model is whose, and weights in parts: the parts have the numbers of the whole.
"""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.device.errors import ModelError
from engine.device.form import choose_form
from engine.device.ranks.shard import Shard, Span, even, shards, whole
from engine.device.runner import needed_bytes
from engine.device.weights import Weights
from quant.formats.architecture import Architecture, Rope
from quant.formats.checkpoint import open_checkpoint
from quant.formats.mixing import LANES, mix, mix_points
from quant.formats.rounding import round_weight
from quant.formats.scheme import Scheme
from quant.formats.weights import Affine, Quantized, cut
from tests.torch.rounded import SCHEMES
from tests.torch.thread_ranks import options_of


def _architecture(*, heads: int, kv_heads: int, intermediate: int, vocab_size: int, layers: int = 4) -> Architecture:
    return Architecture(
        family="llama",
        layers=layers,
        hidden=64,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=16,
        vocab_size=vocab_size,
        context_max=64,
        norm_epsilon=1e-5,
        rope=Rope(),
        windows=tuple(range(layers)),
    )


@settings(deadline=None)
@given(st.data())
def test_parts_are_whole_together(data: st.DataObject) -> None:
    kv_heads, group = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    a = _architecture(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        intermediate=data.draw(st.integers(64, 600)),
        vocab_size=data.draw(st.integers(64, 600)),
        layers=data.draw(st.integers(1, 9)),
    )
    tensor, pipeline = data.draw(st.integers(1, a.heads)), data.draw(st.integers(1, a.layers))
    if data.draw(st.booleans()):
        tensor = 1
    else:
        pipeline = 1
    found = shards(a, data.draw(st.sampled_from([None, *SCHEMES.values()])), tensor=tensor, pipeline=pipeline)
    assert len(found) == tensor * pipeline
    for stage in range(pipeline):
        ranks = found[stage * tensor : (stage + 1) * tensor]
        assert len({rank.layers for rank in ranks}) == 1
        assert [rank.adds for rank in ranks] == [True] + [False] * (tensor - 1)
        _touch([rank.heads for rank in ranks], a.heads)
        _touch([rank.channels for rank in ranks], a.intermediate)
        if stage == pipeline - 1:
            _touch([rank.vocab for rank in ranks], a.vocab_size)
        else:
            assert {rank.vocab.length for rank in ranks} == {0}
        for rank in ranks:
            _sees_its_keys(rank, a)
    _touch([found[stage * tensor].layers for stage in range(pipeline)], a.layers)
    assert found[0].of(a).windows == tuple(range(found[0].layers.length))


def _touch(spans: list[Span], count: int) -> None:
    """One after the other, none empty, up to `count`."""
    assert spans[0].start == 0 and spans[-1].stop == count
    assert all(before.stop == after.start for before, after in itertools.pairwise(spans))
    assert all(span.length > 0 for span in spans)


def _sees_its_keys(rank: Shard, a: Architecture) -> None:
    """Query head i of a rank looks at the key/value head that it looked at in the whole model."""
    part, group = rank.of(a).checked(), a.heads // a.kv_heads
    own_group = part.heads // part.kv_heads
    for head in range(part.heads):
        assert rank.kv_heads.start + head // own_group == (rank.heads.start + head) // group


def test_one_rank_has_all() -> None:
    a = _architecture(heads=9, kv_heads=3, intermediate=1536, vocab_size=49152)
    assert shards(a, None) == (whole(a),)
    assert whole(a).of(a) == a


def test_the_default_model_by_two_three_and_four() -> None:
    """9 query heads, 3 key/value heads: two ranks are uneven, three even, of four two share a key/value head."""
    a = _architecture(heads=9, kv_heads=3, intermediate=1536, vocab_size=49152)
    assert [rank.heads.length for rank in shards(a, None, tensor=2)] == [6, 3]
    assert [rank.heads.length for rank in shards(a, None, tensor=3)] == [3, 3, 3]
    four = shards(a, None, tensor=4)
    assert [rank.heads.length for rank in four] == [2, 1, 3, 3]
    assert [rank.kv_heads for rank in four] == [(0, 1), (0, 1), (1, 2), (2, 3)]
    assert [rank.channels.length for rank in shards(a, None, tensor=3)] == [512] * 3
    assert [rank.vocab.length for rank in shards(a, None, tensor=3)] == [16384] * 3


def test_what_cannot_be_divided_is_refused_with_what_can() -> None:
    a = _architecture(heads=9, kv_heads=3, intermediate=1536, vocab_size=49152)
    with pytest.raises(ModelError, match="--tensor-parallel 10: the model has 9 query heads; choose 1 to 9"):
        shards(a, None, tensor=10)
    with pytest.raises(ModelError, match="--pipeline-parallel 5: the model has 4 layers; choose 1 to 4"):
        shards(a, None, pipeline=5)
    mixed = Scheme(method="int8", bits=8, mix=32)
    assert [rank.channels.length for rank in shards(a, mixed, tensor=3)] == [512] * 3
    with pytest.raises(ModelError, match="mix 512 channels of each MLP, and have 3 times as many; choose 1 to 3"):
        shards(a, mixed, tensor=4)


@given(st.integers(1, 400), st.integers(1, 12), st.lists(st.integers(1, 70), max_size=3))
def test_an_even_cut_is_even_where_a_unit_allows(count: int, parts: int, units: list[int]) -> None:
    assume(parts <= count)
    spans = even(count, parts, (*units, 1))
    _touch(list(spans), count)
    assert max(span.length for span in spans) <= max(1.1 * count / parts, -(-count // parts))


@given(st.integers(1, 3000), st.integers(1, 12))
def test_mixing_stays_inside_a_part(intermediate: int, parts: int) -> None:
    points = mix_points(intermediate, parts)
    if points and intermediate % (LANES * parts) == 0:
        assert intermediate // parts % (points * LANES) == 0
        x = torch.randn(2, intermediate)
        size = intermediate // parts
        in_parts = torch.cat([mix(part, points) for part in x.split(size, 1)], 1)
        assert torch.equal(in_parts, mix(x, points))


def _by_activation(weight: Affine) -> Affine:
    order = torch.randperm(weight.shape[1])
    return Affine(weight.codes, weight.scale, weight.zero, weight.column_groups[order].int(), weight.bits)


@pytest.mark.parametrize("name", [*SCHEMES, "gptq-act"])
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_a_part_of_a_weight_has_its_numbers(name: str, data: st.DataObject) -> None:
    rows, columns = data.draw(st.sampled_from([32, 64])), data.draw(st.sampled_from([64, 128, 192]))
    torch.manual_seed(rows + columns)
    weight: Quantized = round_weight(torch.randn(rows, columns), SCHEMES.get(name, SCHEMES["gptq-asym"]))
    if name == "gptq-act":
        assert isinstance(weight, Affine)
        weight = _by_activation(weight)
    first, start = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    last, stop = data.draw(st.integers(first + 1, rows)), data.draw(st.integers(start + 1, columns))
    part = cut(weight, slice(first, last), slice(start, stop))
    dense = part if isinstance(part, torch.Tensor) else part.dense(torch.float32)
    whole_dense = weight.dense(torch.float32)
    assert torch.equal(dense.float(), whole_dense[first:last, start:stop])
    if isinstance(part, Affine):
        assert part.codes.is_contiguous() and part.scale.is_contiguous()


def test_a_group_that_is_cut_in_the_middle_stays_a_group_for_the_kernels() -> None:
    """64 of the 128 columns that share a scale: groups of 64, which the 4-bit kernels know."""
    scheme = Scheme(method="gptq", bits=4, granularity="group", group_size=128)
    weight = round_weight(torch.randn(32, 512), scheme)
    part = cut(weight, slice(0, 32), slice(64, 256))
    assert isinstance(part, Affine) and part.columns is None and part.groups == 3


def test_the_embedding_is_whole_and_the_head_is_not(tiny_model: Path) -> None:

    checkpoint = open_checkpoint(tiny_model)
    parts = shards(checkpoint.architecture, None, tensor=2)
    heads = [Weights(checkpoint, torch.float32, None, part).head() for part in parts]
    assert torch.equal(torch.cat(heads), Weights(checkpoint, torch.float32).head())
    assert Weights(checkpoint, torch.float32, None, parts[1]).embedding().shape == (259, 96)


def test_ranks_together_need_what_one_does_and_an_embedding_each(tiny_model: Path) -> None:
    needed = []
    for tensor in (1, 2, 3):
        options = options_of(tiny_model, tensor=tensor)
        needed.append(needed_bytes(choose_form(open_checkpoint(tiny_model), options), 10, options))
    embedding, key_head = 259 * 96 * 4, 2 * 96 * 16 * 2 * 4 + 10 * 2 * 16 * 2 * 16 * 4
    assert [more - needed[0] for more in needed[1:]] == [embedding, 2 * embedding + key_head], "three share two heads"
