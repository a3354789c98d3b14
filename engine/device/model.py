"""
The decoder: RMSNorm, attention, RMSNorm, gated MLP, as often as there are layers.

Shapes: rows are the tokens of a step, whoever they belong to; only `Kernels.attend` knows about sequences.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device.batch import Batch
from engine.device.kernels import Kernels, Linear
from engine.device.kv import KvCache
from quant.formats.architecture import Architecture
from quant.formats.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    """Prepared weights of one layer."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [query heads + key heads, head_dim]
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
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
        head: Linear,
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
            qkv = kernels.linear(kernels.norm(x, layer.input_norm, a.norm_epsilon), layer.qkv)
            heads = qkv[:, :turned].view(-1, a.heads + a.kv_heads, a.head_dim)
            if layer.qk_norm is not None:
                heads.copy_(kernels.norm(heads, layer.qk_norm, a.norm_epsilon))
            kernels.rotate(heads, batch.cos, batch.sin)
            attended = kernels.attend(qkv, cache, batch, window=layer.window, kv_heads=a.kv_heads)
            x = kernels.linear(attended, layer.output, add=x)
            gated = kernels.gated(kernels.norm(x, layer.post_norm, a.norm_epsilon), layer.gate_up)
            x = kernels.linear(gated, layer.down, add=x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """What follows the rows `x` of `forward`: float32 [rows, vocab_size]."""
        normed = self.kernels.norm(x, self._norm, self.architecture.norm_epsilon)
        return self.kernels.linear(normed, self._head).float()


def load_decoder(checkpoint: Checkpoint, kernels: Kernels, dtype: torch.dtype) -> Decoder:
    """Read and prepare all weights.  Raises ModelError."""
    a = checkpoint.architecture

    def read(name: str, *shape: int) -> Tensor:
        return checkpoint.read(name, shape, dtype)

    embedding = read("model.embed_tokens.weight", a.vocab_size, a.hidden)
    head = embedding if checkpoint.tied else read("lm_head.weight", a.vocab_size, a.hidden)
    return Decoder(
        a,
        kernels,
        embedding=embedding,
        layers=tuple(_load_layer(checkpoint, kernels, dtype, layer) for layer in range(a.layers)),
        norm=read("model.norm.weight", a.hidden),
        head=kernels.prepare(head, None),
    )


def _load_layer(checkpoint: Checkpoint, kernels: Kernels, dtype: torch.dtype, layer: int) -> Layer:
    a = checkpoint.architecture
    prefix = f"model.layers.{layer}"

    def read(name: str, *shape: int) -> Tensor:
        return checkpoint.read(f"{prefix}.{name}", shape, dtype)

    def linear(parts: tuple[tuple[str, int], ...], columns: int, *, bias: bool) -> Linear:
        """Projections of the same input, as one."""
        weight = torch.cat([read(f"{name}.weight", rows, columns) for name, rows in parts])
        return kernels.prepare(
            weight, torch.cat([read(f"{name}.bias", rows) for name, rows in parts]) if bias else None
        )

    qkv = (("self_attn.q_proj", a.query_size), ("self_attn.k_proj", a.kv_size), ("self_attn.v_proj", a.kv_size))
    gate_up = (("mlp.gate_proj", a.intermediate), ("mlp.up_proj", a.intermediate))
    qk_norm = None
    if a.qk_norm:
        query_norm = read("self_attn.q_norm.weight", a.head_dim).expand(a.heads, -1)
        key_norm = read("self_attn.k_norm.weight", a.head_dim).expand(a.kv_heads, -1)
        qk_norm = torch.cat((query_norm, key_norm))
    return Layer(
        input_norm=read("input_layernorm.weight", a.hidden),
        qkv=linear(qkv, a.hidden, bias=a.qkv_bias),
        qk_norm=qk_norm,
        output=linear((("self_attn.o_proj", a.hidden),), a.query_size, bias=a.output_bias),
        post_norm=read("post_attention_layernorm.weight", a.hidden),
        gate_up=linear(gate_up, a.hidden, bias=a.mlp_bias),
        down=linear((("mlp.down_proj", a.hidden),), a.intermediate, bias=a.mlp_bias),
        window=a.windows[layer],
    )
