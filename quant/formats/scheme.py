"""
How a checkpoint is quantized, as one frozen value: what `quantization_config` of config.json says, in our words.

    int8      W8A8: int8 weights, activations rounded to int8 token by token        compressed-tensors, int-quantized
    fp8       W8A8 in e4m3                                                          compressed-tensors, float-quantized
    gptq      4- or 8-bit weights in groups, float activations                      auto-gptq
    packed    the same integers, found by plain rounding or otherwise               compressed-tensors, pack-quantized
    nf4       4-bit normal floats                                                   bitsandbytes
    llm-int8  8-bit rows                                                            bitsandbytes
"""

from typing import Literal

import msgspec

Method = Literal["int8", "fp8", "gptq", "packed", "nf4", "llm-int8"]
Granularity = Literal["tensor", "channel", "group"]
Activations = Literal["float", "int8", "fp8"]


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint's number format."""

    method: Method
    bits: int
    granularity: Granularity = "channel"
    group_size: int = -1  # columns that share a scale; -1: all of an output channel
    symmetric: bool = True
    desc_act: bool = False  # gptq: groups by descending activation, so g_idx is not c // group_size
    zeros_v2: bool = False  # gptq as gptqmodel writes it: zero points are stored as they are, not less one
    double_quant: bool = False  # nf4: the block scales are quantized too
    kept: tuple[str, ...] = ()  # linear layers of decoder layers that stay floats
    mix: int = 0  # points of the Hadamard transform that the input of down_proj needs, see `mixing`

    @property
    def activations(self) -> Activations:
        """What the activations of a product are rounded to, token by token."""
        if self.method == "int8":
            return "int8"
        return "fp8" if self.method == "fp8" else "float"

    @property
    def label(self) -> str:
        """For people and labels: `gptq-4bit-g64`, `int8`, `int8-tensor`, `nf4`."""
        parts: list[str] = [self.method]
        if self.method in ("gptq", "packed"):
            parts.append(f"{self.bits}bit")
            parts.append(f"g{self.group_size}" if self.group_size > 0 else "channel")
            parts += [] if self.symmetric else ["asym"]
            parts += ["act"] if self.desc_act else []
        elif self.granularity != "channel":
            parts.append(self.granularity if self.group_size < 0 else f"g{self.group_size}")
        return "-".join(parts)
