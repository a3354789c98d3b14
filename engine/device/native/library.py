"""
The compiled library: which one this processor can run, and its interface for ctypes.

The structures here are those of src/pellucid.h; `open_library` compares their sizes, so that they cannot drift apart.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.device.errors import ModelError
from engine.device.native.build import LIBRARIES, REASON, library_name

if TYPE_CHECKING:
    from ctypes import _CData
    from ctypes import _NamedFuncPointer as _Function

CHOICE = "PELLUCID_KERNELS"
"""The environment variable that forces an instruction set (for tests and measurements), or `torch`."""

INT8, INT4, BF16 = 0, 1, 2  # forms of a weight
KV_INT8, KV_BF16 = 0, 1
PARTS = ("products", "attention", "elements", "head")  # what a step's time went into, in the order of the interface
TILE = 32  # output channels of a tile
WIDE = 64  # inputs are padded to a multiple of it
HEAD_DIM_MAX = 256
FAULTS = (
    "", "too many rows", "a token beyond the vocabulary", "a position beyond the context", "a plan that is none",
    "a block that is none, or is written twice", "no memory",
)  # fmt: skip
_NEEDS = {
    "avx512-bf16": ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_vnni", "avx512_bf16"),
    "avx512-vnni": ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_vnni"),
    "avx2": ("avx2", "fma3"),
}


class Unavailable(Exception):
    """There are no native kernels here, and why."""


class Weight(ctypes.Structure):
    """pl_weight"""

    _fields_ = (
        ("data", c_void_p), ("scale", c_void_p), ("bias", c_void_p), ("order", c_void_p), ("form", c_int32),
        ("outs", c_int32), ("ins", c_int32), ("group", c_int32), ("asymmetric", c_int32), ("unused", c_int32),
    )  # fmt: skip


class Layer(ctypes.Structure):
    """pl_layer"""

    _fields_ = (
        ("input_norm", c_void_p), ("post_norm", c_void_p), ("query_norm", c_void_p), ("key_norm", c_void_p),
        ("qkv", Weight), ("output", Weight), ("gate_up", Weight), ("down", Weight), ("window", c_int32),
        ("unused", c_int32),
    )  # fmt: skip


class Decoder(ctypes.Structure):
    """pl_model"""

    _fields_ = (
        ("layers", POINTER(Layer)), ("embedding", c_void_p), ("norm", c_void_p), ("cosine", c_void_p),
        ("sine", c_void_p), ("kv", c_void_p), ("head", Weight), ("layers_count", c_int32), ("hidden", c_int32),
        ("intermediate", c_int32), ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
        ("vocab", c_int32), ("positions_max", c_int32), ("blocks_max", c_int32), ("kv_form", c_int32),
        ("mix", c_int32), ("threads", c_int32), ("epsilon", c_float), ("unused", c_int32),
    )  # fmt: skip


class Step(ctypes.Structure):
    """pl_step_args"""

    _fields_ = (
        ("plan", c_void_p), ("logits", c_void_p), ("best_ids", c_void_p), ("highest", c_void_p), ("lowest", c_void_p),
        ("finite", c_void_p), ("parts_ns", c_void_p), ("plan_length", c_int64), ("slices", c_int32), ("rows", c_int32),
        ("outs", c_int32), ("wanted", c_int32),
    )  # fmt: skip


class Draw(ctypes.Structure):
    """pl_draw"""

    _fields_ = (
        ("temperature", c_double), ("top_p", c_double), ("min_p", c_double), ("uniform", c_double), ("top_k", c_int32),
        ("unused", c_int32),
    )  # fmt: skip


_STRUCTURES = (Weight, Layer, Decoder, Step, Draw)


class Library:
    """The functions, with their types."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.isa = _typed(library.pl_isa, c_char_p)().decode()
        layout = _typed(library.pl_layout, c_int64, c_int32)
        for which, structure in enumerate(_STRUCTURES):
            if layout(which) != ctypes.sizeof(structure):
                raise Unavailable(f"{path.name} is of another version: install Pellucid again")
        self.kv_bytes = _typed(library.pl_kv_bytes, c_int64, c_int32, c_int32)
        self.packed_bytes = _typed(library.pl_packed_bytes, c_int64, *[c_int32] * 5)
        self.pack_int8 = _typed(library.pl_pack_int8, None, c_void_p, c_void_p, c_int32, c_int32)
        self.pack_int4 = _typed(library.pl_pack_int4, None, *[c_void_p] * 4, *[c_int32] * 3)
        self.pack_bf16 = _typed(library.pl_pack_bf16, None, c_void_p, c_void_p, c_int32, c_int32)
        self.open = _typed(library.pl_open, c_void_p, POINTER(Decoder), c_int32)
        self.close = _typed(library.pl_close, None, c_void_p)
        self.step = _typed(library.pl_step, c_int32, c_void_p, POINTER(Step))
        self.product = _typed(
            library.pl_product, c_int32, POINTER(Weight), c_void_p, c_void_p, c_int32, c_int32, c_int32
        )
        self.sample = _typed(library.pl_sample, c_int32, c_void_p, c_int64, POINTER(Draw), c_void_p, c_int32, c_int32)
        self.group_bytes = _typed(library.pl_group_bytes, c_int64, c_int32, c_int64)
        self.group_open = _typed(library.pl_group_open, c_void_p, c_void_p, c_int32, c_int32, c_int64, c_int64)
        self.group_close = _typed(library.pl_group_close, None, c_void_p)
        self.group_sum = _typed(library.pl_group_sum, c_int32, c_void_p, c_void_p, c_int64, c_void_p)
        self.group_gather = _typed(library.pl_group_gather, c_int32, *[c_void_p] * 5)
        self.group_send = _typed(library.pl_group_send, c_int32, c_void_p, c_int32, c_void_p, c_int64, c_void_p)
        self.group_receive = _typed(library.pl_group_receive, c_int32, c_void_p, c_int32, c_void_p, c_int64, c_void_p)


