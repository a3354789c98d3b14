"""
From a checkpoint's weights to arrays in the order in which the kernels read them.

    int8   W8A8: one scale for each output channel, rows of activations rounded with one scale each
    int4   W4A8: groups of 32, 64 or 128 columns; activations are rounded in the same groups
    bf16   everything else

All arrays of a model lie in one dict under names that say where they belong, so that they can be kept in a file.
Inputs are padded to a multiple of 64, outputs to one of 32: with zeros, which change no sum.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.device.native.library import BF16, HEAD_DIM_MAX, INT4, INT8, TILE, WIDE, Library, Weight
from engine.device.native.memory import Array, Arrays, aligned
from engine.device.weights import Linear, Weights
from quant.formats.architecture import Architecture
from quant.formats.rounding import round_weight
from quant.formats.scheme import Scheme
from quant.formats.weights import Affine, Quantized

PACKED_VERSION = 3  # raise it when the same weights begin to be packed in another way
LINEARS = ("qkv", "output", "gate_up", "down")
GROUPS = (128, 64, 32)
_GATE_ROWS = 16  # gates and ups take turns by so many rows, so that both are at hand when a tile is done


class Unpackable(Exception):
    """The native decoder does not take these weights, and why."""


def refuse_unpackable(architecture: Architecture, scheme: Scheme | None) -> None:
    """What can be told before any weight is read.  Raises Unpackable."""
    if architecture.head_dim % 16 or architecture.head_dim > HEAD_DIM_MAX:
        raise Unpackable(f"head_dim {architecture.head_dim} is no multiple of 16 up to {HEAD_DIM_MAX}")
    if scheme is None:
        return
    if scheme.activations == "fp8":
        raise Unpackable("activations in fp8 have no native product")
    if scheme.activations == "int8" and (scheme.granularity != "channel" or not scheme.symmetric):
        raise Unpackable(f"{scheme.label} is not symmetric with one scale for each output channel")


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs for one library."""

    library: Library
    weights: Weights

    def arrays(self) -> Arrays:
        """Everything that the decoder reads.  Raises Unpackable and ModelError."""
        refuse_unpackable(self.weights.architecture, self.weights.scheme)
        return dict(self._all())

    def _all(self) -> Iterator[tuple[str, Array]]:
        weights, a = self.weights, self.weights.architecture
        yield "embedding", _bits(_columns(weights.embedding().to(torch.bfloat16), WIDE))
        yield "norm", _floats(weights.norm())
        if weights.part.vocab.length:
            head, scheme = weights.head(), weights.scheme
            rounds = scheme is not None and scheme.activations == "int8"
            weight = round_weight(head.float(), scheme) if scheme is not None and rounds else head
            yield from self._linear("head", Linear((weight,), None))
        for index in range(a.layers):
            layer = weights.layer(index)
            yield f"{index}.input_norm", _floats(layer.input_norm)
            yield f"{index}.post_norm", _floats(layer.post_norm)
            if layer.query_norm is not None and layer.key_norm is not None:
                yield f"{index}.query_norm", layer.query_norm.float().numpy()
                yield f"{index}.key_norm", layer.key_norm.float().numpy()
            yield from self._linear(f"{index}.qkv", layer.qkv)
            yield from self._linear(f"{index}.output", layer.output)
            yield from self._linear(f"{index}.gate_up", _interleaved(layer.gate_up, a.intermediate))
            yield from self._linear(f"{index}.down", layer.down)

    def _linear(self, name: str, linear: Linear) -> Iterator[tuple[str, Array]]:
        if len(linear.weights) != 1:
            raise Unpackable(f"{name} is made of weights that have no form in common")
        weight = linear.weights[0]
        outs = -(-weight.shape[0] // TILE) * TILE
        scale, order, form, group, asymmetric = torch.ones(weight.shape[0]), None, BF16, 0, False
        if isinstance(weight, Affine) and self.weights.activations(weight) == "int8":
            form, scale = INT8, weight.scale[:, 0]
            codes = _columns(weight.codes, WIDE)
            data, ins = self._packed(INT8, outs, codes.shape[1]), codes.shape[1]
            self.library.pack_int8(data.ctypes.data, codes.data_ptr(), weight.shape[0], ins)
        elif isinstance(weight, Affine) and (group := _group_of(weight)):
            form, ins, asymmetric = INT4, weight.shape[1], weight.zero is not None
            data, scale, order = self._int4(weight, outs, group)
        else:
            dense = weight if isinstance(weight, Tensor) else weight.dense(torch.bfloat16)
            values = _columns(dense.to(torch.bfloat16), WIDE)
            data, ins, group = self._packed(BF16, outs, values.shape[1]), values.shape[1], 0
            self.library.pack_bf16(data.ctypes.data, values.data_ptr(), weight.shape[0], ins)
        yield f"{name}.data", data
        yield f"{name}.scale", _floats(scale, TILE)
        if linear.bias is not None:
            yield f"{name}.bias", _floats(linear.bias, TILE)
        if order is not None:
            yield f"{name}.order", order.to(torch.int32).numpy()
        yield f"{name}.form", np.array([form, outs, ins, group, asymmetric], np.int32)

    def _int4(self, weight: Affine, outs: int, group: int) -> tuple[Array, Tensor, Tensor | None]:
        """
        The packed groups, the scale of each output channel, and the order of the columns if they were sorted.

        Scales of groups are float16; a power of two of each channel takes what is too large or small for that.
        """
        codes, order = weight.codes, None
        if weight.columns is not None:
            order = torch.argsort(weight.columns, stable=True)
            codes = codes[:, order]
        spread = weight.shape[1] // weight.groups // group
        largest = weight.scale.abs().amax(1).clamp_min(1e-30)
        channel = torch.exp2(torch.floor(torch.log2(largest)))
        scales = (weight.scale / channel[:, None]).half().repeat_interleave(spread, 1).contiguous()
        zeros = None
        if weight.zero is not None:
            zeros = weight.zero.to(torch.int16).repeat_interleave(spread, 1).contiguous()
        codes = codes.contiguous()
        ins = codes.shape[1]
        data = self._packed(INT4, outs, ins, group, asymmetric=zeros is not None)
        pointer = None if zeros is None else zeros.data_ptr()
        self.library.pack_int4(
            data.ctypes.data, codes.data_ptr(), scales.data_ptr(), pointer, weight.shape[0], ins, group
        )
        return data, channel, order

    def _packed(self, form: int, outs: int, ins: int, group: int = 1, *, asymmetric: bool = False) -> Array:
        return aligned(self.library.packed_bytes(form, outs, ins, group, int(asymmetric)))


def weight_of(arrays: Arrays, name: str) -> Weight:
    """The structure of the linear layer `name`."""
    form, outs, ins, group, asymmetric = (int(value) for value in arrays[f"{name}.form"])
    bias, order = arrays.get(f"{name}.bias"), arrays.get(f"{name}.order")
    return Weight(
        data=arrays[f"{name}.data"].ctypes.data,
        scale=arrays[f"{name}.scale"].ctypes.data,
        bias=None if bias is None else bias.ctypes.data,
        order=None if order is None else order.ctypes.data,
        form=form,
        outs=outs,
        ins=ins,
        group=group,
        asymmetric=asymmetric,
    )


def _group_of(weight: Affine) -> int:
    """Columns of a group that the 4-bit product takes; 0: it does not take this weight."""
    columns = weight.shape[1]
    if weight.bits != 4 or columns % weight.groups:
        return 0
    if weight.columns is not None:
        counts = torch.bincount(weight.columns, minlength=weight.groups)
        if not bool((counts == columns // weight.groups).all()):
            return 0
    return next((size for size in GROUPS if (columns // weight.groups) % size == 0), 0)


def _interleaved(gate_up: Linear, intermediate: int) -> Linear:
    """Gates and ups by turns of 16 rows; what is missing to whole turns is zeros.  Not what has no form in common."""
    if len(gate_up.weights) != 1:
        return gate_up
    turns = -(-intermediate // _GATE_ROWS)
    rows = torch.arange(turns * _GATE_ROWS).view(turns, 1, _GATE_ROWS)
    rows = torch.where(rows < intermediate, rows, -1).expand(-1, 2, -1).clone()
    rows[:, 1] += torch.where(rows[:, 1] >= 0, intermediate, 0)
    order = rows.reshape(-1)
    weights = (_rows(gate_up.weights[0], order),)
    bias = None if gate_up.bias is None else _picked(gate_up.bias, order)
    return Linear(weights, bias, gate_up.mix)


def _rows(weight: Tensor | Quantized, order: Tensor) -> Tensor | Quantized:
    """Rows of a weight in another order; -1: zeros."""
    if isinstance(weight, Tensor):
        return _picked(weight, order)
    if isinstance(weight, Affine):
        zero = None if weight.zero is None else _picked(weight.zero, order)
        return Affine(_picked(weight.codes, order), _picked(weight.scale, order), zero, weight.columns, weight.bits)
    return _picked(weight.dense(torch.bfloat16), order)


def _picked(values: Tensor, order: Tensor) -> Tensor:
    picked = values[order.clamp_min(0)]
    picked[order < 0] = 0
    return picked


def _columns(values: Tensor, multiple: int) -> Tensor:
    """Padded at the right with zeros."""
    missing = -values.shape[-1] % multiple
    return torch.nn.functional.pad(values, (0, missing)).contiguous() if missing else values.contiguous()


def _floats(values: Tensor, multiple: int = WIDE) -> Array:
    array: Array = _columns(values.float(), multiple).numpy()
    return array


def _bits(values: Tensor) -> Array:
    """bfloat16 as the integers that numpy knows."""
    array: Array = values.view(torch.int16).numpy()
    return array
