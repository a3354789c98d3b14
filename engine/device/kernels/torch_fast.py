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
from engine.device.kernels import Linear

_PACK_ROWS = 16  # a hint for the packed layout, not a limit
_GRAIN = 32768  # elements below which torch leaves an operation to one thread
_SPAN_COLUMNS = _GRAIN // 2  # so a row has one share, two rows have at most two, and so on


class TorchFastKernels:
    """Implements `Kernels`; `packs` says whether oneDNN can take this dtype on this machine."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._packs = packs(dtype)
        self.name = "onednn" if self._packs else "torch"

    def prepare(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Reorder into oneDNN's blocked layout, once."""
        if self._packs:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        return Linear(weight, bias)

    def linear(self, x: Tensor, linear: Linear, add: Tensor | None = None) -> Tensor:
        """One call: the sum with `add` is made on the float32 accumulators."""
        if not self._packs:
            y = F.linear(x, linear.weight, linear.bias)
            return y if add is None else y + add
        if add is None:
            return _product(x, linear)
        return _product_with_sum(x, add, linear)

    def gated(self, x: Tensor, gate_up: Linear) -> Tensor:
        """One product for both; SiLU runs over spans of whole rows, see `_spans`."""
        both = self.linear(x, gate_up)
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

    def attend(self, qkv: Tensor, cache: Tensor, batch: Batch, *, window: int, kv_heads: int) -> Tensor:
        """One index_copy for keys and values together, one gather and one fused call per group."""
        blocks, slots, _, _, head_dim = cache.shape
        query_size = qkv.shape[1] - 2 * kv_heads * head_dim
        cache.view(blocks * slots, -1).index_copy_(0, batch.slots, qkv[: batch.rows, query_size:])
        out = torch.zeros(qkv.shape[0], query_size, dtype=qkv.dtype)
        for group in batch.groups:
            rows = slice(group.first_row, group.first_row + group.sequences * group.count)
            _attend_group(qkv[rows, :query_size], cache, group, group.masks[window], out[rows])
        return out


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN takes packed weights of this dtype here."""
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _product(x: Tensor, linear: Linear) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, linear.weight, linear.bias, "none", [], "")
    return y


def _product_with_sum(x: Tensor, add: Tensor, linear: Linear) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, add, linear.weight, linear.bias, "add")
    return y


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


def _attend_group(queries: Tensor, cache: Tensor, group: Group, mask: Tensor, out: Tensor) -> None:
    """Query heads that share a key head are rows of one product, and so are the tokens of a tile."""
    n, t, slots = group.sequences * group.tiles, group.tile_tokens, group.width * cache.shape[1]
    kv_heads, head_dim = cache.shape[-2:]
    pairs = cache.index_select(0, group.blocks).view(group.sequences, slots, 2, kv_heads, head_dim)
    if group.tiles > 1:  # one sequence, all of whose tiles look at the same keys
        pairs = pairs.expand(n, -1, -1, -1, -1)
        queries = F.pad(queries, (0, 0, 0, n * t - group.count))
    keys, values = pairs.permute(2, 0, 3, 1, 4).unbind(0)
    folded = queries.view(n, t, kv_heads, -1, head_dim).transpose(1, 2).reshape(n, kv_heads, -1, head_dim)
    rows = folded.shape[2]
    if rows % QUERY_TILE:
        folded = folded.index_select(2, group.query_rows)
    attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask).narrow(2, 0, rows)
    if t == 1:
        out.view(n, kv_heads, -1, head_dim).copy_(attended)
        return
    unfolded = attended.reshape(n, kv_heads, t, -1, head_dim).transpose(1, 2)
    out.copy_(unfolded.reshape(n * t, -1)[: len(out)])
