"""
Plain rounding to each scheme: what needs no data but the weight itself.
"""

from torch import Tensor

from quant.formats.bnb import round_llm_int8, round_nf4
from quant.formats.numbers import round_fp8, round_groups, round_int8
from quant.formats.scheme import Scheme
from quant.formats.weights import Quantized

AT_LOAD = {
    "int8": Scheme(method="int8", bits=8),
    "fp8": Scheme(method="fp8", bits=8),
    "nf4": Scheme(method="nf4", bits=4),
}
"""What a float model can be rounded to while it is loaded."""


def round_weight(weight: Tensor, scheme: Scheme) -> Quantized:
    """`weight` [out, in], rounded.  Raises ModelError."""
    match scheme.method:
        case "int8":
            return round_int8(weight, scheme.granularity, scheme.group_size)
        case "fp8":
            return round_fp8(weight, scheme.granularity)
        case "nf4":
            return round_nf4(weight, scheme.double_quant)
        case "llm-int8":
            return round_llm_int8(weight)
        case "gptq" | "packed":
            return round_groups(weight, scheme.bits, scheme.group_size, scheme.symmetric)
