"""
The arithmetic of a decoder behind one Protocol of five methods.

    reference   plain torch in float32, written to be read; what the others are checked against
    torch_fast  torch's own fast paths, in shapes for which a row's result does not depend on its neighbours
    products    the matrix products of torch_fast, one class for each form that a weight has in memory

Rows are tokens of any sequences.  A kernel set must give a row the same bits whatever the other rows are, as long as
the number of rows is one that `padded_rows` gives: DESIGN 5 rests on that, and `engine.device.probe` checks it at load.
"""

from typing import Protocol

from torch import Tensor

from engine.device.batch import Batch
from engine.device.kv import KvLayer
from quant.formats.scheme import Activations
from quant.formats.weights import Quantized


class Product(Protocol):
    """A matrix product with a prepared weight; what that looks like is the business of the kernels that made it."""

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias + add`: [rows, in] -> [rows, out]."""
        ...


class Kernels(Protocol):
    """Arithmetic on rows.  Activations have the dtype of the weights, sums are made in float32."""

    @property
    def name(self) -> str:
        """For /health and logs."""
        ...

    def prepare(
        self, weight: Tensor | Quantized, bias: Tensor | None, activations: Activations = "float", mix: int = 0
    ) -> Product:
        """
        Bring `weight` [out, in] and `bias` [out] into the form that its product wants; it may copy.

        With `activations` of "int8" or "fp8" each row of x is rounded to that first, by a scale of its own.  Before
        that, it goes through a Hadamard transform of `mix` points: `quant.formats.mixing.mix`.
        """
        ...

    def gated(self, x: Tensor, gate_up: Product) -> Tensor:
        """`silu(gate) * up`, where (gate, up) are the halves of `gate_up(x)`."""
        ...

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMSNorm over the last dimension; `weight` broadcasts against `x`."""
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Turn `heads` [rows, heads, head_dim] in place: `x * cos + swap_halves(x) * sin`, float32 inside."""
        ...

    def attend(self, qkv: Tensor, cache: KvLayer, batch: Batch, *, window: int, kv_heads: int) -> Tensor:
        """
        Write the keys and values of `qkv` to the paged cache, then attend over each sequence's own past.

        Args:
            qkv: [rows, (query heads + 2 * kv_heads) * head_dim], rotated.
            cache: this layer's; written.
            window: how many newest positions a token sees; 0: all.

        Returns: [rows, query heads * head_dim].  Rows that only pad are of no consequence.
        """
        ...
