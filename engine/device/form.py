"""
In which numbers a model is held, and which decoder computes it: decided once, from options, checkpoint and machine.

    weights      what the options ask for; by default (auto) int8 for float checkpoints on native kernels
    decoder      the native one, if it takes these weights and this machine has it; else the one in torch
    KV           what the options ask for; by default int8 beside quantized weights on native kernels
"""

from dataclasses import dataclass

import torch

from engine.config import EngineOptions
from engine.device.errors import ModelError
from engine.device.machine import choose_dtype
from engine.device.native.library import Library, Unavailable, available, open_library
from engine.device.native.pack import Unpackable, refuse_unpackable
from quant.formats.checkpoint import Checkpoint
from quant.formats.rotation import for_loading
from quant.formats.rounding import AT_LOAD
from quant.formats.scheme import Scheme

AUTO = "auto"
DEFAULT = "int8"  # what auto makes of float weights; docs/quantization.md has what it costs


@dataclass(frozen=True, slots=True)
class Form:
    """The decision."""

    checkpoint: Checkpoint  # the one to read: rotated, where rounding wants that
    dtype: torch.dtype  # of activations in torch, and of what is not quantized
    rounding: Scheme | None  # what its float weights are rounded to while it is loaded
    kv_dtype: str  # auto: dtype; int8, fp8
    native: Library | None
    why_torch: str  # why there is no native decoder

    @property
    def scheme(self) -> Scheme | None:
        """What linear layers are held in."""
        return self.rounding or self.checkpoint.scheme


def choose_form(checkpoint: Checkpoint, options: EngineOptions) -> Form:
    """Decide.  Raises ModelError."""
    dtype = choose_dtype(options.dtype)
    rounding = _rounding(checkpoint, options, dtype)
    if rounding is not None:
        checkpoint, rounding = for_loading(checkpoint, rounding, options.tensor_parallel)
    scheme = rounding or checkpoint.scheme
    library, why = _native(checkpoint, options, dtype, scheme)
    kv_dtype = options.kv_dtype
    if kv_dtype == AUTO and library is not None and scheme is not None:
        kv_dtype = "int8"
    return Form(checkpoint, dtype, rounding, kv_dtype, library, why)


def _rounding(checkpoint: Checkpoint, options: EngineOptions, dtype: torch.dtype) -> Scheme | None:
    """What the option asks for.  Raises ModelError."""
    wanted = options.quantization
    if wanted == AUTO:
        if checkpoint.scheme is not None or options.dtype == "float32":  # who asks for float32 wants float32
            return None
        scheme = AT_LOAD[DEFAULT]
        return scheme if _native(checkpoint, options, dtype, scheme)[0] is not None else None
    if wanted == "none":
        return None
    if wanted not in AT_LOAD:
        raise ModelError(f"quantization {wanted!r} is not supported: choose auto, none, {', '.join(AT_LOAD)}")
    if checkpoint.scheme is not None:
        raise ModelError(
            f"this checkpoint is quantized already ({checkpoint.scheme.label}): leave --quantization out, or"
            " take the original float checkpoint"
        )
    return AT_LOAD[wanted]


def _native(
    checkpoint: Checkpoint, options: EngineOptions, dtype: torch.dtype, scheme: Scheme | None
) -> tuple[Library | None, str]:
    """The native kernels for these weights, or why not."""
    if options.dtype == "float32":
        return None, "--dtype float32 asks for float32"
    if options.kv_dtype == "fp8":
        return None, "--kv-dtype fp8 has no native kernels"
    if scheme is None and dtype != torch.bfloat16:
        return None, "float32 weights have no native kernels"
    try:
        refuse_unpackable(checkpoint.architecture, scheme)
        return open_library(available()), ""
    except (Unpackable, Unavailable) as reason:
        return None, str(reason)
