"""
Which part of a model is whose: contiguous spans, as even as the formats of its weights allow.

    query heads     whole groups that share a key/value head; with more ranks than those, a part of one group each,
                    and the key/value head is held by every rank that needs it
    MLP channels    outputs of gate_proj and up_proj, inputs of down_proj
    vocabulary      outputs of the head, in the last stage; the embedding is held by all
    layers          of the stages of a pipeline

Rank `stage * tensor + place` holds part `place` of the layers of `stage` (Shoeybi et al. 2019, Megatron-LM, 3).
"""

import itertools
import math
from typing import NamedTuple

import msgspec

from engine.device.errors import ModelError
from quant.formats.architecture import Architecture
from quant.formats.mixing import LANES
from quant.formats.scheme import Scheme

UNEVEN_MAX = 1.1  # the largest part over the mean: up to it, a coarser cut that suits the formats is taken
_WIDE = 64  # channels to which the native kernels pad
_TILE = 32  # of the vocabulary


class Span(NamedTuple):
    """From `start` up to `stop`, without it."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many."""
        return self.stop - self.start

    def times(self, size: int) -> "Span":
        """The same in units `size` times as small."""
        return Span(self.start * size, self.stop * size)


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part."""

    ranks: int
    """How many there are."""
    heads: Span
    kv_heads: Span
    channels: Span
    vocab: Span
    layers: Span
    adds: bool
    """Whether it adds what is to be added once: the biases behind attention and MLP."""

    def of(self, whole: Architecture) -> Architecture:
        """What the rank computes, as an architecture; its vocabulary is that of the embedding, which is whole."""
        return msgspec.structs.replace(
            whole,
            layers=self.layers.length,
            windows=whole.windows[self.layers.start : self.layers.stop],
            heads=self.heads.length,
            kv_heads=self.kv_heads.length,
            intermediate=self.channels.length,
        )


def whole(architecture: Architecture) -> Shard:
    """All of it."""
    a = architecture
    return Shard(
        ranks=1,
        heads=Span(0, a.heads),
        kv_heads=Span(0, a.kv_heads),
        channels=Span(0, a.intermediate),
        vocab=Span(0, a.vocab_size),
        layers=Span(0, a.layers),
        adds=True,
    )


def shards(a: Architecture, scheme: Scheme | None, *, tensor: int = 1, pipeline: int = 1) -> tuple[Shard, ...]:
    """The part of each rank, by rank.  Raises ModelError with the numbers that would do."""
    if tensor > a.heads:
        raise ModelError(f"--tensor-parallel {tensor}: the model has {a.heads} query heads; choose 1 to {a.heads}")
    if pipeline > a.layers:
        raise ModelError(f"--pipeline-parallel {pipeline}: the model has {a.layers} layers; choose 1 to {a.layers}")
    units = _units(a.intermediate, scheme, tensor)
    heads, channels = _heads(a, tensor), even(a.intermediate, tensor, units)
    vocab = even(a.vocab_size, tensor, (_TILE, 1))
    return tuple(
        Shard(
            ranks=tensor * pipeline,
            heads=heads[place][0],
            kv_heads=heads[place][1],
            channels=channels[place],
            vocab=vocab[place] if layers.stop == a.layers else Span(0, 0),
            layers=layers,
            adds=place == 0,
        )
        for layers in even(a.layers, pipeline, (1,))
        for place in range(tensor)
    )


def even(count: int, parts: int, units: tuple[int, ...]) -> tuple[Span, ...]:
    """
    `count` things in `parts` spans, cut at multiples of one of `units`, which are in the order of preference.

    The first unit that gives even enough parts is taken; if none does, that which gives the most even ones.
    """
    assert 0 < parts <= count and units
    cuts = [_cut(count, parts, unit) for unit in units if -(-count // unit) >= parts]
    unevenness = [max(span.length for span in spans) * parts / count for spans in cuts]
    chosen = next((i for i, uneven in enumerate(unevenness) if uneven <= UNEVEN_MAX), None)
    return cuts[unevenness.index(min(unevenness)) if chosen is None else chosen]


def _cut(count: int, parts: int, unit: int) -> tuple[Span, ...]:
    pieces = -(-count // unit)
    edges = [min(count, -(-pieces * part // parts) * unit) for part in range(parts + 1)]
    return tuple(Span(start, stop) for start, stop in itertools.pairwise(edges))


def _units(intermediate: int, scheme: Scheme | None, tensor: int) -> tuple[int, ...]:
    """Where the MLP's channels may be cut, best first.  Raises ModelError."""
    block = scheme.mix * LANES if scheme is not None and scheme.mix else 1
    group = scheme.group_size if scheme is not None and scheme.group_size > 0 else 1
    if -(-intermediate // block) < tensor:
        blocks = intermediate // block
        raise ModelError(
            f"--tensor-parallel {tensor}: the weights of this model mix {block} channels of each MLP, and have {blocks}"
            f" times as many; choose 1 to {blocks}, or convert it without rotation"
        )
    wishes = (math.lcm(block, group, _WIDE), math.lcm(block, group), math.lcm(block, LANES), block)
    return tuple(unit for unit in dict.fromkeys(wishes) if -(-intermediate // unit) >= tensor)


def _heads(a: Architecture, tensor: int) -> list[tuple[Span, Span]]:
    """Query heads and the key/value heads that they look at, of each place."""
    group = a.heads // a.kv_heads
    if tensor <= a.kv_heads:
        return [(span.times(group), span) for span in even(a.kv_heads, tensor, (1,))]
    found = []
    for kv_head, places in enumerate(even(tensor, a.kv_heads, (1,))):
        for part in even(group, places.length, (1,)):
            start = kv_head * group
            found.append((Span(start + part.start, start + part.stop), Span(kv_head, kv_head + 1)))
    return found
