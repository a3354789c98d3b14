"""
The native decoder as a `Model`: a plan becomes a few arrays of integers, one call computes it.
"""

import ctypes
from array import array
from collections.abc import Sequence
from time import monotonic_ns

import torch
from torch import Tensor

from engine.device.compute import Computed, Passed, sampling_rows
from engine.device.errors import MemoryShort
from engine.device.kv import BLOCK_SLOTS
from engine.device.native.exchanges import Exchanges
from engine.device.native.library import (
    FAULTS,
    KV_BF16,
    KV_INT8,
    LOST,
    PARTS,
    WIDE,
    Decoder,
    Layer,
    Library,
    Step,
    Weight,
)
from engine.device.native.memory import Arrays, aligned
from engine.device.native.pack import LINEARS, weight_of
from engine.device.native.working_memory import ROWS_MIN
from engine.device.ranks.book import Interconnect
from engine.plan import StepPlan
from quant.formats.architecture import Architecture
from quant.formats.rope import RopeTable


class _Room:
    """Where the library writes what came of a step."""

    def __init__(self, rows: int) -> None:
        self.best = (ctypes.c_int32 * rows)()
        self.highest = (ctypes.c_float * rows)()
        self.lowest = (ctypes.c_float * rows)()
        self.finite = (ctypes.c_int32 * rows)()
        self.parts = (ctypes.c_int64 * len(PARTS))()
        arrays = (self.best, self.highest, self.lowest, self.finite, self.parts)
        self.addresses = tuple(ctypes.addressof(array) for array in arrays)


