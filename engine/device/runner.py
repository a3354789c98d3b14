"""
The device: a model in memory, a paged cache, and `run`.
"""

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.api import WeightFacts
from engine.config import EngineOptions
from engine.device import DeviceFacts
from engine.device.compute import Model, StageModel
from engine.device.errors import MemoryShort, ModelError
from engine.device.form import AUTO, Form, choose_form
from engine.device.kernels import Kernels
from engine.device.kernels.torch_fast import TorchFastKernels, weight_bytes
from engine.device.kv import BLOCK_SLOTS, block_bytes
from engine.device.machine import give_back_memory, memory_bytes, threads
from engine.device.model import load_decoder
from engine.device.native.library import WIDE
from engine.device.native.load import load_native
from engine.device.native.model import NativeModel
from engine.device.native.pack import Unpackable
from engine.device.native.sampling import NativeDraw
from engine.device.native.working_memory import working_bytes
from engine.device.probe import warm_up_plans
from engine.device.ranks.model import SplitModel
from engine.device.ranks.seat import Seat
from engine.device.ranks.shard import Shard, shards
from engine.device.ranks.stages import PipelineModel
from engine.device.sampler import NO_NUMBER, Draw, choose, logits_wanted
from engine.device.torch_model import assemble
from engine.device.verify import accepted, row_specs, undrafted
from engine.device.weights import Weights
from engine.plan import SliceResult, StepPlan, StepResult
from quant.formats.architecture import Architecture
from quant.formats.checkpoint import open_checkpoint

EXCHANGED_ROWS_MIN, EXCHANGED_ROWS_MAX = 64, 512
FINGERPRINT_VERSION = "2"  # raise it when the same weights begin to give other bits


class Runner:
    """Implements `engine.device.Device`: a model that computes, and the sampler."""

    def __init__(self, model: Model, facts: DeviceFacts, draw: Draw | None = None, seat: Seat | None = None) -> None:
        """`seat`: among the ranks that compute this model; None: there are no others."""
        self.facts = facts
        self._model = model
        self._draw = draw
        self._seat = seat

    @staticmethod
    def load(
        options: EngineOptions, kernels: Kernels | None = None, beside_bytes: int = 0, seat: Seat | None = None
    ) -> "Runner":
        """
        Load the model of `options` and warm up.  Sets torch's thread count.  Raises ModelError, and RankLost.

        `kernels` asks for the decoder in torch with these; `beside_bytes` are to be left free; `seat` is that of rank 0
        where there are several, who then all have loaded and warmed up.
        """
        loaded = load_model(options, kernels, beside_bytes, seat)
        form, model = loaded.form, loaded.model
        if seat is not None:
            model = SplitModel(model, seat, loaded.parts, vocab_size=form.checkpoint.architecture.vocab_size)
        draw = None if form.native is None else NativeDraw(form.native, torch.get_num_threads())
        runner = Runner(model, _facts(loaded, model, options), draw, seat)
        context_max, blocks_max = loaded.context_max, loaded.blocks_max
        for plan in warm_up_plans(rows_max=min(options.tokens_step_max, context_max), blocks_max=blocks_max):
            runner.run(plan)
            if not runner.facts.first_token_ns:
                runner.facts = msgspec.structs.replace(runner.facts, first_token_ns=time.monotonic_ns())
        runner.reset()
        return runner

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step: the model, then sampling.  Raises RankLost."""
        if not plan.slices:
            return StepResult(step_id=plan.step_id, slices=())
        result = self._run(plan)
        if self._seat is None:
            return result
        return msgspec.structs.replace(result, interconnect=self._seat.close_book())

    def _run(self, plan: StepPlan) -> StepResult:
        began_ns = time.monotonic_ns()
        specs = [spec for piece in plan.slices if piece.sample is not None for spec in row_specs(piece)]
        wanted = [logits_wanted(spec) for spec in specs]
        computing_ns = time.monotonic_ns()
        computed = self._model.compute(plan, wanted)
        sampling_ns = time.monotonic_ns()
        rows = choose(computed, specs, self._draw)
        sampled_ns = time.monotonic_ns()
        results = accepted(plan.slices, rows)
        for i in computed.broken:
            results[i] = SliceResult(fault=NO_NUMBER, degenerate="not_a_number")
        batch_ns = computed.batch_ns + computing_ns - began_ns + time.monotonic_ns() - sampled_ns
        sample_ns = sampled_ns - sampling_ns
        guessed = [i for i in sorted(computed.broken) if plan.slices[i].drafts]
        if guessed:  # Was it a guess that spoilt it?  Nobody has said these tokens yet.
            alone = self._run(StepPlan(step_id=plan.step_id, slices=tuple(undrafted(plan.slices[i]) for i in guessed)))
            batch_ns, sample_ns = batch_ns + alone.batch_ns, sample_ns + alone.sample_ns
            for i, result in zip(guessed, alone.slices, strict=True):
                results[i] = result
        return StepResult(
            step_id=plan.step_id,
            slices=tuple(results),
            batch_ns=batch_ns,
            sample_ns=sample_ns,
            compute_parts=computed.parts,
        )

    def logits(self, plan: StepPlan) -> Tensor:
        """The logits of every row of a plan with one slice, for tests and quality reports: [tokens, vocab_size]."""
        return self._model.logits(plan)

    def reset(self) -> None:
        """Forget all KV."""
        self._model.reset()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, or a rank's part of one."""

    model: Model
    form: Form  # that it has in the end: some weights are found to be no native ones only when they are read
    parts: tuple[Shard, ...]  # of all ranks
    context_max: int
    blocks_max: int


