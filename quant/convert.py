"""
A float checkpoint in, quantized tensors and what they cost out, one decoder layer at a time.

Three streams of hidden states go through the layers side by side:

    calibration   through the layers as they become, so that each layer is fitted to the inputs that it will really have
    source        the evaluation text through the layers as they were, in float32
    result        the evaluation text through the layers as they become, activations rounded as the engine will do it

So the peak of memory is one layer and the activations, and the quality is known when the last layer is done.
"""

import math
from collections.abc import Callable

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from quant.auto_gptq_backend import solve_with_auto_gptq
from quant.formats.checkpoint import Checkpoint
from quant.formats.errors import ModelError
from quant.formats.layouts import pack
from quant.formats.numbers import groups_of, round_fp8, round_rows_fp8, round_rows_int8
from quant.formats.rotation import for_rounding
from quant.formats.rounding import round_weight
from quant.formats.scheme import Activations, Scheme
from quant.formats.weights import Affine, Fp8, Quantized
from quant.forward import (
    ALL_LINEARS,
    LINEARS,
    STAGES,
    LayerForward,
    Stage,
    Stream,
    Weights,
    layer_shapes,
    norm,
    plain,
    read_layer,
)
from quant.gptq import Hessian, solve, solve_fp8
from quant.options import ConvertOptions, Progress
from quant.passages import BATCH_TOKENS, Padded
from quant.quality import Comparison
from quant.report import LinearReport, Measured
from quant.smooth import NORM_STAGES, Inputs, smooth_layer

Sink = Callable[[dict[str, Tensor]], None]

ROUNDING_TOKENS_MAX = 4096  # of calibration, where no Hessian is needed
ERROR_ROWS = 1024  # on which a layer's error is measured
SUGGESTIONS = 10
ROTATED_STAGES: dict[str, tuple[Stage, ...]] = {"offline": ("down",), "full": ()}


def convert(
    checkpoint: Checkpoint,
    options: ConvertOptions,
    calibration: Tensor,
    evaluation: list[Tensor],
    sink: Sink,
    progress: Progress,
) -> Measured:
    """
    Quantize the linear layers of all decoder layers.

    Args:
        calibration: int64 [sequences, tokens]
        evaluation: int64 [tokens] each, at least two tokens
        sink: takes finished tensors by their full names, in the order of the model
        progress: what is being done, how many layers are done, of how many
    Raises:
        ModelError: a tensor is missing or not finite, or the scheme does not fit the model's sizes
    """
    _refuse_misfits(checkpoint, options)
    with torch.no_grad():
        return _Conversion(checkpoint, options, calibration, evaluation).run(sink, progress)


