"""
A checkpoint's weights as a decoder wants them: projections of the same input together, floats rounded where asked.

What becomes of them (packed for a kernel, a torch product) is the business of whoever asks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.formats.architecture import Architecture
from quant.formats.checkpoint import Checkpoint
from quant.formats.rounding import round_weight
from quant.formats.scheme import Activations, Scheme
from quant.formats.weights import LlmInt8, Nf4, Quantized, stack


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

    @property
    def architecture(self) -> Architecture:
        """Of the model."""
        return self.checkpoint.architecture

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
        """[vocab_size, hidden]; not to be asked for if the checkpoint is tied: it is the embedding then."""
        a = self.architecture
        return self.tensor("lm_head.weight", a.vocab_size, a.hidden)

    def norm(self) -> Tensor:
        """Of the last RMSNorm."""
        return self.tensor("model.norm.weight", self.architecture.hidden)

    def layer(self, index: int) -> LayerWeights:
        """Layer `index`."""
        a = self.architecture
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = (
            (f"{attention}.q_proj", a.query_size),
            (f"{attention}.k_proj", a.kv_size),
            (f"{attention}.v_proj", a.kv_size),
        )
        gate_up = ((f"{mlp}.gate_proj", a.intermediate), (f"{mlp}.up_proj", a.intermediate))
        return LayerWeights(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight", a.hidden),
            qkv=self._linear(qkv, a.hidden, bias=a.qkv_bias),
            query_norm=self.tensor(f"{attention}.q_norm.weight", a.head_dim) if a.qk_norm else None,
            key_norm=self.tensor(f"{attention}.k_norm.weight", a.head_dim) if a.qk_norm else None,
            output=self._linear(((f"{attention}.o_proj", a.hidden),), a.query_size, bias=a.output_bias),
            post_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", a.hidden),
            gate_up=self._linear(gate_up, a.hidden, bias=a.mlp_bias),
            down=self._linear(
                ((f"{mlp}.down_proj", a.hidden),),
                a.intermediate,
                bias=a.mlp_bias,
                mix=0 if self.scheme is None else self.scheme.mix,
            ),
        )

    def _linear(self, parts: tuple[tuple[str, int], ...], columns: int, *, bias: bool, mix: int = 0) -> Linear:
        """Projections (name, rows) of the same input."""
        weights = fused([self._weight(name, rows, columns) for name, rows in parts])
        return Linear(tuple(weights), self._biases(parts, expected=bias), mix)

    def _biases(self, parts: tuple[tuple[str, int], ...], *, expected: bool) -> Tensor | None:
        """All biases, as one.  Some converters write them, mostly zero, where the architecture has none."""
        if not expected and not any(self.checkpoint.has(f"{name}.bias") for name, _ in parts):
            return None
        found = [
            self.tensor(f"{name}.bias", rows)
            if expected or self.checkpoint.has(f"{name}.bias")
            else torch.zeros(rows, dtype=self.dtype)
            for name, rows in parts
        ]
        biases = torch.cat(found)
        return biases if expected or bool(biases.any()) else None

    def _weight(self, name: str, rows: int, columns: int) -> Tensor | Quantized:
        if self.rounding is None:
            weight = self.checkpoint.weight(name, (rows, columns), self.dtype)
        else:
            weight = round_weight(self.checkpoint.read(f"{name}.weight", (rows, columns), torch.float32), self.rounding)
        # These have no kernels: they become numbers here, where they can still be joined with others.
        return weight.dense(self.dtype) if isinstance(weight, Nf4 | LlmInt8) else weight


def fused(weights: Sequence[Tensor | Quantized]) -> list[Tensor | Quantized]:
    """Weights of the same input, one below the other, if they have a form in common; else as they are."""
    floats = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(floats) == len(weights):
        return [torch.cat(floats)]
    quantized = [weight for weight in weights if not isinstance(weight, Tensor)]
    stacked = stack(quantized) if len(quantized) == len(weights) else None
    return list(weights) if stacked is None else [stacked]
