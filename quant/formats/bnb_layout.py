"""
bitsandbytes' layouts on disk, as transformers saves them.

    nf4       weight uint8 [out * in / 2, 1], weight.absmax [blocks], weight.quant_map [16], a JSON text as a tensor;
              double quantization: absmax is uint8, and weight.nested_absmax, weight.nested_quant_map go with it
    llm-int8  weight int8 [out, in], SCB float32 [out], weight_format uint8, 0 for rows
"""

import json

import torch
from torch import Tensor

from quant.formats.bnb import round_scales
from quant.formats.errors import ModelError
from quant.formats.expect import Settings, Tensors, shown
from quant.formats.kept import HEAD, checked_kept, from_skip, to_skip
from quant.formats.scheme import Scheme
from quant.formats.weights import NESTED_BLOCK, NF4_BLOCK, LlmInt8, Nested, Nf4

STATE = "weight.quant_state.bitsandbytes__nf4"
NF4_SUFFIXES = (
    "weight",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    STATE,
)
LLM_INT8_SUFFIXES = ("weight", "SCB", "weight_format")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BYTE, _FLOAT = (torch.uint8,), (torch.float32,)


def pack_nf4(scheme: Scheme, weight: Nf4) -> dict[str, Tensor]:
    """The tensors of a linear layer.  Scales that nobody has quantized yet are, if the scheme wants it."""
    tensors = {"weight": weight.codes.reshape(-1, 1).contiguous(), "weight.quant_map": weight.table}
    state: dict[str, object] = {
        "quant_type": "nf4",
        "blocksize": NF4_BLOCK,
        "dtype": _NAMES[weight.dtype],
        "shape": list(weight.shape),
    }
    if scheme.double_quant:
        nested = weight.nested if weight.nested is not None else round_scales(weight.absmax)
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": nested.offset}
        tensors |= {"weight.absmax": nested.codes, "weight.nested_absmax": nested.absmax}
        tensors["weight.nested_quant_map"] = nested.table
    else:
        tensors["weight.absmax"] = weight.absmax
    tensors[STATE] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors


def unpack_nf4(tensors: Tensors, shape: tuple[int, int]) -> Nf4:
    """The weight of shape [out, in]; whether its scales are quantized too, the tensors say.  Raises ModelError."""
    count = shape[0] * shape[1]
    if count % 2:
        raise ModelError(f"nf4 packs pairs of values, this layer is {shape[0]} x {shape[1]}")
    state = _state(tensors)
    _same(state, "quant_type", "nf4")
    _same(state, "blocksize", NF4_BLOCK)
    _same(state, "shape", list(shape))
    dtype = _DTYPES.get(state.text("dtype"))
    if dtype is None:
        raise state.wrong("dtype", "float32, float16 or bfloat16")
    blocks = -(-count // NF4_BLOCK)
    codes = tensors.take("weight", _BYTE, (count // 2, 1)).reshape(-1)
    table = tensors.numbers("weight.quant_map", _FLOAT, (16,))
    # bitsandbytes' own forward on CPU leaves a transposed, 2-D bfloat16 absmax behind, which models were saved with.
    if "weight.nested_absmax" not in tensors:
        return Nf4(codes, tensors.numbers("weight.absmax", _FLOAT, (blocks,)), table, shape, dtype)
    _same(state, "nested_blocksize", NESTED_BLOCK)
    _same(state, "nested_dtype", "float32")
    nested = Nested(
        codes=tensors.take("weight.absmax", _BYTE, (blocks,)),
        absmax=tensors.numbers("weight.nested_absmax", _FLOAT, (-(-blocks // NESTED_BLOCK),)),
        table=tensors.numbers("weight.nested_quant_map", _FLOAT, (256,)),
        offset=state.real("nested_offset"),
    )
    return Nf4(codes, nested.dense(), table, shape, dtype, nested)


def _state(tensors: Tensors) -> Settings:
    """The JSON text that lies in a tensor."""
    octets = bytes(tensors.take(STATE, _BYTE).flatten().tolist())
    try:
        state = json.loads(octets)
    except (ValueError, RecursionError) as error:
        raise tensors.wrong(STATE, f"is no JSON ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise tensors.wrong(STATE, "is no JSON object")
    return Settings(state, STATE)


def _same(state: Settings, key: str, wanted: object) -> None:
    if state.values.get(key) != wanted:
        raise state.wrong(key, str(wanted))


def pack_llm_int8(weight: LlmInt8) -> dict[str, Tensor]:
    """The tensors of a linear layer."""
    return {"weight": weight.codes, "SCB": weight.absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def unpack_llm_int8(tensors: Tensors, shape: tuple[int, int]) -> LlmInt8:
    """The weight of shape [out, in].  Raises ModelError naming the tensor that is wrong."""
    if "weight_format" in tensors and int(tensors.take("weight_format", _BYTE, (), (1,))) != 0:
        raise tensors.wrong("weight_format", "is not 0: codes are stored in a GPU's order, not row by row")
    return LlmInt8(tensors.take("weight", (torch.int8,), shape), tensors.numbers("SCB", _FLOAT, (shape[0],)))


def config(scheme: Scheme) -> dict[str, object]:
    """`quantization_config` of a scheme, as transformers reads it."""
    written: dict[str, object] = {"quant_method": "bitsandbytes"}
    if scheme.method == "nf4":
        written |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": scheme.double_quant,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
        }
    else:
        written |= {"load_in_8bit": True, "llm_int8_threshold": 6.0}
    if scheme.kept:
        # A list replaces the default of transformers, which is the head.
        written["llm_int8_skip_modules"] = [HEAD, *(to_skip(entry) for entry in scheme.kept)]
    return written


def read(settings: Settings) -> Scheme:
    """The scheme of such a configuration, whoever wrote it.  Raises ModelError."""
    four, eight = (
        settings.flag(f"load_in_{bits}bit", False) or settings.flag(f"_load_in_{bits}bit", False) for bits in (4, 8)
    )
    if four == eight:
        raise ModelError("the bitsandbytes configuration says neither load_in_4bit nor load_in_8bit, or both: set one")
    if settings.flag("llm_int8_has_fp16_weight", False):
        raise ModelError("bitsandbytes with llm_int8_has_fp16_weight is not supported: save it without")
    skipped = [skip for skip in settings.texts("llm_int8_skip_modules") if skip != HEAD]
    kept = checked_kept([from_skip(skip) for skip in skipped], "quantization_config.llm_int8_skip_modules")
    if eight:
        return Scheme(method="llm-int8", bits=8, kept=kept)
    kind = settings.text("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        raise ModelError(
            f"bitsandbytes {shown(kind)} is not supported: take nf4 (fp4 is what no bnb_4bit_quant_type means)"
        )
    storage = settings.text("bnb_4bit_quant_storage", "uint8")
    if storage != "uint8":
        raise ModelError(f"bitsandbytes with bnb_4bit_quant_storage {shown(storage)} is not supported: save with uint8")
    double_quant = settings.flag("bnb_4bit_use_double_quant", False)
    return Scheme(method="nf4", bits=4, double_quant=double_quant, kept=kept)