class _Conversion:
    """The state between layers."""

    def __init__(
        self, checkpoint: Checkpoint, options: ConvertOptions, calibration: Tensor, evaluation: list[Tensor]
    ) -> None:
        self._a = checkpoint.architecture
        self._original = self._checkpoint = checkpoint
        if options.rotate != "none":
            online = options.rotate == "full"
            self._checkpoint, scheme = for_rounding(checkpoint, options.scheme, seed=options.seed, online=online)
            options = msgspec.structs.replace(options, scheme=scheme)
        self._options = options
        self._scheme = options.scheme
        self._device = torch.device(options.device)
        embedding = _embedding(self._original)
        self._dtype = stored_dtype(embedding)
        if not _is_solved(self._scheme):
            calibration = calibration[: max(1, ROUNDING_TOKENS_MAX // calibration.shape[1])]
        self._evaluation = Padded(evaluation)
        self._source = Stream(self._evaluation.batches, embedding)
        if self._checkpoint is not self._original:
            embedding = _embedding(self._checkpoint)
        stored = embedding.to(self._dtype)  # rounded by itself or after it was looked up is the same
        self._calibration = Stream(calibration.split(max(1, BATCH_TOKENS // calibration.shape[1])), stored)
        self._result = Stream(self._evaluation.batches, stored)
        self._reports: list[LinearReport] = []
        self._damage: dict[str, float] = {}  # of each quantized linear layer, roughly: relative to the residual stream

    def run(self, sink: Sink, progress: Progress) -> Measured:
        """All layers, then the comparison."""
        a = self._a
        sink({"model.embed_tokens.weight": _embedding(self._checkpoint).to(self._dtype)})
        for number in range(a.layers):
            progress("quantizing layers", number, a.layers)
            sink(self._layer(number))
        progress("quantizing layers", a.layers, a.layers)
        last, head = _ending(self._original)
        source_logits = self._logits(last, head)
        if self._checkpoint is not self._original:
            last, head = _ending(self._checkpoint)
        last, head = last.to(self._dtype), head.to(self._dtype)
        sink({"model.norm.weight": last} | ({} if self._checkpoint.tied else {"lm_head.weight": head}))
        comparison = Comparison(source_logits, self._logits(last.float(), head.float()))
        for tokens, source, result in self._evaluation.passages(self._source.x, self._result.x):
            comparison.add(tokens, source, result)
        kept = tuple(report.name for report in self._reports if report.kept)
        worst = sorted((name for name, damage in self._damage.items() if damage > 0), key=lambda n: -self._damage[n])
        return Measured(
            linears=tuple(self._reports),
            quality=comparison.result(),
            suggestions=tuple(worst[:SUGGESTIONS]),
            scheme=msgspec.structs.replace(self._scheme, kept=kept),
        )

    def _layer(self, number: int) -> dict[str, Tensor]:
        """Quantize one layer and let all streams pass it; its tensors by their full names."""
        prefix = f"model.layers.{number}"
        forward = LayerForward(self._a, number, self._scheme.mix)
        source = weights = self._weights(self._original, number)
        source_peaks = self._pass_source(LayerForward(self._a, number), source)
        if self._checkpoint is not self._original:
            weights = self._weights(self._checkpoint, number)
        work = _Layer(self._smoothed(forward, weights, prefix), prefix, self._options, self._dtype)
        self._calibration.begin(forward, work.finished)
        self._result.begin(forward, work.finished)
        branch: list[LinearReport] = []
        for stage in STAGES:
            peaks = (source_peaks[stage], self._evaluation.peak(self._result.z))
            branch += work.quantize(stage, self._calibration.z, peaks)
            before = _some_rows(self._calibration.x)
            for stream in (self._calibration, self._result):
                stream.advance(forward, stage, work.finished, work.linear)
            if stage in ("o", "down"):  # where a branch joins the residual stream
                share = relative(before, _some_rows(self._calibration.x))
                self._damage |= {report.name: report.output_error * share for report in branch if not report.kept}
                self._reports += branch
                branch = []
        return work.tensors()

    def _weights(self, checkpoint: Checkpoint, number: int) -> dict[str, Tensor]:
        tensors = read_layer(checkpoint, number, torch.float32)
        return {
            name: _finite(tensor, f"model.layers.{number}.{name}").to(self._device) for name, tensor in tensors.items()
        }

    def _pass_source(self, forward: LayerForward, weights: Weights) -> dict[Stage, float]:
        """The source through a layer; the peaks of what its linear layers read."""
        stream, peaks = self._source, dict[Stage, float]()
        stream.begin(forward, weights)
        for stage in STAGES:
            peaks[stage] = self._evaluation.peak(stream.z)
            stream.advance(forward, stage, weights, plain(weights))
        return peaks

    def _smoothed(self, forward: LayerForward, weights: Weights, prefix: str) -> Weights:
        """The same function, with inputs that are easier to round."""
        scheme, alpha = self._scheme, self._options.smooth
        if scheme.activations == "float" or alpha == 0:
            return weights
        inputs = {
            stage: Inputs(batches, self._device)
            for stage, batches in self._calibration.stages(forward, weights)
            if not all(self._options.keeps(f"{prefix}.{name}") for name in LINEARS[stage])
            and stage in smoothed_stages(self._options)
        }

        def product(z: Tensor, weight: Tensor) -> Tensor:
            return F.linear(round_activations(z, scheme.activations), round_weight(weight, scheme).dense(torch.float32))

        integers = scheme.activations == "int8"
        return smooth_layer(weights, inputs, self._a, self._dtype, alpha=alpha, product=product, integers=integers)

    def _logits(self, last: Tensor, head: Tensor) -> Callable[[Tensor], Tensor]:
        last, head = last.to(self._device), head.to(self._device)
        return lambda x: F.linear(norm(x.to(self._device), last, self._a.norm_epsilon), head)


class _Layer:
    """One layer on its way from floats to its final form."""

    def __init__(self, weights: Weights, prefix: str, options: ConvertOptions, dtype: torch.dtype) -> None:
        self._prefix = prefix
        self._options = options
        self._scheme = options.scheme
        self._dtype = dtype
        self._source = weights
        self._packed: dict[str, dict[str, Tensor]] = {}
        self._kept = frozenset(name for name in ALL_LINEARS if options.keeps(f"{prefix}.{name}"))
        self.finished = {name: tensor.to(dtype).float() for name, tensor in weights.items()}
        """float32 of what will be stored; of linear layers from `quantize` on."""

    def linear(self, name: str, z: Tensor) -> Tensor:
        """As the engine will compute it, but in float32."""
        rounded = z if name in self._kept else round_activations(z, self._scheme.activations)
        return F.linear(rounded, self.finished[f"{name}.weight"], self.finished.get(f"{name}.bias"))

    def quantize(self, stage: Stage, inputs: list[Tensor], peaks: tuple[float, float]) -> list[LinearReport]:
        """Finish the linear layers of one stage, which read `inputs` [sequences, tokens, in]; `peaks` are reported."""
        names = [name for name in LINEARS[stage] if name not in self._kept]
        if not all(bool(torch.isfinite(batch).all()) for batch in inputs):
            raise ModelError(f"the inputs of {self._prefix}.{LINEARS[stage][0]} overflow: a broken model?")
        chosen = self._choose(names, inputs)
        rows = _some_rows(inputs).to(self._source["input_layernorm.weight"].device)
        for name in names:
            self.finished[f"{name}.weight"] = chosen[name].dense(torch.float32)
            self._packed[name] = pack(self._scheme, chosen[name])
        return [self._report(name, rows, peaks) for name in LINEARS[stage]]

    def _choose(self, names: list[str], inputs: list[Tensor]) -> dict[str, Quantized]:
        """The quantized weights of linear layers that read the same."""
        scheme = self._scheme
        weights = [self._source[f"{name}.weight"] for name in names]
        if not names or not _is_solved(scheme):
            return {name: round_weight(weight, scheme) for name, weight in zip(names, weights, strict=True)}
        hessian = Hessian(weights[0].shape[1], weights[0].device)
        for batch in inputs:
            hessian.add(batch)
        if not bool(torch.isfinite(hessian.total).all()):
            raise ModelError(f"the inputs of {self._prefix}.{names[0]} are too large to be squared: a broken model?")
        damp = self._options.damp
        counts = [len(weight) for weight in weights]
        if scheme.method == "fp8":
            scales = [round_fp8(weight, scheme.granularity).scale for weight in weights]
            of_rows = torch.cat([scale.expand(rows, 1) for scale, rows in zip(scales, counts, strict=True)])
            values = solve_fp8(torch.cat(weights), of_rows, hessian.total, damp=damp).values.split(counts)
            return {name: Fp8(part, scale) for name, part, scale in zip(names, values, scales, strict=True)}
        together = (solve_with_auto_gptq if self._options.backend == "auto-gptq" else solve)(
            torch.cat(weights),
            hessian.total,
            bits=scheme.bits,
            group_size=scheme.group_size,
            symmetric=scheme.symmetric,
            desc_act=scheme.desc_act,
            damp=damp,
        )
        return dict(zip(names, _rows_of(together, counts), strict=True))

    def _report(self, name: str, inputs: Tensor, peaks: tuple[float, float]) -> LinearReport:
        weight, finished = self._source[f"{name}.weight"], self.finished[f"{name}.weight"]
        kept = name in self._kept
        expected = F.linear(inputs, weight)
        rounded = inputs if kept else round_activations(inputs, self._scheme.activations)
        rounded_error = None
        if _is_solved(self._scheme) and not kept:
            baseline = round_weight(weight, self._scheme).dense(torch.float32)
            rounded_error = relative(F.linear(rounded, baseline), expected)
        error = relative(finished, weight)
        stored = [self.finished[f"{name}.weight"].to(self._dtype)] if kept else list(self._packed[name].values())
        return LinearReport(
            name=f"{self._prefix}.{name}",
            rows=weight.shape[0],
            columns=weight.shape[1],
            kept=kept,
            bits_per_weight=8 * sum(tensor.nbytes for tensor in stored) / weight.numel(),
            sqnr_db=-20 * math.log10(error) if error > 0 else None,
            relative_error=error,
            output_error=relative(F.linear(rounded, finished), expected),
            rounded_error=rounded_error,
            source_input_peak=peaks[0],
            input_peak=peaks[1],
        )

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by full names, in the order of the model."""
        found: dict[str, Tensor] = {}
        for name, tensor in self.finished.items():
            linear = name.removesuffix(".weight")
            if linear in self._packed:
                found |= {f"{self._prefix}.{linear}.{suffix}": part for suffix, part in self._packed[linear].items()}
            else:
                found[f"{self._prefix}.{name}"] = tensor.to(self._dtype).cpu()
        return found


def round_activations(z: Tensor, kind: Activations) -> Tensor:
    """What the engine's products see of `z` [..., in]."""
    if kind == "float":
        return z
    rows = z.reshape(-1, z.shape[-1])
    values, scale = round_rows_int8(rows) if kind == "int8" else round_rows_fp8(rows)
    return (values.float() * scale).view(z.shape)


def smoothed_stages(options: ConvertOptions) -> tuple[Stage, ...]:
    """Whose inputs are smoothed: those that no rotation has spread evenly."""
    stages = STAGES if options.rotate == "none" else ROTATED_STAGES[options.rotate]
    if options.scheme.granularity == "tensor":  # rows that move against each other need a scale each
        return tuple(stage for stage in stages if stage in NORM_STAGES)
    return stages


def _is_solved(scheme: Scheme) -> bool:
    """Whether weights are fitted to the calibration inputs, and not only rounded."""
    return scheme.method in ("gptq", "packed", "fp8")


def relative(found: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of what was expected; 0 if both are 0."""
    size = float(expected.norm())
    difference = float((found - expected).norm())
    return difference / size if size > 0 else (0.0 if difference == 0 else math.inf)


def stored_dtype(tensor: Tensor) -> torch.dtype:
    """The 16-bit float that `tensor` came from; what needs more bits becomes bfloat16."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(tensor.to(dtype).float(), tensor):
            return dtype
    return torch.bfloat16


def _refuse_misfits(checkpoint: Checkpoint, options: ConvertOptions) -> None:
    """Before any work: raises ModelError if groups do not fit a linear layer that is to be quantized."""
    if options.scheme.group_size < 0:
        return
    shapes = layer_shapes(checkpoint.architecture)
    for layer in range(checkpoint.architecture.layers):
        for name in ALL_LINEARS:
            full = f"model.layers.{layer}.{name}"
            if not options.keeps(full):
                try:
                    groups_of(shapes[f"{name}.weight"][1], options.scheme.group_size)
                except ModelError as error:
                    raise ModelError(f"{full}: {error}") from error


def _embedding(checkpoint: Checkpoint) -> Tensor:
    """Read when it is needed: it is larger than a layer."""
    a, name = checkpoint.architecture, "model.embed_tokens.weight"
    return _finite(checkpoint.read(name, (a.vocab_size, a.hidden), torch.float32), name)


def _ending(checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    """What follows the last layer: norm and head."""
    a, norm_name, name = checkpoint.architecture, "model.norm.weight", "lm_head.weight"
    last = _finite(checkpoint.read(norm_name, (a.hidden,), torch.float32), norm_name)
    if checkpoint.tied:
        return last, _embedding(checkpoint)
    return last, _finite(checkpoint.read(name, (a.vocab_size, a.hidden), torch.float32), name)


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise ModelError(f"tensor {name} has NaN or infinite weights: download the model again, or take another")
    return tensor


def _some_rows(inputs: list[Tensor]) -> Tensor:
    """At most ERROR_ROWS tokens, evenly spread: [rows, in]."""
    total = sum(batch.shape[0] * batch.shape[1] for batch in inputs)
    step = -(-total // ERROR_ROWS)
    return torch.cat([batch.flatten(0, 1)[::step] for batch in inputs])


def _rows_of(weight: Affine, counts: list[int]) -> list[Affine]:
    """Cut into so many output channels each."""
    zeros = [None] * len(counts) if weight.zero is None else weight.zero.split(counts)
    parts = zip(weight.codes.split(counts), weight.scale.split(counts), zeros, strict=True)
    return [Affine(codes, scale, zero, weight.columns, weight.bits) for codes, scale, zero in parts]