def load_model(
    options: EngineOptions, kernels: Kernels | None = None, beside_bytes: int = 0, seat: Seat | None = None
) -> Loaded:
    """The model of `options`, or the part of the rank of `seat`.  Sets torch's thread count.  Raises ModelError."""
    loaded = _load(options, kernels, beside_bytes, seat)
    give_back_memory()  # here, since every rank comes by
    return loaded


def _load(options: EngineOptions, kernels: Kernels | None, beside_bytes: int, seat: Seat | None) -> Loaded:
    torch.set_num_threads(options.threads or threads())
    checkpoint = open_checkpoint(Path(options.model))
    context_max = _context_max(checkpoint.architecture, options.context_max)
    form = choose_form(checkpoint, options)
    if kernels is not None:
        form = replace(form, native=None, why_torch="other kernels were asked for")
    parts = parts_of(form, options)
    if seat is None:
        blocks_max = _blocks_max(form, options, beside_bytes)
    else:  # Rank 0 has looked, before there were others whose memory it would have taken for somebody else's.
        blocks_max = blocks_within(form, options.kv_memory_bytes, options)
    rank = seat.rank if seat is not None else 0
    weights = Weights(form.checkpoint, form.dtype, form.rounding, parts[rank] if seat is not None else None)
    try:
        with torch.inference_mode():
            model = _load_native(form, weights, options, seat, context_max=context_max, blocks_max=blocks_max)
            if not isinstance(model, str):
                return Loaded(_staged(model, seat, weights), form, parts, context_max, blocks_max)
            form = replace(form, native=None, why_torch=model)
            decoder = load_decoder(weights, kernels or TorchFastKernels(form.dtype))
            sizes = {"context_max": context_max, "blocks_max": blocks_max}
            in_torch = assemble(decoder, dtype=form.dtype, kv_dtype=form.kv_dtype, seat=seat, **sizes)
            return Loaded(_staged(in_torch, seat, weights), form, parts, context_max, blocks_max)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise MemoryShort(f"{options.model} does not fit into memory: choose a smaller model") from error


def _staged(model: StageModel, seat: Seat | None, weights: Weights) -> Model:
    """The model, in its place in the pipeline if it is one."""
    if seat is None or seat.interconnect.stages == 1:
        return model
    return PipelineModel(model, seat.interconnect, hidden=weights.architecture.hidden)


def _load_native(
    form: Form, weights: Weights, options: EngineOptions, seat: Seat | None, *, context_max: int, blocks_max: int
) -> NativeModel | str:
    """The native model, or why there is none: where there are several ranks, it is native on all of them or on none."""
    model: NativeModel | str = form.why_torch
    if form.native is not None:
        try:
            model = load_native(
                form.native,
                weights,
                kv_int8=form.kv_dtype == "int8",
                context_max=context_max,
                blocks_max=blocks_max,
                threads=torch.get_num_threads(),
                cache=options.packed_directory,
                interconnect=None if seat is None else seat.sums,
            )
        except Unpackable as reason:
            model = str(reason)
    if seat is not None and not seat.agree(not isinstance(model, str)) and not isinstance(model, str):
        return "another rank has weights that the native kernels do not take"
    return model


def refuse_ranks(options: EngineOptions) -> None:
    """
    Raise ModelError if the model cannot be divided so, or if there is no memory for all ranks together.

    For rank 0, before it starts the others.
    """
    _blocks_max(choose_form(open_checkpoint(Path(options.model)), options), options, 0)


