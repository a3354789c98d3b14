"""
What the native decoder computes, in plain torch: the same roundings to 8 bits and bfloat16, everything else in float32.

So the two may differ by what float32 sums differ in, and by the few values that lie so near the middle between two
codes that this decides.  A wrong position, window, head or group differs by as much as the numbers themselves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.device.batch import Batch, BatchBuilder, Group
from engine.device.kernels import Kernels, Product
from engine.device.kernels.reference import ReferenceKernels
from engine.device.kv import BLOCK_SLOTS, KvCache, KvLayer, RoundedLayer
from engine.device.model import load_decoder
from engine.device.native.pack import GROUPS
from engine.device.torch_model import TorchModel
from engine.device.weights import Weights
from quant.formats.architecture import Architecture
from quant.formats.mixing import LANES, hadamard, mix
from quant.formats.numbers import round_int8
from quant.formats.rope import RopeTable
from quant.formats.scheme import Activations
from quant.formats.weights import Affine, Quantized


def rounded(x: Tensor, group: int = 0) -> Tensor:
    """Rows as int8 with one scale for each `group` columns (0: all), as numbers again."""
    grouped = x.view(len(x), -1, group or x.shape[1])
    most = grouped.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, torch.tensor(127.0) / most, 0.0)
    return ((grouped * inverse).round() * (most / 127)).view(x.shape)


def spread(heads: Tensor) -> Tensor:
    """Queries or keys [..., head_dim], their channels mixed."""
    vectors = heads.shape[-1] // LANES
    lanes = heads.view(*heads.shape[:-1], vectors, LANES) @ hadamard(LANES).float()
    points = vectors & -vectors
    return mix(lanes.reshape(heads.shape), points if points > 1 else 0)


class _RoundingProduct:
    def __init__(self, weight: Tensor | Quantized, bias: Tensor | None, activations: Activations, points: int) -> None:
        self._points, self._bias = points, bias
        self._form, self._group = "bf16", 0
        self._order: Tensor | None = None
        if isinstance(weight, Affine) and activations == "int8":
            self._form = "int8"
        elif isinstance(weight, Affine) and weight.bits == 4:
            size = weight.shape[1] // weight.groups
            self._form, self._group = "int4", next(group for group in GROUPS if size % group == 0)
            self._order = torch.argsort(weight.column_groups, stable=True)
        if isinstance(weight, Tensor) or self._form == "bf16":
            weight = weight if isinstance(weight, Tensor) else weight.dense(torch.bfloat16)
            self._weight = weight.bfloat16().double()
        else:
            self._weight = weight.dense(torch.float32).double()

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        x = mix(x, self._points)
        if self._form == "int8":
            x = rounded(x)
        elif self._order is not None:
            x = rounded(x[:, self._order], self._group)[:, torch.argsort(self._order)]
        else:
            x = x.bfloat16().float()
        y = (x.double() @ self._weight.T).float()
        y = y if self._bias is None else y + self._bias.float()
        return y if add is None else y + add


class _RoundingKernels(ReferenceKernels):
    name = "rounding"

    def __init__(self, *, int8_head: int, kv_int8: bool) -> None:
        self._int8_head = int8_head  # rows of a head that is rounded too; 0: it is not
        self._kv_int8 = kv_int8

    def prepare(
        self, weight: Tensor | Quantized, bias: Tensor | None, activations: Activations = "float", mix: int = 0
    ) -> Product:
        if isinstance(weight, Tensor) and weight.shape[0] == self._int8_head:
            weight, activations = round_int8(weight.float(), "channel"), "int8"
        return _RoundingProduct(weight, bias, activations, mix)

    def attend(self, qkv: Tensor, cache: KvLayer, batch: Batch, *, window: int, kv_heads: int) -> Tensor:
        if self._kv_int8:
            heads = qkv.reshape(len(qkv), -1, cache.head_dim).clone()
            heads[:, :-kv_heads] = spread(heads[:, :-kv_heads])
            qkv = heads.view(qkv.shape)
        return super().attend(qkv, cache, batch, window=window, kv_heads=kv_heads)

    def _attend_one(self, query: Tensor, cache: KvLayer, group: Group, member: int, token: int, window: int) -> Tensor:
        if self._kv_int8:  # weights of 15 bits: as good as float32 here
            flat = rounded(query.reshape(-1, query.shape[-1]))
            return super()._attend_one(flat.view(query.shape), cache, group, member, token, window)
        table = group.blocks.view(group.sequences, group.width)[member]
        keys, values = cache.read(table).flatten(0, 1).unbind(1)
        tile, token_of_tile = divmod(token, group.tile_tokens)
        seen = group.masks[window][member * group.tiles + tile, 0, token_of_tile * query.shape[1]] == 0
        scores = torch.einsum("hgd,shd->hgs", query.bfloat16().float(), keys[seen]) * query.shape[-1] ** -0.5
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        sums = weights.sum(-1, keepdim=True)
        return torch.einsum("hgs,shd->hgd", weights.bfloat16().float(), values[seen]) / sums


class _Bf16Layer:
    """Implements `KvLayer`: rounded when it is written, read as float32."""

    def __init__(self, values: Tensor) -> None:
        self.head_dim = values.shape[-1]
        self._values, self._rows = values, values.view(values.shape[0] * values.shape[1], -1)

    def write(self, slots: Tensor, pairs: Tensor) -> None:
        self._rows.index_copy_(0, slots, pairs.bfloat16().float())

    def read(self, blocks: Tensor) -> Tensor:
        return self._values.index_select(0, blocks)


def oracle(weights: Weights, *, kv_int8: bool, blocks_max: int, exact: bool = False) -> TorchModel:
    """A model in torch of the same weights; `exact`: nothing is rounded but the weights."""
    a, scheme = weights.architecture, weights.scheme
    int8_head = a.vocab_size if scheme is not None and scheme.activations == "int8" else 0
    kernels: Kernels = ReferenceKernels() if exact else _RoundingKernels(int8_head=int8_head, kv_int8=kv_int8)
    kv = KvCache(a, layers=a.layers, blocks_max=blocks_max, dtype=torch.float32)
    if not exact:
        kv.layers = tuple(_layers(a, blocks_max, kv_int8))
    builder = BatchBuilder(
        rope=RopeTable(a.rope, head_dim=a.head_dim, context_max=a.context_max),
        windows=frozenset(a.windows),
        query_group=a.heads // a.kv_heads,
        blocks_max=blocks_max,
        block_slots=BLOCK_SLOTS,
        context_max=a.context_max,
        vocab_size=a.vocab_size,
        dtype=torch.float32,
        row_tile=2,
        coarse_keys=False,
    )
    with torch.inference_mode():
        decoder = load_decoder(weights, kernels)
    return TorchModel(decoder, builder, kv, row_tile=2, tiles="", reproducible=False)


def _layers(a: Architecture, blocks_max: int, kv_int8: bool) -> Sequence[KvLayer]:
    shape = (blocks_max, BLOCK_SLOTS, 2, a.kv_heads, a.head_dim)
    if not kv_int8:
        return [_Bf16Layer(torch.zeros(shape)) for _ in range(a.layers)]
    return [
        RoundedLayer(torch.zeros(shape, dtype=torch.int8), torch.zeros(shape[:-1]), dtype=torch.float32, fp8=False)
        for _ in range(a.layers)
    ]
