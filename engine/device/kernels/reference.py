"""
Kernels to read: one sequence, one formula at a time, in float32.
"""

import torch
from torch import Tensor

from engine.device.batch import Batch, Group
from engine.device.kernels import Product
from engine.device.kv import KvLayer
from quant.formats.mixing import LANES, hadamard
from quant.formats.scheme import Activations
from quant.formats.weights import Quantized


class ReferenceProduct:
    """Row by row, so that no row can know of another."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activations: Activations, mix: int) -> None:
        self._mix = torch.kron(hadamard(mix), torch.eye(LANES)).float() if mix else None
        self._weight = weight
        self._bias = bias
        self._activations = activations

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """The formula."""
        y = torch.stack([self._weight @ self._round(self._mixed(row)) for row in x.float()])
        if self._bias is not None:
            y = y + self._bias.float()
        if add is not None:
            y = y + add.float()
        return y.to(x.dtype)

    def _mixed(self, row: Tensor) -> Tensor:
        return row if self._mix is None else (row.view(-1, len(self._mix)) @ self._mix).view(-1)

    def _round(self, row: Tensor) -> Tensor:
        largest = row.abs().max()
        if self._activations == "float" or largest == 0:
            return row
        if self._activations == "int8":
            return torch.round(row / (largest / 127)).clamp(-127, 127) * (largest / 127)
        return (row / (largest / 448)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * (largest / 448)


class ReferenceKernels:
    """Implements `Kernels` in the plainest torch there is."""

    name = "reference"

    def prepare(
        self, weight: Tensor | Quantized, bias: Tensor | None, activations: Activations = "float", mix: int = 0
    ) -> Product:
        """As numbers, whatever it was."""
        dense = weight if isinstance(weight, Tensor) else weight.dense(torch.float32)
        return ReferenceProduct(dense.float(), bias, activations, mix)

    def gated(self, x: Tensor, gate_up: Product) -> Tensor:
        """SiLU: z * sigmoid(z)."""
        gates, ups = gate_up(x.float()).chunk(2, -1)
        return (gates / (1 + torch.exp(-gates)) * ups).to(x.dtype)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Divide by the root of the mean square."""
        mean_square = x.float().pow(2).mean(-1, keepdim=True)
        return (x.float() / torch.sqrt(mean_square + epsilon)).to(x.dtype) * weight

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Pairs are (i, i + head_dim / 2)."""
        first, second = heads.float().chunk(2, -1)
        heads.copy_(torch.cat((first, second), -1) * cos + torch.cat((second, first), -1) * sin)

    def attend(self, qkv: Tensor, cache: KvLayer, batch: Batch, *, window: int, kv_heads: int) -> Tensor:
        """Sequence by sequence, query by query."""
        head_dim = cache.head_dim
        queries = qkv.shape[1] // head_dim - 2 * kv_heads
        cache.write(batch.slots, qkv[: batch.rows, queries * head_dim :])
        out = torch.zeros(qkv.shape[0], queries * head_dim, dtype=qkv.dtype)
        for group in batch.groups:
            for member in range(group.sequences):
                for token in range(group.count):
                    row = group.first_row + member * group.count + token
                    query = qkv[row, : queries * head_dim].view(kv_heads, -1, head_dim)
                    out[row] = self._attend_one(query, cache, group, member, token, window).reshape(-1).to(out.dtype)
        return out

    def _attend_one(self, query: Tensor, cache: KvLayer, group: Group, member: int, token: int, window: int) -> Tensor:
        """One token: query [kv_heads, query heads of each, head_dim] over what its mask shows."""
        table = group.blocks.view(group.sequences, group.width)[member]
        keys, values = cache.read(table).flatten(0, 1).unbind(1)  # [slots, kv_heads, head_dim]
        tile, token_of_tile = divmod(token, group.tile_tokens)
        seen = group.masks[window][member * group.tiles + tile, 0, token_of_tile * query.shape[1]] == 0
        scores = torch.einsum("hgd,shd->hgs", query.float(), keys[seen].float()) * query.shape[-1] ** -0.5
        return torch.einsum("hgs,shd->hgd", torch.softmax(scores, -1), values[seen].float())
