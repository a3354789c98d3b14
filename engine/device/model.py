"""
The decoder: RMSNorm, attention, RMSNorm, gated MLP, as often as there are layers.

Shapes: rows are the tokens of a step, whoever they belong to; only `Kernels.attend` knows about sequences.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device.batch import Batch
from engine.device.kernels import Kernels, Product
from engine.device.kernels.products import JoinedProduct
from engine.device.kv import KvCache
from engine.device.ranks.book import Interconnect
from engine.device.weights import Linear, Weights
from quant.formats.architecture import Architecture


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
        head: Product | None,
        head_rows: int,
    ) -> None:
        self.architecture = architecture
        self.kernels = kernels
        self.head_rows = head_rows  # tokens that it knows the logits of
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head

    def forward(
        self, batch: Batch, kv: KvCache, ranks: Interconnect | None = None, rows_in: Tensor | None = None
    ) -> Tensor:
        """
        Compute the batch's rows and write their keys and values: [padded rows, hidden], before the last norm.

        Args:
            ranks: have the other parts of these layers: what is added to the rows is summed over them first.
            rows_in: what the layers before have made of them, float32 [rows, hidden]; None: there are none.
        """
        a, kernels = self.architecture, self.kernels
        if rows_in is None:
            x = F.embedding(batch.tokens, self._embedding)
        else:
            x = F.pad(rows_in, (0, 0, 0, len(batch.tokens) - batch.rows)).to(self._embedding.dtype)
        turned = a.query_size + a.kv_size
        for layer, cache in zip(self._layers, kv.layers, strict=False):  # a shorter cache: the probe's
            qkv = layer.qkv(kernels.norm(x, layer.input_norm, a.norm_epsilon))
            heads = qkv[:, :turned].view(-1, a.heads + a.kv_heads, a.head_dim)
            if layer.qk_norm is not None:
                heads.copy_(kernels.norm(heads, layer.qk_norm, a.norm_epsilon))
            kernels.rotate(heads, batch.cos, batch.sin)
            attended = kernels.attend(qkv, cache, batch, window=layer.window, kv_heads=a.kv_heads)
            x = _onto(x, layer.output, attended, batch.rows, ranks, "attention")
            gated = kernels.gated(kernels.norm(x, layer.post_norm, a.norm_epsilon), layer.gate_up)
            x = _onto(x, layer.down, gated, batch.rows, ranks, "mlp")
        return x

    def logits(self, x: Tensor) -> Tensor:
        """What follows the rows `x` of `forward`: float32 [rows, vocab_size]."""
        normed = self.kernels.norm(x, self._norm, self.architecture.norm_epsilon)
        assert self._head is not None, "only the last stage has one"
        return self._head(normed).float()


def _onto(x: Tensor, product: Product, y: Tensor, rows: int, ranks: Interconnect | None, exchange: str) -> Tensor:
    """`x + product(y)`; of several ranks the sum of their products, in float32, in which it is rounded once."""
    if ranks is None:
        return product(y, add=x)
    partial = product(y)[:rows].float().contiguous()
    ranks.sum(partial, exchange)
    partial += x[:rows]
    if rows < len(x):  # Rows that only pad are of no consequence.
        partial = F.pad(partial, (0, 0, 0, len(x) - rows))
    return partial.to(x.dtype)


def load_decoder(weights: Weights, kernels: Kernels) -> Decoder:
    """Read and prepare all weights.  Raises ModelError."""
    a = weights.architecture
    embedding = weights.embedding()
    head_rows = weights.part.vocab.length
    tied = weights.checkpoint.tied and head_rows == a.vocab_size
    head = embedding if tied else weights.head()
    return Decoder(
        a,
        kernels,
        embedding=embedding,
        layers=tuple(_load_layer(weights, kernels, index) for index in range(a.layers)),
        norm=weights.norm(),
        head=kernels.prepare(head, None) if head_rows else None,
        head_rows=head_rows,
    )


def _load_layer(weights: Weights, kernels: Kernels, index: int) -> Layer:
    a, layer = weights.architecture, weights.layer(index)
    qk_norm = None
    if layer.query_norm is not None and layer.key_norm is not None:
        qk_norm = torch.cat((layer.query_norm.expand(a.heads, -1), layer.key_norm.expand(a.kv_heads, -1)))

    def product(linear: Linear) -> Product:
        parts = [
            kernels.prepare(weight, bias, weights.activations(weight), linear.mix)
            for weight, bias in zip(linear.weights, linear.biases(), strict=True)
        ]
        return parts[0] if len(parts) == 1 else JoinedProduct(parts)

    return Layer(
        input_norm=layer.input_norm,
        qkv=product(layer.qkv),
        qk_norm=qk_norm,
        output=product(layer.output),
        post_norm=layer.post_norm,
        gate_up=product(layer.gate_up),
        down=product(layer.down),
        window=a.windows[index],
    )