class NativeModel:
    """Implements `engine.device.compute.StageModel`."""

    reproducible = True  # by construction, and checked by the tests: integer sums are exact, float sums have one order
    _handle: int | None = None  # also where there was no memory to begin with

    def __init__(
        self,
        library: Library,
        arrays: Arrays,
        architecture: Architecture,
        *,
        context_max: int,
        blocks_max: int,
        kv_int8: bool,
        mix: int,
        threads: int,
        head_vocab: int,
        interconnect: Interconnect | None = None,
    ) -> None:
        """
        `architecture` is that of this rank's part, but for its vocabulary, which is the embedding's; the head's part of
        it, and so the width of the logits, is `head_vocab`.
        """
        self.name = f"native {library.isa}"
        self.tiles = "int8 kv" if kv_int8 else "bf16 kv"
        self._library = library
        self._arrays = arrays  # the decoder points into them
        self._architecture = architecture
        self._vocab = head_vocab
        self._exchanges = None if interconnect is None else Exchanges(interconnect, architecture.layers)
        self._hidden_bytes = 4 * (architecture.hidden + -architecture.hidden % WIDE)  # of a row that ranks sum
        self._blocks_max = blocks_max
        self._context_max = context_max
        form = KV_INT8 if kv_int8 else KV_BF16
        size = library.kv_bytes(form, architecture.head_dim) * architecture.kv_heads * architecture.layers * blocks_max
        try:
            self._kv = aligned(size)
            self._kv.fill(0)  # touched now, so that memory cannot run out later
        except MemoryError as error:
            raise MemoryShort("the KV cache does not fit into memory: choose a smaller --kv-memory") from error
        self._cosine, self._sine = RopeTable(
            architecture.rope, head_dim=architecture.head_dim, context_max=context_max
        ).halves()
        self._decoder = self._describe(form, mix, threads)
        self._nothing = torch.zeros(0, self._vocab)
        self._rows_max = 0
        self._reserve(ROWS_MIN)

    def __del__(self) -> None:
        if self._handle is not None:
            self._library.close(self._handle)

    def compute(self, plan: StepPlan, wanted: Sequence[int], rows_in: Tensor | None = None) -> Computed:
        """One call."""
        outs = [len(sampling_rows(piece)) for piece in plan.slices]
        return self._step(plan, outs, [count != 0 for count in wanted], rows_in)

    def pass_on(self, plan: StepPlan, rows_in: Tensor | None) -> Passed:
        """One call; rows in the order of the plan."""
        rows = torch.empty(plan.tokens, self._architecture.hidden)
        computed = self._step(plan, [0] * len(plan.slices), [], rows_in, rows)
        return Passed(rows, computed.broken, computed.batch_ns, computed.parts)

    def logits(self, plan: StepPlan, rows_in: Tensor | None = None) -> Tensor:
        """All rows."""
        assert len(plan.slices) == 1
        return self._step(plan, [plan.tokens], [True] * plan.tokens, rows_in).logits

    def reset(self) -> None:
        """Forget all KV."""
        self._kv.fill(0)

    def _step(
        self,
        plan: StepPlan,
        outs: Sequence[int],
        wanted: Sequence[bool],
        rows_in: Tensor | None = None,
        rows_out: Tensor | None = None,
    ) -> Computed:
        """
        Compute a plan, of each slice of which the last `outs` rows sample.

        As few calls as can be: what runs between two steps finds the caches full of weights.
        """
        began_ns = monotonic_ns()
        rows, pieces, sampling = plan.tokens, plan.slices, len(wanted)
        assert pieces, f"step {plan.step_id}: nothing to compute"
        assert len({piece.sequence for piece in pieces}) == len(pieces), f"step {plan.step_id}: a sequence twice"
        self._reserve(rows)
        numbers: list[int] = []
        first = 0
        for piece, count in zip(pieces, outs, strict=True):
            tokens = piece.tokens
            used = (piece.start + len(tokens) - 1) // BLOCK_SLOTS + 1
            blocks = piece.blocks if len(piece.blocks) == used else piece.blocks[:used]
            numbers += (piece.start, len(tokens), len(blocks), count)
            numbers += wanted[first : first + count]
            numbers += tokens
            numbers += blocks
            first += count
        assert first == sampling
        asked = sum(wanted)
        logits = torch.empty(asked, self._vocab) if asked else self._nothing
        written, room = _int32(numbers), self._room
        address, length = written.buffer_info()
        rows_from = None if rows_in is None else rows_in.data_ptr()
        rows_to = None if rows_out is None else rows_out.data_ptr()
        stamps, lost = (None, None) if self._exchanges is None else self._exchanges.begin()
        step = Step(
            address, logits.data_ptr(), *room.addresses, stamps, lost, rows_from, rows_to, length, len(pieces), rows,
            sampling, asked,
        )  # fmt: skip
        called_ns = monotonic_ns()
        fault = self._library.step(self._handle, ctypes.byref(step))
        returned_ns = monotonic_ns()
        if fault == LOST and self._exchanges is not None:
            raise self._exchanges.failure()
        assert fault == 0, f"step {plan.step_id}: {FAULTS[fault]}"
        if self._exchanges is not None:
            self._exchanges.book(rows * self._hidden_bytes)
        finite = room.finite[: len(pieces)]
        return Computed(
            room.best[:sampling],
            room.highest[:sampling],
            room.lowest[:sampling],
            logits,
            frozenset() if all(finite) else frozenset(i for i, fine in enumerate(finite) if not fine),
            called_ns - began_ns + monotonic_ns() - returned_ns,
            dict(zip(PARTS, room.parts, strict=True)),
        )

    def _reserve(self, rows: int) -> None:
        """Room for steps of `rows` rows."""
        if rows <= self._rows_max:
            return
        if self._handle is not None:  # first, for there may be no memory for both
            self._library.close(self._handle)
        self._handle, self._rows_max = None, 0
        self._handle = self._library.open(ctypes.byref(self._decoder), rows)
        if self._handle is None:
            raise MemoryShort(f"a step of {rows} tokens does not fit into memory: fewer --threads need less")
        self._rows_max = rows
        self._room = _Room(rows)

    def _describe(self, kv_form: int, mix: int, threads: int) -> Decoder:
        """The structure that the library reads.  Everything in it points to what this object holds."""
        a, arrays, exchanges = self._architecture, self._arrays, self._exchanges
        self._layers = (Layer * a.layers)()
        for index in range(a.layers):
            layer = self._layers[index]
            for norm in ("input_norm", "post_norm", "query_norm", "key_norm"):
                if f"{index}.{norm}" in arrays:
                    setattr(layer, norm, arrays[f"{index}.{norm}"].ctypes.data)
            for linear in LINEARS:
                setattr(layer, linear, weight_of(arrays, f"{index}.{linear}"))
            layer.window = a.windows[index]
        assert self._kv.ctypes.data % WIDE == 0
        return Decoder(
            layers=self._layers,
            embedding=arrays["embedding"].ctypes.data,
            norm=arrays["norm"].ctypes.data,
            cosine=self._cosine.data_ptr(),
            sine=self._sine.data_ptr(),
            kv=self._kv.ctypes.data,
            head=weight_of(arrays, "head") if self._vocab else Weight(),
            exchange=None if exchanges is None else exchanges.function,
            context=None if exchanges is None else exchanges.context,
            layers_count=a.layers,
            hidden=a.hidden,
            intermediate=a.intermediate,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            vocab=a.vocab_size,
            head_vocab=self._vocab,
            positions_max=self._context_max,
            blocks_max=self._blocks_max,
            kv_form=kv_form,
            mix=mix,
            threads=threads,
            ranks=1 if exchanges is None else exchanges.ranks,
            epsilon=a.norm_epsilon,
        )


def _int32(numbers: list[int]) -> "array[int]":
    """As one run of memory; a number that has no place there is not what a plan may hold."""
    try:
        return array("i", numbers)
    except OverflowError as error:
        raise AssertionError("a number beyond 32 bits") from error
