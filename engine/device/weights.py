"""
A checkpoint's weights as a decoder wants them: projections of the same input together, floats rounded where asked.

What becomes of them (packed for a kernel, a torch product) is the business of whoever asks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.device.ranks.shard import Shard, Span, whole
from quant.formats.architecture import Architecture
from quant.formats.checkpoint import Checkpoint
from quant.formats.rounding import round_weight
from quant.formats.scheme import Activations, Scheme
from quant.formats.weights import LlmInt8, Nf4, Quantized, cut, stack


@dataclass(frozen=True, slots=True)
class Linear:
    """Projections of the same input, one below the other, as one weight if they have a form in common."""

    weights: tuple[Tensor | Quantized, ...]  # [out, in] each
    bias: Tensor | None  # of all
    mix: int = 0  # points of the Hadamard transform that the input goes through first

    def biases(self) -> list[Tensor | None]:
        """Of each weight."""
        if self.bias is None:
            return [None] * len(self.weights)
        return list(self.bias.split([weight.shape[0] for weight in self.weights]))


class Projection(NamedTuple):
    """A weight [outs, ins] of the checkpoint, and what of it is wanted."""

    name: str
    outs: int
    ins: int
    rows: Span
    columns: Span

    @property
    def is_whole(self) -> bool:
        """Whether that is all."""
        return self.rows.length == self.outs and self.columns.length == self.ins


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """What a model is made of, read as it is asked for.  Its methods raise ModelError."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    rounding: Scheme | None = None  # what float weights of linear layers are rounded to
    shard: Shard | None = None  # what of it is read; None: all

    @property
    def part(self) -> Shard:
        """What of it is read."""
        return whole(self.checkpoint.architecture) if self.shard is None else self.shard

    @property
    def architecture(self) -> Architecture:
        """Of what is read."""
        return self.part.of(self.checkpoint.architecture)

    @property
    def scheme(self) -> Scheme | None:
        """What the model is quantized to, in the end."""
        return self.rounding or self.checkpoint.scheme

    def activations(self, weight: Tensor | Quantized) -> Activations:
        """What the rows are rounded to that meet `weight`."""
        return "float" if self.scheme is None or isinstance(weight, Tensor) else self.scheme.activations

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor that stays what it is."""
        return self.checkpoint.read(name, shape, self.dtype)

    def embedding(self) -> Tensor:
        """[vocab_size, hidden]"""
        a = self.architecture
        return self.tensor("model.embed_tokens.weight", a.vocab_size, a.hidden)

    def head(self) -> Tensor:
        """[vocabulary of the part, hidden]; not to be asked for by a stage that has none of it."""
        a, vocab = self.architecture, self.part.vocab
        all_rows = self.embedding() if self.checkpoint.tied else self.tensor("lm_head.weight", a.vocab_size, a.hidden)
        return all_rows if vocab.length == a.vocab_size else all_rows[vocab.start : vocab.stop].contiguous()

    def norm(self) -> Tensor:
        """Of the last RMSNorm."""
        return self.tensor("model.norm.weight", self.architecture.hidden)

    def layer(self, index: int) -> LayerWeights:
        """Layer `index` of those that are read."""
        a, part = self.checkpoint.architecture, self.part
        prefix = f"model.layers.{part.layers.start + index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        queries, keys = part.heads.times(a.head_dim), part.kv_heads.times(a.head_dim)
        hidden, channels = Span(0, a.hidden), part.channels
        qkv = (
            Projection(f"{attention}.q_proj", a.query_size, a.hidden, queries, hidden),
            Projection(f"{attention}.k_proj", a.kv_size, a.hidden, keys, hidden),
            Projection(f"{attention}.v_proj", a.kv_size, a.hidden, keys, hidden),
        )
        gate_up = tuple(
            Projection(f"{mlp}.{name}_proj", a.intermediate, a.hidden, channels, hidden) for name in ("gate", "up")
        )
        output = Projection(f"{attention}.o_proj", a.hidden, a.query_size, hidden, queries)
        down = Projection(f"{mlp}.down_proj", a.hidden, a.intermediate, hidden, channels)
        return LayerWeights(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight", a.hidden),
            qkv=self._linear(qkv, bias=a.qkv_bias),
            query_norm=self.tensor(f"{attention}.q_norm.weight", a.head_dim) if a.qk_norm else None,
            key_norm=self.tensor(f"{attention}.k_norm.weight", a.head_dim) if a.qk_norm else None,
            output=self._added(self._linear((output,), bias=a.output_bias)),
            post_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", a.hidden),
            gate_up=self._linear(gate_up, bias=a.mlp_bias),
            down=self._added(self._linear((down,), bias=a.mlp_bias, mix=0 if self.scheme is None else self.scheme.mix)),
        )

    def _linear(self, parts: tuple[Projection, ...], *, bias: bool, mix: int = 0) -> Linear:
        """Projections of the same input."""
        weights = fused([self._weight(part) for part in parts])
        return Linear(tuple(weights), self._biases(parts, expected=bias), mix)

    def _added(self, linear: Linear) -> Linear:
        """One whose outputs are summed over ranks: its bias is added by one of them."""
        return linear if self.part.adds else replace(linear, bias=None)

    def _biases(self, parts: tuple[Projection, ...], *, expected: bool) -> Tensor | None:
        """All biases, as one.  Some converters write them, mostly zero, where the architecture has none."""
        if not expected and not any(self.checkpoint.has(f"{part.name}.bias") for part in parts):
            return None
        found = [
            self.tensor(f"{part.name}.bias", part.outs)[slice(*part.rows)]
            if expected or self.checkpoint.has(f"{part.name}.bias")
            else torch.zeros(part.rows.length, dtype=self.dtype)
            for part in parts
        ]
        biases = torch.cat(found)
        return biases if expected or bool(biases.any()) else None

    def _weight(self, part: Projection) -> Tensor | Quantized:
        shape = (part.outs, part.ins)
        if self.rounding is None:
            weight = self.checkpoint.weight(part.name, shape, self.dtype)
        else:
            weight = round_weight(self.checkpoint.read(f"{part.name}.weight", shape, torch.float32), self.rounding)
        # These have no kernels: they become numbers here, where they can still be joined with others.
        known = weight.dense(self.dtype) if isinstance(weight, Nf4 | LlmInt8) else weight
        return known if part.is_whole else cut(known, slice(*part.rows), slice(*part.columns))


def fused(weights: Sequence[Tensor | Quantized]) -> list[Tensor | Quantized]:
    """Weights of the same input, one below the other, if they have a form in common; else as they are."""
    floats = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(floats) == len(weights):
        return [torch.cat(floats)]
    quantized = [weight for weight in weights if not isinstance(weight, Tensor)]
    stacked = stack(quantized) if len(quantized) == len(weights) else None
    return list(weights) if stacked is None else [stacked]
