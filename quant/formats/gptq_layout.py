"""
GPTQ's layout on disk, as auto-gptq writes it (v1) and gptqmodel (v2).

    qweight  int32 [in / n, out]      n = 32 / bits codes in a word, along the input
    qzeros   int32 [groups, out / n]  zero points, along the output: less one in v1, as they are in v2
    scales   float16 [groups, out]    g_idx  int32 [in], the group of each column

Codes are unsigned here and signed in memory: both move by 2 ** (bits - 1), zero points too.
"""

import torch
from torch import Tensor

from quant.formats.bits import pack_words, signed, unpack_words, unsigned
from quant.formats.errors import ModelError
from quant.formats.expect import COLUMNS_MAX, FLOATS, Settings, Tensors, shown
from quant.formats.kept import LINEARS, checked_kept, everywhere, from_expression, kept_everywhere, to_expression
from quant.formats.numbers import groups_of
from quant.formats.scheme import Scheme
from quant.formats.weights import Affine

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
_MULTIPLE = 32  # of rows and columns: auto-gptq's buffers are cut off otherwise, silently


def pack(scheme: Scheme, weight: Affine) -> dict[str, Tensor]:
    """The four tensors of a linear layer.  Raises ModelError for what this layout cannot hold."""
    out, columns = weight.shape
    if out % _MULTIPLE or columns % _MULTIPLE:
        raise ModelError(f"GPTQ's layout needs multiples of {_MULTIPLE}, this is {out} x {columns}: keep it float")
    assert weight.bits == scheme.bits and (weight.zero is None or not scheme.symmetric)
    scales = weight.scale.to(torch.float16)
    if not bool(torch.isfinite(scales).all()):
        raise ModelError("a scale is beyond float16, which GPTQ's layout has: keep this layer float")
    groups = weight.column_groups.to("cpu", torch.int32)
    consecutive = torch.arange(columns, dtype=torch.int32) // _columns_per_group(scheme, columns)
    assert scheme.desc_act or torch.equal(groups, consecutive), "columns are out of order without desc_act"
    return {
        "qweight": pack_words(unsigned(weight.codes, scheme.bits), scheme.bits).T.contiguous(),
        "qzeros": _pack_zeros(scheme, weight),
        "scales": scales.T.contiguous(),
        "g_idx": groups,
    }


