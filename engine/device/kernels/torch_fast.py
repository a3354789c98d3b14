"""
Kernels on torch's fast paths: oneDNN products on packed weights, fused flash attention.

Why these calls and no others: each gives a row the same bits for any (padded) number of rows, which was measured and is
measured again on the user's machine by `engine.device.probe`.  No vectorized transcendental runs over a whole tensor
(exp in SiLU, for instance): its last few elements take a scalar path with other rounding, so a row would depend on
where it lies.  Inside oneDNN and flash attention they run per row.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device.batch import QUERY_TILE, Batch, Group
from engine.device.kernels import Product
from engine.device.kernels.products import FloatProduct, Int4Product, Int8Product, rounded, takes_int4
from engine.device.kv import KvLayer
from quant.formats.scheme import Activations, Scheme
from quant.formats.weights import Affine, Quantized

_GRAIN = 32768  # elements below which torch leaves an operation to one thread
_SPAN_COLUMNS = _GRAIN // 2  # so a row has one share, two rows have at most two, and so on


class TorchFastKernels:
    """Implements `Kernels`; `packs` says whether oneDNN can take this dtype on this machine."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._packs = packs(dtype)
        self._int4 = dtype == torch.bfloat16 and self._packs  # torch's 4-bit kernel is vectorized for bfloat16 only
        self.name = "onednn" if self._packs else "torch"

    def prepare(
        self, weight: Tensor | Quantized, bias: Tensor | None, activations: Activations = "float", mix: int = 0
    ) -> Product:
        """The smallest form that has a kernel here; else dequantized."""
        if isinstance(weight, Affine):
            if activations == "int8" and weight.groups == 1 and weight.zero is None:
                return Int8Product(weight, bias, mix)
            if activations == "float" and not mix and self._int4 and takes_int4(weight):
                return Int4Product(weight, bias)
        dense = weight if isinstance(weight, Tensor) else weight.dense(self._dtype)
        return rounded(FloatProduct(dense, bias, packed=self._packs), activations, mix)

    def gated(self, x: Tensor, gate_up: Product) -> Tensor:
        """One product for both; SiLU runs over spans of whole rows, see `_spans`."""
        both = gate_up(x)
        rows, columns = both.shape[0], both.shape[1] // 2
        gate, up = both.split(columns, 1)
        out = torch.empty(rows, columns, dtype=x.dtype)
        for left in range(0, columns, _SPAN_COLUMNS):
            part = slice(left, left + _SPAN_COLUMNS)
            for start, stop in _spans(rows, min(columns, _SPAN_COLUMNS), torch.get_num_threads()):
                torch.ops.aten.silu.out(gate[start:stop, part], out=out[start:stop, part])
        return out.mul_(up)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """One reduction per row; the rest is single, exactly rounded operations."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = length.square_().mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()
        return torch.mul(x.float(), scale).mul_(weight).to(x.dtype)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Products and a sum, each rounded on its own: a fused multiply-add would depend on the row's place."""
        exact = heads.float()
        turned = torch.roll(exact, heads.shape[-1] // 2, -1).mul_(sin)
        heads.copy_(torch.mul(exact, cos).add_(turned))

    def attend(self, qkv: Tensor, cache: KvLayer, batch: Batch, *, window: int, kv_heads: int) -> Tensor:
        """One write for keys and values together, one gather and one fused call per group."""
        query_size = qkv.shape[1] - 2 * kv_heads * cache.head_dim
        cache.write(batch.slots, qkv[: batch.rows, query_size:])
        out = torch.zeros(qkv.shape[0], query_size, dtype=qkv.dtype)
        for group in batch.groups:
            rows = slice(group.first_row, group.first_row + group.sequences * group.count)
            pairs = cache.read(group.blocks).view(group.sequences, -1, 2, kv_heads, cache.head_dim)
            _attend_group(qkv[rows, :query_size], pairs, group, group.masks[window], out[rows])
        return out


def weight_bytes(scheme: Scheme | None, dtype: torch.dtype) -> float:
    """Memory of one weight of a linear layer, scales included: an estimate, before anything is read."""
    if scheme is not None and scheme.method == "int8" and scheme.granularity != "group":
        return 1.0
    if scheme is not None and scheme.method in ("gptq", "packed") and scheme.bits == 4 and dtype == torch.bfloat16:
        return 0.5 + 4 / max(scheme.group_size, 32)
    return dtype.itemsize


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN takes packed weights of this dtype here."""
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _spans(rows: int, columns: int, threads: int) -> Iterator[tuple[int, int]]:
    """
    Cut rows into spans that torch's threads divide between them at the ends of rows.

    torch gives each thread an equal share of the elements.  A share that begins inside a row has its vectors elsewhere
    in that row, and a scalar tail where another share has none: the row would depend on the number of its neighbours.
    """
    assert columns <= _SPAN_COLUMNS, "a single row would be shared"
    start = 0
    while start < rows:
        count = rows - start
        while count % (shares := max(1, min(threads, -(-count * columns // _GRAIN)))):
            count -= count % shares
        yield start, start + count
        start += count


def _attend_group(queries: Tensor, pairs: Tensor, group: Group, mask: Tensor, out: Tensor) -> None:
    """
    Query heads that share a key head are rows of one product, and so are the tokens of a tile.

    `pairs` is [sequences, slots, 2, kv_heads, head_dim]: keys and values of each padded table.
    """
    n, t = group.sequences * group.tiles, group.tile_tokens
    kv_heads, head_dim = pairs.shape[-2:]
    if group.tiles > 1:  # one sequence, all of whose tiles look at the same keys
        pairs = pairs.expand(n, -1, -1, -1, -1)
        queries = F.pad(queries, (0, 0, 0, n * t - group.count))
    keys, values = pairs.permute(2, 0, 3, 1, 4).unbind(0)
    folded = queries.view(n, t, kv_heads, -1, head_dim).transpose(1, 2).reshape(n, kv_heads, -1, head_dim)
    rows = folded.shape[2]
    if rows % QUERY_TILE:
        folded = folded.index_select(2, group.query_rows)
    if n * kv_heads == 1:
        # Alone it would not be handed to a thread, and its inner products be cut up for all of them, with other sums.
        folded, keys, values, mask = (x.expand(2, -1, -1, -1) for x in (folded, keys, values, mask))
    attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)[:n].narrow(2, 0, rows)
    if t == 1:
        out.view(n, kv_heads, -1, head_dim).copy_(attended)
        return
    unfolded = attended.reshape(n, kv_heads, t, -1, head_dim).transpose(1, 2)
    out.copy_(unfolded.reshape(n * t, -1)[: len(out)])
