"""
The device: a model in memory, a paged cache, and `run`.
"""

import hashlib
import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.api import WeightFacts
from engine.config import EngineOptions
from engine.device import DeviceFacts
from engine.device.batch import Batch, BatchBuilder, padded_rows
from engine.device.errors import MemoryShort, ModelError
from engine.device.kernels import Kernels
from engine.device.kernels.torch_fast import TorchFastKernels, weight_bytes
from engine.device.kv import BLOCK_SLOTS, KvCache, block_bytes
from engine.device.machine import choose_dtype, give_back_memory, memory_bytes, threads
from engine.device.model import Decoder, load_decoder
from engine.device.probe import PROBE_BLOCKS, ROW_TILES, Probe, probe_layers, warm_up_plans
from engine.device.sampler import NO_NUMBER, sample
from engine.plan import SliceResult, StepPlan, StepResult
from quant.formats.architecture import Architecture
from quant.formats.checkpoint import Checkpoint, open_checkpoint
from quant.formats.rope import RopeTable
from quant.formats.rounding import AT_LOAD
from quant.formats.scheme import Scheme

FINGERPRINT_VERSION = "1"  # raise it when the same weights begin to give other bits


@dataclass(frozen=True, slots=True)
class Form:
    """In which numbers a model is held."""

    dtype: torch.dtype  # of activations, and of what is not quantized
    kv_dtype: str  # auto: dtype; int8, fp8
    rounding: Scheme | None  # what its float weights are rounded to while it is loaded


