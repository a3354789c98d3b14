"""
Rounding as the package bitsandbytes does it, by that package: same numbers, same bytes.  It works on CPU.

Reading what it wrote needs no bitsandbytes (`bnb_layout`), so only converting asks for the extra.
"""

import importlib
import logging
from types import ModuleType

import torch
from torch import Tensor

from quant.formats.errors import ModelError
from quant.formats.weights import NESTED_BLOCK, NF4_BLOCK, LlmInt8, Nested, Nf4

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def round_nf4(weight: Tensor, double_quant: bool = False) -> Nf4:
    """The nearest 4-bit normal floats, in blocks of 64; with `double_quant` their scales are rounded too."""
    assert weight.dtype in _FLOATS, weight.dtype
    rows, columns = weight.shape
    if rows * columns % 2:
        raise ModelError(f"nf4 packs pairs of values, a weight of {rows} x {columns} has an odd number: keep it float")
    packed, state = _functional().quantize_4bit(weight.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4")
    nested = round_scales(state.absmax) if double_quant else None
    absmax = state.absmax if nested is None else nested.dense()
    return Nf4(packed.reshape(-1), absmax, state.code.float(), (rows, columns), weight.dtype, nested)


def round_scales(absmax: Tensor) -> Nested:
    """The double quantization of the scales of nf4's blocks, float32 [blocks]."""
    offset = absmax.mean()
    codes, state = _functional().quantize_blockwise(absmax - offset, blocksize=NESTED_BLOCK)
    return Nested(codes, state.absmax, state.code.float().clone(), float(offset))


def round_llm_int8(weight: Tensor) -> LlmInt8:
    """The nearest int8 with one scale for each row, which float16 must hold.  Raises ModelError if it does not."""
    functional = _functional()
    half = weight.to(torch.float16).contiguous()
    if not bool(torch.isfinite(half).all()):
        raise ModelError("llm-int8 takes weights as float16, and one is beyond 65504: take another scheme, or keep it")
    codes, absmax, _ = functional.int8_vectorwise_quant(half)
    # A row of zeros is divided by 0 in there; what NaN becomes as an int8 is the machine's choice.
    return LlmInt8(codes.masked_fill((absmax == 0)[:, None], 0), absmax.float())


def _functional() -> ModuleType:
    """bitsandbytes.functional; it takes seconds to import, so only who needs it waits.  Raises ModelError."""
    # On import it advises to install a package for products, and we only round.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        raise ModelError(f"this needs bitsandbytes ({error}): pip install 'pellucid[bnb]'") from error
