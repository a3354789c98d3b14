"""
What a conversion cost, in numbers.
"""

import msgspec

from quant.formats.scheme import Scheme


class LinearReport(msgspec.Struct, frozen=True, kw_only=True):
    """One linear layer before and after.  Errors are Frobenius norms, relative to the unquantized."""

    name: str  # model.layers.3.mlp.down_proj
    rows: int
    columns: int
    kept: bool  # stays a float in the stored dtype
    bits_per_weight: float  # scales and zero points included
    sqnr_db: float | None  # signal to quantization noise of the weights; None: no noise
    relative_error: float  # of the weights
    output_error: float  # of the layer's output on the calibration inputs, their rounding included
    source_input_peak: float  # a token's largest input over their root mean square, mean over the evaluation text
    input_peak: float  # the same in the result, rotated or smoothed
    rounded_error: float | None = None  # the same after plain rounding, where weights were fitted: same bits and groups


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """The quantized model against its source, both on the evaluation text, the source in float32."""

    tokens: int  # predictions compared
    source_perplexity: float
    perplexity: float
    perplexity_increase: float  # 0.05: 5 % worse
    kl_mean: float  # nats per token, KL(source || quantized)
    kl_p99: float
    top1: float  # share of positions where both hold the same token for the likeliest


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What `quant.convert.convert` found out on its way."""

    linears: tuple[LinearReport, ...]  # in the order of the model
    quality: Quality
    suggestions: tuple[str, ...]  # linear layers to keep if the result is not good enough, worst first
    scheme: Scheme  # as asked for, with the names of those linears that stayed floats in `kept`