class Runner:
    """Implements `engine.device.Device` with torch."""

    def __init__(
        self, decoder: Decoder, builder: BatchBuilder, kv: KvCache, facts: DeviceFacts, *, row_tile: int
    ) -> None:
        self.facts = facts
        self._decoder = decoder
        self._builder = builder
        self._kv = kv
        self._row_tile = row_tile

    @staticmethod
    def load(options: EngineOptions, kernels: Kernels | None = None) -> "Runner":
        """Load the model of `options`, probe and warm up.  Sets torch's thread count.  Raises ModelError."""
        dtype = choose_dtype(options.dtype)
        torch.set_num_threads(options.threads or threads())
        checkpoint = open_checkpoint(Path(options.model))
        architecture = checkpoint.architecture
        context_max = _context_max(architecture, options.context_max)
        form = Form(dtype, options.kv_dtype, _rounding(checkpoint, options.quantization))
        blocks_max = _blocks_max(checkpoint, form, options.kv_memory_bytes)
        kernels = kernels or TorchFastKernels(dtype)
        try:
            with torch.inference_mode():
                decoder = load_decoder(checkpoint, kernels, dtype, form.rounding)
                runner = _assemble(decoder, checkpoint, form, context_max=context_max, blocks_max=blocks_max)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            raise MemoryShort(f"{options.model} does not fit into memory: choose a smaller model") from error
        for plan in warm_up_plans(rows_max=min(options.tokens_step_max, context_max), blocks_max=blocks_max):
            runner.run(plan)
        runner.reset()
        give_back_memory()
        return runner

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step: forward, head of the rows that sample, sampling."""
        if not plan.slices:
            return StepResult(step_id=plan.step_id, slices=())
        with torch.inference_mode():
            batch = self._builder.build(plan)
            x = self._decoder.forward(batch, self._kv)
            broken = self._broken(plan, batch, x)
            sampling = [i for i, piece in enumerate(plan.slices) if piece.sample is not None and i not in broken]
            logits = self._logits(x, [batch.last_rows[i] for i in sampling])
            started_ns = time.monotonic_ns()
            sampled = sample(logits, [spec for i in sampling if (spec := plan.slices[i].sample) is not None])
            sample_ns = time.monotonic_ns() - started_ns
        spoiled = SliceResult(fault=NO_NUMBER, degenerate="not_a_number")
        results = [spoiled if i in broken else SliceResult() for i in range(len(plan.slices))]
        for i, result in zip(sampling, sampled, strict=True):
            results[i] = result
        return StepResult(step_id=plan.step_id, slices=tuple(results), sample_ns=sample_ns)

    def logits(self, plan: StepPlan) -> Tensor:
        """The logits of every row of a plan with one slice, for tests and quality reports: [tokens, vocab_size]."""
        assert len(plan.slices) == 1
        with torch.inference_mode():
            batch = self._builder.build(plan)
            x = self._decoder.forward(batch, self._kv)
            return self._logits(x, list(range(batch.rows)))[: batch.rows]

    def reset(self) -> None:
        """Forget all KV."""
        self._kv.reset()

    def _logits(self, x: Tensor, rows: list[int]) -> Tensor:
        """Float32 logits of some rows of `x`, padded by repeating one of them."""
        if not rows:
            return torch.zeros(0, self.facts.vocab_size)
        padding = padded_rows(len(rows), self._row_tile) - len(rows)
        return self._decoder.logits(x[rows + rows[-1:] * padding])

    def _broken(self, plan: StepPlan, batch: Batch, x: Tensor) -> dict[int, str]:
        """
        Slices whose numbers are none.  One bad token spoils all later ones of its sequence, so the last row tells.

        Their blocks are cleaned, or their next owner would read the poison behind its mask.
        """
        finite = torch.isfinite(x[list(batch.last_rows)].float().sum(-1)).tolist()
        broken = {i: NO_NUMBER for i, fine in enumerate(finite) if not fine}
        for i in broken:
            self._kv.scrub(plan.slices[i].blocks)
        return broken


def _assemble(decoder: Decoder, checkpoint: Checkpoint, form: Form, *, context_max: int, blocks_max: int) -> Runner:
    """Find the row tile by probing, then put the parts together."""
    a = decoder.architecture
    rope = RopeTable(a.rope, head_dim=a.head_dim, context_max=context_max)

    def builder(row_tile: int, blocks: int, *, coarse_keys: bool) -> BatchBuilder:
        return BatchBuilder(
            rope=rope,
            windows=frozenset(a.windows),
            query_group=a.heads // a.kv_heads,
            blocks_max=blocks,
            block_slots=BLOCK_SLOTS,
            context_max=context_max,
            vocab_size=a.vocab_size,
            dtype=form.dtype,
            row_tile=row_tile,
            coarse_keys=coarse_keys,
        )

    row_tile, coarse_keys, reproducible = ROW_TILES[0], False, False
    for coarse_keys, row_tile in itertools.product((False, True), ROW_TILES):
        trial = builder(row_tile, PROBE_BLOCKS, coarse_keys=coarse_keys)
        kv = KvCache(a, layers=probe_layers(a), blocks_max=PROBE_BLOCKS, dtype=form.dtype, kv_dtype=form.kv_dtype)
        reproducible = Probe(decoder, trial, kv, row_tile=row_tile, context_max=context_max).passes()
        if reproducible:
            break
    tiles = f"{row_tile}{' coarse' if coarse_keys else ''}"
    facts = _facts(checkpoint, decoder, form, context_max, blocks_max, tiles=tiles, reproducible=reproducible)
    kv = KvCache(a, layers=a.layers, blocks_max=blocks_max, dtype=form.dtype, kv_dtype=form.kv_dtype)
    chosen = builder(row_tile, blocks_max, coarse_keys=coarse_keys)
    return Runner(decoder, chosen, kv, facts, row_tile=row_tile)


def _facts(
    checkpoint: Checkpoint,
    decoder: Decoder,
    form: Form,
    context_max: int,
    blocks_max: int,
    *,
    tiles: str,
    reproducible: bool,
) -> DeviceFacts:
    scheme = form.rounding or checkpoint.scheme
    details = {
        "dtype": str(form.dtype).removeprefix("torch."),
        "kv_dtype": str(form.dtype).removeprefix("torch.") if form.kv_dtype == "auto" else form.kv_dtype,
        "kernels": decoder.kernels.name,
        "threads": str(torch.get_num_threads()),
        "tiles": tiles,
        "torch": str(torch.__version__),  # a class of its own, which no wire format knows
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    build = "|".join((FINGERPRINT_VERSION, checkpoint.identity, repr(scheme), *details.values()))
    weights = WeightFacts(origin=checkpoint.origin)
    if scheme is not None:
        weights = WeightFacts(scheme.method, scheme.bits, scheme.group_size, scheme.label, checkpoint.origin)
    digest = hashlib.blake2b(build.encode(), digest_size=8).hexdigest()
    return DeviceFacts(
        vocab_size=checkpoint.architecture.vocab_size,
        context_max=context_max,
        block_slots=BLOCK_SLOTS,
        blocks_max=blocks_max,
        eos_ids=checkpoint.eos_ids,
        fingerprint=f"fp_{weights.label}_{weights.origin}_{digest}",
        reproducible=reproducible,
        details=details,
        weights=weights,
    )


def _context_max(architecture: Architecture, wanted: int) -> int:
    if wanted > architecture.context_max:
        raise ModelError(
            f"a context of {wanted} tokens is more than the {architecture.context_max} that the model was trained for:"
            " choose a smaller --max-context"
        )
    return wanted or architecture.context_max


def _rounding(checkpoint: Checkpoint, quantization: str) -> Scheme | None:
    """What `quantization` asks for.  Raises ModelError."""
    if quantization == "none":
        return None
    if quantization not in AT_LOAD:
        raise ModelError(f"quantization {quantization!r} is not supported: choose none, {', '.join(AT_LOAD)}")
    if checkpoint.scheme is not None:
        raise ModelError(
            f"this checkpoint is quantized already ({checkpoint.scheme.label}): leave --quantization out, or"
            " take the original float checkpoint"
        )
    return AT_LOAD[quantization]


def _blocks_max(checkpoint: Checkpoint, form: Form, kv_memory_bytes: int) -> int:
    """Blocks that the KV memory holds, after a look at whether the machine has it beside the weights."""
    a = checkpoint.architecture
    needed = block_bytes(a, form.dtype, form.kv_dtype)
    blocks_max = kv_memory_bytes // needed
    if blocks_max < 1:
        raise ModelError(f"one KV block of this model takes {needed} bytes: choose a larger --kv-memory")
    attention = a.hidden * (2 * a.query_size + 2 * a.kv_size)
    linear = a.layers * (attention + 3 * a.hidden * a.intermediate)
    weights = linear * weight_bytes(form.rounding or checkpoint.scheme, form.dtype)
    weights += 2 * a.vocab_size * a.hidden * form.dtype.itemsize
    total, available = weights + blocks_max * needed, memory_bytes()
    if available is not None and total > available:
        raise MemoryShort(
            f"weights and KV cache take {total / 2**30:.1f} GiB and only {available / 2**30:.1f} GiB are free:"
            " choose a smaller model or --kv-memory"
        )
    return blocks_max
