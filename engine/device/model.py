"""
The decoder: RMSNorm, attention, RMSNorm, gated MLP, as often as there are layers.

Shapes: rows are the tokens of a step, whoever they belong to; only `Kernels.attend` knows about sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device.batch import Batch
from engine.device.kernels import Kernels, Product
from engine.device.kernels.products import JoinedProduct
from engine.device.kv import KvCache
from quant.formats.architecture import Architecture
from quant.formats.checkpoint import Checkpoint
from quant.formats.rounding import round_weight
from quant.formats.scheme import Scheme
from quant.formats.weights import LlmInt8, Nf4, Quantized, stack


@dataclass(frozen=True, slots=True)
class Layer:
    """Prepared weights of one layer."""

    input_norm: Tensor
    qkv: Product
    qk_norm: Tensor | None  # [query heads + key heads, head_dim]
    output: Product
    post_norm: Tensor
    gate_up: Product
    down: Product
    window: int


class Decoder:
    """A model in memory."""

    def __init__(
        self,
        architecture: Architecture,
        kernels: Kernels,
        *,
        embedding: Tensor,
        layers: tuple[Layer, ...],
        norm: Tensor,
        head: Product,
    ) -> None:
        self.architecture = architecture
        self.kernels = kernels
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head

    def forward(self, batch: Batch, kv: KvCache) -> Tensor:
        """Compute the batch's rows and write their keys and values: [padded rows, hidden], before the last norm."""
        a, kernels = self.architecture, self.kernels
        x = F.embedding(batch.tokens, self._embedding)
        turned = a.query_size + a.kv_size
        for layer, cache in zip(self._layers, kv.layers, strict=False):  # a shorter cache: the probe's
            qkv = layer.qkv(kernels.norm(x, layer.input_norm, a.norm_epsilon))
            heads = qkv[:, :turned].view(-1, a.heads + a.kv_heads, a.head_dim)
            if layer.qk_norm is not None:
                heads.copy_(kernels.norm(heads, layer.qk_norm, a.norm_epsilon))
            kernels.rotate(heads, batch.cos, batch.sin)
            attended = kernels.attend(qkv, cache, batch, window=layer.window, kv_heads=a.kv_heads)
            x = layer.output(attended, add=x)
            gated = kernels.gated(kernels.norm(x, layer.post_norm, a.norm_epsilon), layer.gate_up)
            x = layer.down(gated, add=x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """What follows the rows `x` of `forward`: float32 [rows, vocab_size]."""
        normed = self.kernels.norm(x, self._norm, self.architecture.norm_epsilon)
        return self._head(normed).float()


def load_decoder(
    checkpoint: Checkpoint, kernels: Kernels, dtype: torch.dtype, rounding: Scheme | None = None
) -> Decoder:
    """Read and prepare all weights; float ones of linear layers are rounded to `rounding`.  Raises ModelError."""
    a = checkpoint.architecture
    load = _Loader(checkpoint, kernels, dtype, rounding)
    embedding = load.tensor("model.embed_tokens.weight", a.vocab_size, a.hidden)
    head = embedding if checkpoint.tied else load.tensor("lm_head.weight", a.vocab_size, a.hidden)
    return Decoder(
        a,
        kernels,
        embedding=embedding,
        layers=tuple(_load_layer(load, layer) for layer in range(a.layers)),
        norm=load.tensor("model.norm.weight", a.hidden),
        head=kernels.prepare(head, None),
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    """How tensors become parts of a decoder."""

    checkpoint: Checkpoint
    kernels: Kernels
    dtype: torch.dtype
    rounding: Scheme | None

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor that stays what it is."""
        return self.checkpoint.read(name, shape, self.dtype)

    def linear(self, parts: tuple[tuple[str, int], ...], columns: int, *, bias: bool, mix: int = 0) -> Product:
        """Projections (name, rows) of the same input, as one product; `mix` as in `Kernels.prepare`."""
        weights = fused([self._weight(name, rows, columns) for name, rows in parts])
        biases = self._biases(parts, expected=bias)
        if len(weights) == 1:
            return self._prepare(weights[0], biases, mix)
        pieces = [None] * len(parts) if biases is None else list(biases.split([rows for _, rows in parts]))
        return JoinedProduct([self._prepare(weight, piece, mix) for weight, piece in zip(weights, pieces, strict=True)])

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

    @property
    def scheme(self) -> Scheme | None:
        """What the model is quantized to, in the end."""
        return self.rounding or self.checkpoint.scheme

    def _prepare(self, weight: Tensor | Quantized, bias: Tensor | None, mix: int) -> Product:
        scheme = self.scheme
        activations = "float" if scheme is None or isinstance(weight, Tensor) else scheme.activations
        return self.kernels.prepare(weight, bias, activations, mix)


def fused(weights: Sequence[Tensor | Quantized]) -> list[Tensor | Quantized]:
    """Weights of the same input, one below the other, if they have a form in common; else as they are."""
    floats = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(floats) == len(weights):
        return [torch.cat(floats)]
    quantized = [weight for weight in weights if not isinstance(weight, Tensor)]
    stacked = stack(quantized) if len(quantized) == len(weights) else None
    return list(weights) if stacked is None else [stacked]


def _load_layer(load: _Loader, layer: int) -> Layer:
    a = load.checkpoint.architecture
    prefix = f"model.layers.{layer}"
    qkv = (
        (f"{prefix}.self_attn.q_proj", a.query_size),
        (f"{prefix}.self_attn.k_proj", a.kv_size),
        (f"{prefix}.self_attn.v_proj", a.kv_size),
    )
    gate_up = ((f"{prefix}.mlp.gate_proj", a.intermediate), (f"{prefix}.mlp.up_proj", a.intermediate))
    down = ((f"{prefix}.mlp.down_proj", a.hidden),)
    qk_norm = None
    if a.qk_norm:
        query_norm = load.tensor(f"{prefix}.self_attn.q_norm.weight", a.head_dim).expand(a.heads, -1)
        key_norm = load.tensor(f"{prefix}.self_attn.k_norm.weight", a.head_dim).expand(a.kv_heads, -1)
        qk_norm = torch.cat((query_norm, key_norm))
    return Layer(
        input_norm=load.tensor(f"{prefix}.input_layernorm.weight", a.hidden),
        qkv=load.linear(qkv, a.hidden, bias=a.qkv_bias),
        qk_norm=qk_norm,
        output=load.linear(((f"{prefix}.self_attn.o_proj", a.hidden),), a.query_size, bias=a.output_bias),
        post_norm=load.tensor(f"{prefix}.post_attention_layernorm.weight", a.hidden),
        gate_up=load.linear(gate_up, a.hidden, bias=a.mlp_bias),
        down=load.linear(down, a.intermediate, bias=a.mlp_bias, mix=0 if load.scheme is None else load.scheme.mix),
        window=a.windows[layer],
    )