def exchanged_values(options: EngineOptions) -> int:
    """Float32 values that ranks exchange at once; those of larger steps go in pieces."""
    hidden = open_checkpoint(Path(options.model)).architecture.hidden
    return -(-hidden // WIDE) * WIDE * min(EXCHANGED_ROWS_MAX, max(EXCHANGED_ROWS_MIN, options.tokens_step_max))


def parts_of(form: Form, options: EngineOptions) -> tuple[Shard, ...]:
    """The part of each rank.  Raises ModelError."""
    return shards(
        form.checkpoint.architecture, form.scheme, tensor=options.tensor_parallel, pipeline=options.pipeline_parallel
    )


def _facts(loaded: Loaded, model: Model, options: EngineOptions) -> DeviceFacts:
    form, context_max, blocks_max = loaded.form, loaded.context_max, loaded.blocks_max
    checkpoint, scheme = form.checkpoint, form.scheme
    dtype = str(form.dtype).removeprefix("torch.")
    details = {
        "dtype": dtype,
        "kv_dtype": dtype if form.kv_dtype == AUTO else form.kv_dtype,
        "kernels": model.name,
        "threads": str(torch.get_num_threads()),
        "tiles": model.tiles,
        "torch": str(torch.__version__),  # a class of its own, which no wire format knows
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    build = "|".join((FINGERPRINT_VERSION, checkpoint.identity, repr(scheme), *details.values()))
    if len(loaded.parts) > 1:
        details["ranks"] = f"{options.tensor_parallel} tensor x {options.pipeline_parallel} pipeline"
    if form.why_torch:
        details["no_native_kernels"] = form.why_torch
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
        reproducible=model.reproducible,
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


def needed_bytes(form: Form, blocks_max: int, options: EngineOptions) -> int:
    """Memory of weights, KV, and what computing takes beside them, of all ranks."""
    return sum(_rank_bytes(form, part, blocks_max, options) for part in parts_of(form, options))


def _rank_bytes(form: Form, part: Shard, blocks_max: int, options: EngineOptions) -> int:
    a = part.of(form.checkpoint.architecture)
    attention = a.hidden * (2 * a.query_size + 2 * a.kv_size)
    linear = a.layers * (attention + 3 * a.hidden * a.intermediate)
    ends = (a.vocab_size + part.vocab.length) * a.hidden * form.dtype.itemsize  # embedding and head
    weights = linear * weight_bytes(form.scheme, form.dtype) + ends
    return int(weights) + blocks_max * block_bytes(a, form.dtype, form.kv_dtype) + _working_bytes(form, a, options)


def _working_bytes(form: Form, a: Architecture, options: EngineOptions) -> int:
    """What native threads take for themselves; nobody has counted what torch takes."""
    if form.native is None:
        return 0
    context_max = _context_max(a, options.context_max)
    rows_max = min(options.tokens_step_max, context_max)
    return working_bytes(
        a,
        threads=options.threads or threads(),
        rows_max=rows_max,
        context_max=context_max,
        ranks=options.tensor_parallel,
    )


def blocks_within(form: Form, kv_memory_bytes: int, options: EngineOptions) -> int:
    """
    Blocks that the KV memory of all ranks holds.  Raises ModelError if that is none.

    Each rank has its part of every block: those of its heads and layers.
    """
    whole = form.checkpoint.architecture
    needed = sum(block_bytes(part.of(whole), form.dtype, form.kv_dtype) for part in parts_of(form, options))
    if kv_memory_bytes < needed:
        raise ModelError(f"one KV block of this model takes {needed} bytes: choose a larger --kv-memory")
    return kv_memory_bytes // needed


def _blocks_max(form: Form, options: EngineOptions, beside_bytes: int) -> int:
    """Blocks that the KV memory holds, after a look at whether the machine has it beside the weights."""
    blocks_max = blocks_within(form, options.kv_memory_bytes, options)
    total, available = needed_bytes(form, blocks_max, options) + beside_bytes, memory_bytes()
    if available is None or total <= available:
        return blocks_max
    takes, free = f"take {total / 2**30:.1f} GiB", f"only {available / 2**30:.1f} GiB are free"
    whole = form.checkpoint.architecture
    working = sum(_working_bytes(form, part.of(whole), options) for part in parts_of(form, options))
    if total - working <= available:
        raise MemoryShort(
            f"weights, KV cache and {options.threads or threads()} threads {takes} ({working / 2**30:.1f} GiB of it the"
            f" threads) and {free}: choose fewer --threads, or a smaller --max-context or --kv-memory"
        )
    raise MemoryShort(f"weights and KV cache {takes} and {free}: choose a smaller model or --kv-memory")
