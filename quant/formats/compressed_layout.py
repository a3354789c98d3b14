"""
compressed-tensors' layouts on disk, which llm-compressor writes and vLLM reads.

    int-quantized, float-quantized  weight int8 or e4m3 [out, in]        int8 and fp8; also called naive-quantized
    pack-quantized                  weight_packed int32 [out, in / n]    packed, n = 32 / bits codes in a word

    weight_scale       float32 [out, groups], or [1] for a tensor       weight_shape  int64 [out, in], if packed
    weight_zero_point  int32 [out / n, groups], packed along the output, if packed and not symmetric
"""

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from quant.formats.bits import pack_words, signed, unpack_words, unsigned
from quant.formats.errors import ModelError
from quant.formats.expect import COLUMNS_MAX, FLOATS, Settings, Tensors, shown
from quant.formats.kept import EXPRESSION, HEAD, checked_kept, to_expression
from quant.formats.mixing import POINTS, STATUS
from quant.formats.numbers import groups_of
from quant.formats.scheme import Granularity, Method, Scheme
from quant.formats.weights import Affine, Fp8

SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
_FORMATS = {"int8": "int-quantized", "fp8": "float-quantized", "packed": "pack-quantized"}
_WHOLE = ("int-quantized", "float-quantized", "naive-quantized")
_GRANULARITIES: dict[str, Granularity] = {"tensor": "tensor", "channel": "channel", "group": "group"}
_UNDERSTOOD = frozenset(("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder"))
_HARMLESS = frozenset(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"))  # how scales came about; their type
_CALIBRATED = ("compressed", "frozen")  # early llm-compressor wrote "frozen" above compressed weights
_MIX = "pellucid_mix"  # nobody else writes it
_NAN = 0x7F  # of e4m3, without its sign


def pack(scheme: Scheme, weight: Affine | Fp8) -> dict[str, Tensor]:
    """The tensors of a linear layer."""
    scale = weight.scale
    if scheme.granularity == "tensor":
        assert bool((scale == scale[0, 0]).all()), "a tensor has one scale"
        scale = scale[0]
    if isinstance(weight, Fp8):
        return {"weight": weight.values.contiguous(), "weight_scale": scale.contiguous()}
    assert weight.bits == scheme.bits and weight.columns is None
    if scheme.method == "int8":
        assert weight.zero is None
        return {"weight": weight.codes.contiguous(), "weight_scale": scale.contiguous()}
    tensors = {
        "weight_packed": pack_words(unsigned(weight.codes, scheme.bits), scheme.bits),
        "weight_scale": scale.contiguous(),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if not scheme.symmetric:
        zero = torch.zeros(weight.scale.shape, dtype=torch.int16) if weight.zero is None else weight.zero
        stored = unsigned(zero.to(torch.int8).T, scheme.bits)
        tensors["weight_zero_point"] = pack_words(stored, scheme.bits).T.contiguous()
    return tensors


def unpack(scheme: Scheme, tensors: Tensors, shape: tuple[int, int]) -> Affine | Fp8:
    """The weight of shape [out, in].  Raises ModelError naming the tensor that is wrong."""
    out, columns = shape
    groups = groups_of(columns, scheme.group_size)
    scale_shapes: dict[Granularity, list[tuple[int, ...]]] = {
        "tensor": [(1,), (), (1, 1)],
        "channel": [(out, 1), (out,)],
        "group": [(out, groups)],
    }
    scale = tensors.numbers("weight_scale", FLOATS, *scale_shapes[scheme.granularity]).reshape(-1, groups)
    if scheme.method == "fp8":
        _no_zeros(tensors, "weight_zero_point")
        values = tensors.take("weight", (torch.float8_e4m3fn,), shape)
        if bool(((values.view(torch.uint8) & _NAN) == _NAN).any()):
            raise tensors.wrong("weight", "holds NaN")
        return Fp8(values, scale)
    scale = scale.expand(out, groups).contiguous()
    # Symmetric 8 bits are stored unpacked by some tools, also where activations are floats.
    packed_only = scheme.bits != 8 or not scheme.symmetric
    if scheme.method == "packed" and (packed_only or "weight_packed" in tensors):
        return _unpack_words(scheme, tensors, shape, scale)
    _no_zeros(tensors, "weight_zero_point")
    return Affine(tensors.take("weight", (torch.int8,), shape), scale, None, None, 8)


def _unpack_words(scheme: Scheme, tensors: Tensors, shape: tuple[int, int], scale: Tensor) -> Affine:
    out, columns = shape
    bits = scheme.bits
    count_per_word = 32 // bits
    written = tensors.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
    if written != [out, columns]:
        raise tensors.wrong("weight_shape", f"says {written}, expected {[out, columns]}")
    words = tensors.take("weight_packed", (torch.int32,), (out, -(-columns // count_per_word)))
    zero = None
    if not scheme.symmetric:
        zero_shape = (-(-out // count_per_word), scale.shape[1])
        zero_words = tensors.take("weight_zero_point", (torch.int32,), zero_shape)
        zero = signed(unpack_words(zero_words.T, bits, out), bits).T.to(torch.int16).contiguous()
    elif "weight_zero_point" in tensors:
        raise tensors.wrong("weight_zero_point", "is there, though the configuration says symmetric")
    return Affine(signed(unpack_words(words, bits, columns), bits), scale, zero, None, bits)


def _no_zeros(tensors: Tensors, suffix: str) -> None:
    """Some tools store the zero points of symmetric weights, all 0."""
    if suffix in tensors and bool((tensors.take(suffix, (torch.int8, torch.int32, *FLOATS)) != 0).any()):
        raise tensors.wrong(suffix, "is not 0, though the configuration says symmetric")


def config(scheme: Scheme) -> dict[str, object]:
    """`quantization_config` of a scheme: the keys that every version of every loader knows, and no others."""
    kind = "float" if scheme.method == "fp8" else "int"
    weights: dict[str, object] = {"num_bits": scheme.bits, "type": kind, "symmetric": scheme.symmetric}
    weights |= {"strategy": scheme.granularity}
    weights |= {"group_size": scheme.group_size} if scheme.granularity == "group" else {}
    group: dict[str, object] = {"targets": ["Linear"], "weights": weights | {"dynamic": False}}
    if scheme.activations != "float":
        group["input_activations"] = {
            "num_bits": 8,
            "type": kind,
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    mixed: dict[str, object] = {"quantization_status": STATUS, _MIX: scheme.mix} if scheme.mix else {}
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[scheme.method],
        # Without the next one transformers loads garbage; without lm_head at the end, too.
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [HEAD, *scheme.kept],
    } | mixed


def read(settings: Settings) -> Scheme:
    """The scheme of such a configuration, whoever wrote it.  Raises ModelError."""
    status = settings.text("quantization_status", "compressed")
    if status not in (*_CALIBRATED, STATUS):
        raise ModelError(f"compressed-tensors with status {shown(status)} has no compressed weights: compress it first")
    for key, way_out in (("sparsity_config", "without sparsity"), ("transform_config", "without transforms")):
        extra = settings.inner(key)
        if extra is not None and extra.values and extra.values.get("format") != "dense":
            raise ModelError(f"compressed-tensors with {key} is not supported: take a checkpoint {way_out}")
    groups = list(_groups(settings))
    schemes = [_scheme(group, group.text("format", settings.text("format", "(none)"))) for group in groups]
    if not schemes:
        raise settings.wrong("config_groups", "an object with at least one group")
    if any(scheme != schemes[0] for scheme in schemes):
        raise ModelError(
            "compressed-tensors with several number formats in one model is not supported: take a uniform one"
        )
    entries = [name for name in settings.texts("ignore") if name.startswith((EXPRESSION, "model.layers."))]
    targets = [target for group in groups for target in group.texts("targets")]
    if "Linear" not in targets:
        # Only what is targeted is quantized; all other layers are kept.
        meant = [f"(?:{to_expression(target)})" for target in targets]
        if not meant:
            raise settings.wrong("config_groups", "groups with targets")
        entries.append(f"{EXPRESSION}(?!{'|'.join(meant)})")
    kept = checked_kept(entries, "quantization_config.ignore")
    points = _mixed(settings, status)
    if points and schemes[0].method != "int8":
        raise settings.wrong(_MIX, "none, for these weights")
    return msgspec.structs.replace(schemes[0], kept=kept, mix=points)


def _mixed(settings: Settings, status: str) -> int:
    """By how many points the inputs of down_proj are mixed; the status must agree."""
    points = settings.integer(_MIX, 0)
    if (status == STATUS) != (points > 0) or points not in (0, *POINTS):
        raise settings.wrong(_MIX, f"one of {', '.join(map(str, POINTS))} with the status {STATUS}, and nowhere else")
    return points


def _groups(settings: Settings) -> Iterator[Settings]:
    """The groups of layers, each with its number format."""
    groups = settings.inner("config_groups")
    for key in groups.values if groups else ():
        assert groups is not None
        group = groups.inner(key)
        if group is not None:
            yield group


def _scheme(group: Settings, layout: str) -> Scheme:
    """The scheme of one group of layers, stored in that layout."""
    weights = group.inner("weights")
    if weights is None:
        raise group.wrong("weights", "an object")
    if group.inner("output_activations") is not None:
        raise ModelError("compressed-tensors with output_activations is not supported: take a checkpoint without")
    kind, bits, granularity, group_size = _weights(weights)
    symmetric = weights.flag("symmetric", True)
    activations = group.inner("input_activations")
    if activations is None:
        fits = layout == "pack-quantized" or (
            layout in ("int-quantized", "naive-quantized") and bits == 8 and symmetric
        )
        if kind != "int" or bits not in (4, 8) or not fits or granularity == "tensor":
            raise _unknown(f"{bits}-bit {kind} weights ({granularity}) with float activations", layout)
        method: Method = "packed"
    else:
        _check_activations(activations, kind)
        if layout not in _WHOLE or bits != 8 or not symmetric or (kind == "float" and granularity == "group"):
            how = "symmetric" if symmetric else "asymmetric"
            raise _unknown(f"{how} {bits}-bit {kind} weights ({granularity}) with rounded activations", layout)
        method = "int8" if kind == "int" else "fp8"
    return Scheme(method=method, bits=bits, granularity=granularity, group_size=group_size, symmetric=symmetric)


def _weights(weights: Settings) -> tuple[str, int, Granularity, int]:
    """(type, bits, granularity, group size), of what we know."""
    unknown = sorted(weights.values.keys() - _UNDERSTOOD - _HARMLESS)
    if unknown:
        raise ModelError(f"compressed-tensors weights with {shown(unknown[0])} are not supported: take one without it")
    if weights.values.get("dynamic", False) is not False:
        raise weights.wrong("dynamic", "false")
    order = weights.values.get("actorder", False)
    if order is not False and order not in ("weight", "static"):
        raise ModelError(f"actorder {shown(order)} is not supported, it was removed: quantize again with 'weight'")
    kind = weights.text("type", "int").lower()
    strategy = weights.text("strategy", "group" if "group_size" in weights.values else "tensor").lower()
    granularity = _GRANULARITIES.get(strategy)
    if kind not in ("int", "float") or granularity is None:
        raise _unknown(f"{shown(kind)} weights with the strategy {shown(strategy)}", "any layout")
    group_size = weights.integer("group_size", -1)
    if granularity != "group":
        group_size = -1
    elif not 0 < group_size <= COLUMNS_MAX:
        raise weights.wrong("group_size", "more than 0")
    return kind, weights.integer("num_bits", 8), granularity, group_size


def _check_activations(activations: Settings, kind: str) -> None:
    """Rounded token by token when they come, symmetrically, to 8 bits of the kind that the weights are of."""
    dynamic = activations.values.get("dynamic", False)
    if dynamic is not True:
        how = "static" if dynamic is False else shown(dynamic)
        raise ModelError(f"{how} activation scales are not supported: take a checkpoint with dynamic ones (per token)")
    if not activations.flag("symmetric", True):
        raise ModelError("asymmetric activations are not supported: take a checkpoint with symmetric ones")
    strategy = activations.text("strategy", "token").lower()
    if strategy != "token":
        raise ModelError(f"activations with the strategy {shown(strategy)} are not supported: take one with 'token'")
    bits, activation_kind = activations.integer("num_bits", 8), activations.text("type", "int").lower()
    if bits != 8 or activation_kind != kind:
        raise ModelError(
            f"{shown(bits)}-bit {shown(activation_kind)} activations with {kind} weights are not supported: "
            "take int8 with int8, or fp8 with fp8"
        )


def _unknown(what: str, layout: str) -> ModelError:
    return ModelError(
        f"compressed-tensors {what} in {shown(layout)} are not supported: "
        "take W8A8 in int8 or fp8, or W4A16 or W8A16 in integers"
    )
