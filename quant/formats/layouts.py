"""
Quantized weights in files: which tensors a linear layer has, and what config.json says of them.

    int8, fp8, packed   compressed_layout        nf4, llm-int8   bnb_layout        gptq   gptq_layout

Read whoever wrote them; write what all loaders read.  What is not supported is refused by its name.
"""

from collections.abc import Mapping
from typing import assert_never

from torch import Tensor

from quant.formats import bnb_layout, compressed_layout, gptq_layout
from quant.formats.errors import ModelError
from quant.formats.expect import Settings, Tensors, shown
from quant.formats.kept import checked_kept
from quant.formats.mixing import POINTS
from quant.formats.scheme import Scheme
from quant.formats.weights import Affine, Fp8, LlmInt8, Nf4, Quantized

_PLACE = "quantization_config"


def pack(scheme: Scheme, weight: Quantized) -> dict[str, Tensor]:
    """The tensors of one linear layer by suffix, on the CPU.  Raises ModelError for what the layout cannot hold."""
    match weight:
        case Affine() | Fp8() if scheme.method in ("int8", "fp8", "packed"):
            tensors = compressed_layout.pack(scheme, weight)
        case Affine() if scheme.method == "gptq":
            tensors = gptq_layout.pack(scheme, weight)
        case Nf4() if scheme.method == "nf4":
            tensors = bnb_layout.pack_nf4(scheme, weight)
        case LlmInt8() if scheme.method == "llm-int8":
            tensors = bnb_layout.pack_llm_int8(weight)
        case _:
            raise AssertionError(f"{type(weight).__name__} is no weight of {scheme.method}")
    return {suffix: tensor.cpu() for suffix, tensor in tensors.items()}


def unpack(scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], *, name: str = "") -> Quantized:
    """The weight of shape [out, in] from a layer's tensors by suffix; `name` is for messages.  Raises ModelError."""
    found = Tensors(tensors, name)
    match scheme.method:
        case "int8" | "fp8" | "packed":
            return compressed_layout.unpack(scheme, found, shape)
        case "gptq":
            return gptq_layout.unpack(scheme, found, shape)
        case "nf4":
            return bnb_layout.unpack_nf4(found, shape)
        case "llm-int8":
            return bnb_layout.unpack_llm_int8(found, shape)
    assert_never(scheme.method)


def suffixes(scheme: Scheme) -> tuple[str, ...]:
    """What may follow `prefix.` in the names of a quantized layer's tensors, the bias aside; not all must be there."""
    match scheme.method:
        case "int8" | "fp8" | "packed":
            return compressed_layout.SUFFIXES
        case "gptq":
            return gptq_layout.SUFFIXES
        case "nf4":
            return bnb_layout.NF4_SUFFIXES
        case "llm-int8":
            return bnb_layout.LLM_INT8_SUFFIXES
    assert_never(scheme.method)


def quantization_config(scheme: Scheme, *, layers: int | None = None) -> dict[str, object]:
    """
    What goes into config.json as `quantization_config`, and for GPTQ into quantize_config.json too.

    Args:
        layers: how many decoder layers the model has; GPTQ can then say to transformers what is kept in all of them
    Raises:
        ModelError: the scheme contradicts itself, or `kept` has what is neither a name nor an expression
    """
    _check(scheme)
    match scheme.method:
        case "int8" | "fp8" | "packed":
            return compressed_layout.config(scheme)
        case "gptq":
            return gptq_layout.config(scheme, layers)
        case "nf4" | "llm-int8":
            return bnb_layout.config(scheme)
    assert_never(scheme.method)


def read_scheme(config: Mapping[str, object]) -> Scheme:
    """The scheme of a `quantization_config` or quantize_config.json, whoever wrote it.  Raises ModelError."""
    settings = Settings(config, _PLACE)
    method = settings.text("quant_method", _guess(settings)).lower()
    match method:
        case "gptq":
            return gptq_layout.read(settings)
        case "compressed-tensors":
            return compressed_layout.read(settings)
        case "bitsandbytes":
            return bnb_layout.read(settings)
    raise ModelError(
        f"quant_method {shown(method)} is not supported: take the float model, or one in gptq, compressed-tensors or "
        "bitsandbytes"
    )


def _guess(settings: Settings) -> str:
    """What wrote a configuration without `quant_method`: auto-gptq and transformers of older versions left it out."""
    if "bits" in settings.values and "group_size" in settings.values:
        return "gptq"
    return "bitsandbytes" if settings.values.keys() & {"load_in_4bit", "load_in_8bit"} else "(none)"


def _check(scheme: Scheme) -> None:
    """Raises ModelError unless some configuration means exactly this scheme."""
    fits = {
        "int8": scheme.bits == 8,
        "fp8": scheme.bits == 8 and scheme.granularity != "group",
        "gptq": scheme.bits in (4, 8) and scheme.granularity != "tensor",
        "packed": scheme.bits in (4, 8) and scheme.granularity != "tensor",
        "nf4": scheme.bits == 4 and scheme.granularity == "channel",
        "llm-int8": scheme.bits == 8 and scheme.granularity == "channel",
    }[scheme.method]
    grouped = scheme.group_size > 0 if scheme.granularity == "group" else scheme.group_size == -1
    only_gptq = scheme.method == "gptq" or not (scheme.desc_act or scheme.zeros_v2)
    only_nf4 = scheme.method == "nf4" or not scheme.double_quant
    signs = scheme.symmetric or scheme.method in ("gptq", "packed")
    mixes = scheme.mix == 0 or (scheme.method == "int8" and scheme.mix in POINTS)
    if not (fits and grouped and only_gptq and only_nf4 and signs and mixes):
        raise ModelError(
            f"no format is {scheme.method} of {scheme.bits} bits by {scheme.granularity} in {scheme.group_size}: "
            "a group size goes with granularity group, bits with the method"
        )
    checked_kept(scheme.kept, "kept")