def unpack(scheme: Scheme, tensors: Tensors, shape: tuple[int, int]) -> Affine:
    """The weight of shape [out, in].  Raises ModelError naming the tensor that is wrong."""
    out, columns = shape
    bits = scheme.bits
    count_per_word = 32 // bits
    if out % count_per_word or columns % count_per_word:
        raise ModelError(f"GPTQ's layout needs multiples of {count_per_word}, this layer is {out} x {columns}")
    group_size = _columns_per_group(scheme, columns)
    if not scheme.desc_act:
        groups_of(columns, scheme.group_size)
    groups = -(-columns // group_size)
    words = tensors.take("qweight", (torch.int32,), (columns // count_per_word, out))
    zeros = tensors.take("qzeros", (torch.int32,), (groups, out // count_per_word))
    scales = tensors.numbers("scales", FLOATS, (groups, out))
    return Affine(
        codes=signed(unpack_words(words.T, bits, columns), bits),
        scale=scales.T.contiguous(),
        zero=_unpack_zeros(scheme, tensors, unpack_words(zeros, bits, out)),
        columns=_column_groups(scheme, tensors, columns, groups),
        bits=bits,
    )


def _pack_zeros(scheme: Scheme, weight: Affine) -> Tensor:
    middle = 2 ** (scheme.bits - 1)
    zero = torch.zeros(weight.scale.shape, dtype=torch.int16) if weight.zero is None else weight.zero
    stored = zero + (middle if scheme.zeros_v2 else middle - 1)
    if int(stored.min()) < 0:
        raise ModelError("a zero point is 0, which GPTQ's first layout cannot store: write zeros_v2, or quantize again")
    return pack_words(stored.to(torch.uint8).T.contiguous(), scheme.bits)


def _unpack_zeros(scheme: Scheme, tensors: Tensors, stored: Tensor) -> Tensor | None:
    """Zero points on the scale of signed codes, [out, groups]."""
    middle, highest = 2 ** (scheme.bits - 1), 2**scheme.bits - 1
    if scheme.symmetric:
        # The zero point is the middle whatever the file is called: not all that write v2 say so.
        first = int(stored[0, 0]) if stored.numel() else middle
        if first not in (middle - 1, middle) or not bool((stored == first).all()):
            raise tensors.wrong("qzeros", "is not that of symmetric weights, though the configuration says sym")
        return None
    zero = stored.to(torch.int16)
    if not scheme.zeros_v2:
        if bool((stored == highest).any()):
            raise tensors.wrong("qzeros", "has a zero point that every loader reads otherwise (0 or 16 of 4 bits)")
        zero = zero.add(1)
    return zero.sub(middle).T.contiguous()


def _column_groups(scheme: Scheme, tensors: Tensors, columns: int, groups: int) -> Tensor | None:
    """The group of each column, or None if they follow one another."""
    consecutive = torch.arange(columns, dtype=torch.int32) // _columns_per_group(scheme, columns)
    if "g_idx" not in tensors and (not scheme.desc_act or groups == 1):
        return None
    of_column = tensors.take("g_idx", (torch.int32, torch.int64), (columns,)).to(torch.int32)
    if torch.equal(of_column, consecutive):
        # A last group that is short must be said: without `columns`, groups are equally many.
        return None if groups == 1 or groups * scheme.group_size == columns else consecutive
    if not scheme.desc_act:
        raise tensors.wrong("g_idx", "is out of order, though the configuration says desc_act is false")
    if int(of_column.min()) < 0 or int(of_column.max()) >= groups:
        raise tensors.wrong("g_idx", f"names a group beyond the {groups} that there are")
    return of_column


def _columns_per_group(scheme: Scheme, columns: int) -> int:
    return columns if scheme.group_size == -1 else scheme.group_size


def config(scheme: Scheme, layers: int | None) -> dict[str, object]:
    """`quantization_config`, and quantize_config.json, of a scheme."""
    written: dict[str, object] = {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "desc_act": scheme.desc_act,
        "sym": scheme.symmetric,
        "damp_percent": 0.01,
        "static_groups": False,
        "true_sequential": True,
        "checkpoint_format": "gptq_v2" if scheme.zeros_v2 else "gptq",
        "lm_head": False,
    }
    if scheme.kept:
        # For gptqmodel and vLLM; transformers needs the other one, which cannot tell decoder layers apart.
        written["dynamic"] = {f"-:{to_expression(entry)}": {} for entry in scheme.kept}
        whole = kept_everywhere(scheme.kept, layers)
        if whole:
            written["modules_in_block_to_quantize"] = [[linear] for linear in LINEARS if linear not in whole]
    return written


def read(settings: Settings) -> Scheme:
    """The scheme of such a configuration, whoever wrote it.  Raises ModelError."""
    bits = settings.integer("bits")
    if bits not in (4, 8):
        raise ModelError(f"GPTQ with {shown(bits)} bits is not supported: take a 4- or 8-bit checkpoint of the model")
    layout = settings.text("checkpoint_format", settings.text("format", "gptq"))
    if layout not in ("gptq", "gptq_v2") or settings.flag("is_marlin_format", False):
        layout = "marlin" if layout == "gptq" else layout
        raise ModelError(f"GPTQ in the layout {shown(layout)} is not supported: take one in gptq or gptq_v2")
    if settings.flag("lm_head", False):
        raise ModelError("a quantized lm_head is not supported: take a checkpoint with lm_head left out")
    if settings.text("pack_dtype", "int32") not in ("int32", "torch.int32"):
        raise ModelError(f"GPTQ packed in {shown(settings.values['pack_dtype'])} is not supported: take int32")
    if "rotation" in settings.values:
        raise ModelError("GPTQ with rotated weights is not supported: take a checkpoint without `rotation`")
    group_size = settings.integer("group_size")
    if group_size != -1 and not 0 < group_size <= COLUMNS_MAX:
        raise settings.wrong("group_size", "-1 or more than 0")
    return Scheme(
        method="gptq",
        bits=bits,
        granularity="channel" if group_size == -1 else "group",
        group_size=group_size,
        symmetric=settings.flag("sym"),
        desc_act=settings.flag("desc_act"),
        zeros_v2=layout == "gptq_v2",
        kept=_kept(settings),
    )


def _kept(settings: Settings) -> tuple[str, ...]:
    """What `dynamic` leaves out, and what `modules_in_block_to_quantize` does not list and `dynamic` does not name."""
    dynamic = settings.inner("dynamic")
    kept = []
    for key, value in (dynamic.values if dynamic else {}).items():
        if key.startswith("-:"):
            kept.append(from_expression(key.removeprefix("-:")))
        elif value:
            raise ModelError(f"GPTQ with settings of its own for {shown(key)} is not supported: take one uniform model")
    blocks = settings.values.get("modules_in_block_to_quantize")
    if blocks is not None:
        listed = _flat(settings, blocks)
        unlisted = [linear for linear in LINEARS if linear not in listed]
        kept += [everywhere(linear) for linear in unlisted if not any(entry.endswith(linear) for entry in kept)]
    return checked_kept(kept, "quantization_config.dynamic")


def _flat(settings: Settings, blocks: object) -> frozenset[str]:
    """The names in a list of lists of names."""
    if isinstance(blocks, list) and all(isinstance(block, list) for block in blocks):
        names = [name for block in blocks for name in block]
        if all(isinstance(name, str) for name in names):
            return frozenset(names)
    raise settings.wrong("modules_in_block_to_quantize", "a list of lists of names")
