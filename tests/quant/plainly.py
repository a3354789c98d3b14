"""
A conversion that only rounds, for tests of what is around it: the quality is told, not measured.
"""

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from quant.formats.checkpoint import Checkpoint
from quant.formats.layouts import pack
from quant.formats.rotation import for_rounding
from quant.formats.rounding import round_weight
from quant.forward import ALL_LINEARS, layer_shapes
from quant.options import ConvertOptions, Progress
from quant.report import LinearReport, Measured, Quality

GOOD = Quality(
    tokens=100,
    source_perplexity=10.0,
    perplexity=10.1,
    perplexity_increase=0.01,
    kl_mean=0.001,
    kl_p99=0.01,
    top1=0.99,
)


class Plainly:
    """As `quant.convert.convert`, with the quality that it was given."""

    def __init__(self, quality: Quality = GOOD) -> None:
        self.quality = quality
        self.calibration = torch.zeros(0)
        self.evaluation: list[Tensor] = []

    def __call__(
        self,
        checkpoint: Checkpoint,
        options: ConvertOptions,
        calibration: Tensor,
        evaluation: list[Tensor],
        sink: Callable[[dict[str, Tensor]], None],
        progress: Progress,
    ) -> Measured:
        """Round every layer."""
        self.calibration, self.evaluation = calibration, evaluation
        if options.rotate != "none":
            checkpoint, scheme = for_rounding(checkpoint, options.scheme, online=options.rotate == "full")
            options = msgspec.structs.replace(options, scheme=scheme)
        a, dtype = checkpoint.architecture, torch.bfloat16
        sink(
            {"model.embed_tokens.weight": checkpoint.read("model.embed_tokens.weight", (a.vocab_size, a.hidden), dtype)}
        )
        linears: list[LinearReport] = []
        for layer in range(a.layers):
            for name, shape in layer_shapes(a).items():
                whole = f"model.layers.{layer}.{name}"
                linear, tensor = whole.removesuffix(".weight"), checkpoint.read(whole, shape, dtype)
                if name.removesuffix(".weight") not in ALL_LINEARS:
                    sink({whole: tensor})
                    continue
                kept = options.keeps(linear)
                packed = {"weight": tensor} if kept else pack(options.scheme, round_weight(tensor, options.scheme))
                sink({f"{linear}.{suffix}": part for suffix, part in packed.items()})
                linears.append(_report(linear, shape, kept, len(linears)))
            progress("converting", layer + 1, a.layers)
        sink({"model.norm.weight": checkpoint.read("model.norm.weight", (a.hidden,), dtype)})
        if not checkpoint.tied:
            sink({"lm_head.weight": checkpoint.read("lm_head.weight", (a.vocab_size, a.hidden), dtype)})
        kept_names = tuple(linear.name for linear in linears if linear.kept)
        return Measured(
            linears=tuple(linears),
            quality=self.quality,
            suggestions=tuple(linear.name for linear in reversed(linears) if not linear.kept),
            scheme=msgspec.structs.replace(options.scheme, kept=kept_names),
        )


def _report(name: str, shape: tuple[int, ...], kept: bool, number: int) -> LinearReport:
    return LinearReport(
        name=name,
        rows=shape[0],
        columns=shape[1],
        kept=kept,
        bits_per_weight=16.0 if kept else 4.5,
        sqnr_db=None if kept else 40.0 - number,
        relative_error=0.0 if kept else 0.01,
        output_error=0.0 if kept else number / 1000,
        source_input_peak=9.0,
        input_peak=3.0,
    )
