"""
The arithmetic of a decoder behind one Protocol of six methods.

    reference   plain torch in float32, written to be read; what the others are checked against
    torch_fast  torch's own fast paths, in shapes for which a row's result does not depend on its neighbours

Rows are tokens of any sequences.  A kernel set must give a row the same bits whatever the other rows are, as long as
the number of rows is one that `padded_rows` gives: DESIGN 5 rests on that, and `engine.device.probe` checks it at load.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.device.batch import Batch


@dataclass(frozen=True, slots=True)
class Linear:
    """A prepared matrix product.  What `weight` looks like is the business of the kernels that prepared it."""

    weight: Tensor
    bias: Tensor | None


class Kernels(Protocol):
    """Arithmetic on rows.  Activations have the dtype of the weights, sums are made in float32."""

    @property
    def name(self) -> str:
        """For /health and logs."""
        ...

    def prepare(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Bring `weight` [out, in] and `bias` [out] into the form that `linear` wants; it may copy."""
        ...

    def linear(self, x: Tensor, linear: Linear, add: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias + add`: [rows, in] -> [rows, out]."""
        ...

    def gated(self, x: Tensor, gate_up: Linear) -> Tensor:
        """`silu(gate) * up`, where (gate, up) are the halves of `gate_up(x)`."""
        ...

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMSNorm over the last dimension; `weight` broadcasts against `x`."""
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Turn `heads` [rows, heads, head_dim] in place: `x * cos + swap_halves(x) * sin`, float32 inside."""
        ...

    def attend(self, qkv: Tensor, cache: Tensor, batch: Batch, *, window: int, kv_heads: int) -> Tensor:
        """
        Write the keys and values of `qkv` to the paged cache, then attend over each sequence's own past.

        Args:
            qkv: [rows, (query heads + 2 * kv_heads) * head_dim], rotated.
            cache: this layer's [blocks, block_slots, 2, kv_heads, head_dim]; written.
            window: how many newest positions a token sees; 0: all.

        Returns: [rows, query heads * head_dim].  Rows that only pad are of no consequence.
        """
        ...
