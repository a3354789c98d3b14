"""
All schemes that can be written, and a weight in each of them.
"""

import msgspec
import torch
from torch import Tensor

from quant.formats.bnb import round_llm_int8, round_nf4
from quant.formats.numbers import round_fp8, round_groups, round_int8, round_to_grid
from quant.formats.scheme import Granularity, Scheme
from quant.formats.weights import Affine, Quantized


def schemes() -> list[Scheme]:
    """All that can be written."""
    grouped: list[tuple[Granularity, int]] = [("channel", -1), ("group", 32), ("group", 64), ("group", 192)]
    found = [Scheme(method="int8", bits=8, granularity=kind, group_size=size) for kind, size in grouped]
    found.append(Scheme(method="int8", bits=8, granularity="tensor"))
    found += [Scheme(method="fp8", bits=8, granularity=kind) for kind in ("channel", "tensor")]
    for bits in (4, 8):
        for kind, size in grouped:
            for symmetric in (True, False):
                common = Scheme(method="packed", bits=bits, granularity=kind, group_size=size, symmetric=symmetric)
                found.append(common)
                for desc_act in (False, True):
                    found += [
                        msgspec.structs.replace(common, method="gptq", desc_act=desc_act, zeros_v2=v2)
                        for v2 in (False, True)
                    ]
    found += [Scheme(method="nf4", bits=4, double_quant=double) for double in (False, True)]
    return [*found, Scheme(method="llm-int8", bits=8)]


def round_as(scheme: Scheme, weight: Tensor) -> Quantized:
    """The weight in that scheme, plainly rounded."""
    if scheme.method == "int8":
        return round_int8(weight, scheme.granularity, scheme.group_size)
    if scheme.method == "fp8":
        return round_fp8(weight, scheme.granularity)
    if scheme.method == "nf4":
        return round_nf4(weight, scheme.double_quant)
    if scheme.method == "llm-int8":
        return round_llm_int8(weight)
    rounded = round_groups(weight, scheme.bits, scheme.group_size, scheme.symmetric)
    return shuffled(rounded, weight) if scheme.desc_act and rounded.groups > 1 else rounded


def shuffled(rounded: Affine, weight: Tensor) -> Affine:
    """The same grids for other columns: as many in each group, out of order."""
    generator = torch.Generator().manual_seed(weight.shape[1])
    columns = rounded.column_groups[torch.randperm(weight.shape[1], generator=generator)].to(torch.int32)
    codes = torch.empty_like(rounded.codes)
    for group in range(rounded.groups):
        zero = None if rounded.zero is None else rounded.zero[:, group]
        members = columns == group
        codes[:, members] = round_to_grid(weight[:, members], rounded.scale[:, group], zero, rounded.bits)
    return Affine(codes, rounded.scale, rounded.zero, columns, rounded.bits)
