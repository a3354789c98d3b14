"""
Matrix products on torch's fast paths, one class for each form that a weight has in memory.

    FloatProduct    floats, packed by oneDNN where it can                     2 or 4 bytes a weight
    Int8Product     int8 x int8 -> int32, exact                               1 byte
    Int4Product     4-bit groups, unpacked inside the product                 1/2 byte, and the scales
    RoundedProduct  activations rounded first, then one of the others         as that
    MixedProduct    activations mixed first, then a FloatProduct              as that
    JoinedProduct   several, for outputs that lie side by side                as those

What has no form of its own (fp8, nf4, ...) is dequantized once, when it is loaded.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device.kernels import Product
from quant.formats.mixing import mix
from quant.formats.numbers import round_rows_fp8, round_rows_int8
from quant.formats.scheme import Activations
from quant.formats.weights import Affine

INT4_GROUPS = (32, 64, 128, 256)
_PACK_ROWS = 16  # a hint for the packed layout, not a limit
_EXACT_COLUMNS = 1024  # 127 * 127 * 1024 < 2 ** 24: float32 adds up so many int8 products without rounding
_INT4_TILE = 1  # the CPU's layout has none; the argument belongs to another device's


class FloatProduct:
    """Weights as floats; oneDNN's blocked layout where `packed`.  The sum is made on the float32 accumulators."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool) -> None:
        self._packed = packed
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS) if packed else weight
        self._bias = bias

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """One call."""
        y: Tensor
        if not self._packed:
            y = F.linear(x, self._weight, self._bias)
            return y if add is None else y + add
        if add is None:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = torch.ops.mkldnn._linear_pointwise.binary(x, add, self._weight, self._bias, "add")
        return y


class MixedProduct:
    """Each row of x is mixed before `product` sees it: the weight was rotated for that."""

    def __init__(self, product: Product, points: int) -> None:
        self._product = product
        self._points = points

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Mixed in float32, rounded once."""
        return self._product(mix(x, self._points).to(x.dtype), add)


class RoundedProduct:
    """Each row of x is rounded to 8 bits before `product` sees it: what the checkpoint was made and measured for."""

    def __init__(
        self, product: Product, round_rows: Callable[[Tensor], tuple[Tensor, Tensor]], points: int = 0
    ) -> None:
        self._product = product
        self._round_rows = round_rows
        self._points = points

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Two roundings, one product."""
        values, scale = self._round_rows(mix(x, self._points))
        return self._product((values.float() * scale).to(x.dtype), add)


class Int8Product:
    """W8A8: both sides int8, the sum an exact int32, whatever the order in which it is made."""

    def __init__(self, weight: Affine, bias: Tensor | None, points: int = 0) -> None:
        assert weight.groups == 1 and weight.zero is None
        self._codes = weight.codes.contiguous()
        self._scale = weight.scale[:, 0].contiguous()
        self._bias = None if bias is None else bias.float()
        self._points = points
        self._multiply = torch._int_mm if int_mm_is_exact() else multiply_exactly

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Scales, bias and residual in float32, each rounded on its own: a row's bits do not depend on its place."""
        codes, row_scale = round_rows_int8(mix(x, self._points))
        y = self._multiply(codes, self._codes.t()).float().mul_(row_scale).mul_(self._scale)
        if self._bias is not None:
            y.add_(self._bias)
        if add is not None:
            y.add_(add)
        return y.to(x.dtype)


class Int4Product:
    """
    4-bit groups against bfloat16 rows: torch's kernel unpacks them on the way, and sums in float32.

    The kernel knows `(code - 8) * scale + shift`, in bfloat16.  Groups by activation order are made consecutive by
    sorting the columns, of the weight once and of x each time.
    """

    def __init__(self, weight: Affine, bias: Tensor | None) -> None:
        assert takes_int4(weight)
        columns, codes = weight.shape[1], weight.codes
        self._order: Tensor | None = None
        if weight.columns is not None:
            self._order = torch.argsort(weight.columns, stable=True)
            codes = codes[:, self._order]
        # One scale for a whole row is as many equal ones.
        self._group = next(size for size in reversed(INT4_GROUPS) if (columns // weight.groups) % size == 0)
        spread = columns // weight.groups // self._group
        shift = torch.zeros_like(weight.scale) if weight.zero is None else -weight.zero.float() * weight.scale
        pairs = torch.stack((weight.scale, shift), -1).repeat_interleave(spread, 1)
        self._pairs = pairs.transpose(0, 1).to(torch.bfloat16).contiguous()  # [groups, out, 2]
        unsigned = (codes.int() + 8).contiguous()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, _INT4_TILE)
        self._bias = bias

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """One product; what is added is rounded on its own."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, self._group, self._pairs)
        if self._bias is not None:
            y = y + self._bias
        return y if add is None else y + add


class JoinedProduct:
    """Products of the same input, for weights that have no common form."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = tuple(products)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """One after the other."""
        y = torch.cat([product(x) for product in self._products], -1)
        return y if add is None else y + add


def rounded(product: Product, activations: Activations, points: int) -> Product:
    """`product`, behind the mixing and the rounding of its activations."""
    if activations == "float":
        return MixedProduct(product, points) if points else product
    return RoundedProduct(product, round_rows_int8 if activations == "int8" else round_rows_fp8, points)


def takes_int4(weight: Affine) -> bool:
    """Whether torch's 4-bit kernel knows these bits, groups and sizes."""
    outs, columns = weight.shape
    if weight.bits != 4 or columns % weight.groups or outs % 16 or (columns // weight.groups) % INT4_GROUPS[0]:
        return False
    if weight.columns is None:
        return True
    counts = torch.bincount(weight.columns, minlength=weight.groups)
    return len(counts) == weight.groups and bool((counts == columns // weight.groups).all())


@functools.cache
def int_mm_is_exact() -> bool:
    """
    Whether torch's int8 product is one here.

    Without VNNI the library adds pairs of products in 16 bits, which saturate: 127 * 127 twice is too much for them.
    """
    x, weight = torch.full((4, 256), 127, dtype=torch.int8), torch.full((64, 256), 127, dtype=torch.int8)
    weight[::2] = -127
    return torch.equal(torch._int_mm(x, weight.t()), multiply_exactly(x, weight.t()))


def multiply_exactly(x: Tensor, weight: Tensor) -> Tensor:
    """int8 [rows, in] times int8 [in, out] in float32, as many columns at a time as it holds exactly: int32."""
    total = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.int32)
    for start in range(0, x.shape[1], _EXACT_COLUMNS):
        part = slice(start, start + _EXACT_COLUMNS)
        total += (x[:, part].float() @ weight[part].float()).int()
    return total