def _typed(function: "_Function", result: "type[_CData] | None", *arguments: "type[_CData]") -> "_Function":
    function.restype = result
    function.argtypes = arguments  # type: ignore[assignment]  # typeshed lists the kinds of _CData one by one
    return function


def instruction_sets() -> tuple[str, ...]:
    """Those that this processor has, best first."""
    has = torch.cpu.get_capabilities()
    return tuple(name for name, needs in _NEEDS.items() if all(has.get(need) for need in needs))


def available() -> str:
    """The instruction set to use.  Raises Unavailable; ModelError if the one that was asked for cannot be had."""
    choice = os.environ.get(CHOICE, "")
    if choice == "torch":
        raise Unavailable(f"{CHOICE}=torch asks for the decoder in torch")
    if choice and choice not in _NEEDS:
        raise ModelError(f"{CHOICE}={choice} is not known: choose {', '.join(_NEEDS)} or torch")
    usable = instruction_sets()
    if choice and choice not in usable:
        raise ModelError(
            f"{CHOICE}={choice} is not for this processor, which has {', '.join(usable) or 'none of them'}"
        )
    return _first_built((choice,) if choice else usable)


def any_library() -> Library:
    """For what does not compute: of any instruction set, whatever kernels were asked for.  Raises Unavailable."""
    return open_library(_first_built(instruction_sets()), LIBRARIES)


def _first_built(usable: Sequence[str]) -> str:
    """The first of these instruction sets that there is a library for.  Raises Unavailable."""
    for name in usable:
        if (LIBRARIES / library_name(name)).is_file():
            return name
    note = LIBRARIES / REASON
    if not usable:
        raise Unavailable("the native kernels need a processor with AVX2")
    reason = (
        note.read_text(encoding="utf-8").strip() if note.is_file() else "they were not built: install Pellucid again"
    )
    raise Unavailable(f"no native kernels: {reason}")


@functools.cache
def open_library(instruction_set: str, directory: Path = LIBRARIES) -> Library:
    """Load a library.  Raises Unavailable."""
    try:
        return Library(directory / library_name(instruction_set))
    except (OSError, AttributeError) as error:
        raise Unavailable(f"the native kernels cannot be loaded ({error}): install Pellucid again") from error
