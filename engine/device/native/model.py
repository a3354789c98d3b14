"""
The native decoder as a `Model`: a plan becomes a few arrays of integers, one call computes it.
"""

import ctypes
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.device.compute import Computed, sampling_rows
from engine.device.errors import MemoryShort
from engine.device.kv import BLOCK_SLOTS
from engine.device.native.library import (
    FAULTS,
    KV_BF16,
    KV_INT8,
    PARTS,
    WIDE,
    Decoder,
    Layer,
    Library,
    Step,
)
from engine.device.native.pack import LINEARS, Arrays, aligned, weight_of
from engine.plan import StepPlan
from quant.formats.architecture import Architecture
from quant.formats.rope import RopeTable

_ROWS_MIN = 256  # rows that there is room for from the start


class NativeModel:
    """Implements `engine.device.compute.Model`."""

    reproducible = True  # by construction, and checked by the tests: integer sums are exact, float sums have one order

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
    ) -> None:
        self.name = f"native {library.isa}"
        self.tiles = "int8 kv" if kv_int8 else "bf16 kv"
        self._library = library
        self._arrays = arrays  # the decoder points into them
        self._architecture = architecture
        self._vocab = architecture.vocab_size
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
        self._rows_max = 0
        self._handle: int | None = None
        self._reserve(_ROWS_MIN)

    def __del__(self) -> None:
        if self._handle is not None:
            self._library.close(self._handle)

    def compute(self, plan: StepPlan, wanted: Sequence[bool]) -> Computed:
        """One call."""
        rows: list[int] = []
        first = 0
        for piece in plan.slices:
            rows += [first + row for row in sampling_rows(piece)]
            first += len(piece.tokens)
        return self._step(plan, rows, wanted)

    def logits(self, plan: StepPlan) -> Tensor:
        """All rows."""
        assert len(plan.slices) == 1
        return self._step(plan, list(range(plan.tokens)), [True] * plan.tokens).logits

    def reset(self) -> None:
        """Forget all KV."""
        self._kv.fill(0)

    def _step(self, plan: StepPlan, out_rows: list[int], wanted: Sequence[bool]) -> Computed:
        began_ns = time.monotonic_ns()
        count, pieces = plan.tokens, plan.slices
        assert len({piece.sequence for piece in pieces}) == len(pieces), f"step {plan.step_id}: a sequence twice"
        self._reserve(count)
        tokens = np.fromiter((token for piece in pieces for token in piece.tokens), np.int32, count)
        lengths = np.fromiter((len(piece.tokens) for piece in pieces), np.int32, len(pieces))
        starts = np.fromiter((piece.start for piece in pieces), np.int32, len(pieces))
        sequences = np.repeat(np.arange(len(pieces), dtype=np.int32), lengths)
        firsts = np.cumsum(lengths) - lengths
        positions = (np.arange(count) + np.repeat(starts - firsts, lengths)).astype(np.int32)
        tables = self._tables(plan)
        outs = len(out_rows)
        asked = np.array(wanted, np.int32)
        logit_rows = np.where(asked, np.cumsum(asked, dtype=np.int32) - 1, -1).astype(np.int32)
        logits = torch.empty(int(asked.sum()), self._vocab)
        outs_array = np.array(out_rows, np.int32)
        best, extremes = np.empty(max(outs, 1), np.int32), np.empty((2, max(outs, 1)), np.float32)
        finite, parts = np.empty(len(pieces), np.int32), np.zeros(len(PARTS), np.int64)
        step = Step(
            tokens=tokens.ctypes.data,
            positions=positions.ctypes.data,
            sequences=sequences.ctypes.data,
            tables=tables.ctypes.data,
            out_rows=outs_array.ctypes.data,
            logit_rows=logit_rows.ctypes.data,
            logits=logits.data_ptr(),
            best_ids=best.ctypes.data,
            highest=extremes[0].ctypes.data,
            lowest=extremes[1].ctypes.data,
            finite=finite.ctypes.data,
            parts_ns=parts.ctypes.data,
            rows=count,
            sequences_count=len(pieces),
            table_stride=tables.shape[1],
            outs=outs,
        )
        called_ns = time.monotonic_ns()
        fault = self._library.step(self._handle, ctypes.byref(step))
        returned_ns = time.monotonic_ns()
        assert fault == 0, f"step {plan.step_id}: {FAULTS[fault]}"
        broken = frozenset(np.flatnonzero(finite == 0).tolist())
        return Computed(
            best[:outs].tolist(),
            extremes[0, :outs].tolist(),
            extremes[1, :outs].tolist(),
            logits,
            broken,
            called_ns - began_ns + time.monotonic_ns() - returned_ns,
            dict(zip(PARTS, parts.tolist(), strict=True)),
        )

    def _tables(self, plan: StepPlan) -> "np.ndarray[tuple[int, int], np.dtype[np.int32]]":
        """Block tables as far as they are used, padded with what is no block."""
        used = [(piece.start + len(piece.tokens) - 1) // BLOCK_SLOTS + 1 for piece in plan.slices]
        tables = np.full((len(used), max(used)), -1, np.int32)
        written: set[int] = set()
        for row, piece, count in zip(tables, plan.slices, used, strict=True):
            assert piece.tokens and piece.start >= 0, f"step {plan.step_id}: an empty slice"
            assert len(piece.blocks) >= count, f"step {plan.step_id}: a block table that is too short"
            row[:count] = piece.blocks[:count]
            writes = piece.blocks[piece.start // BLOCK_SLOTS : count]
            assert written.isdisjoint(writes) and len(set(writes)) == len(writes), "a block written twice"
            written.update(writes)
        return tables

    def _reserve(self, rows: int) -> None:
        """Room for steps of `rows` rows."""
        if rows <= self._rows_max:
            return
        handle = self._library.open(ctypes.byref(self._decoder), rows)
        if not handle:
            raise MemoryShort(f"a step of {rows} tokens does not fit into memory")
        if self._handle is not None:
            self._library.close(self._handle)
        self._handle, self._rows_max = handle, rows

    def _describe(self, kv_form: int, mix: int, threads: int) -> Decoder:
        """The structure that the library reads.  Everything in it points to what this object holds."""
        a, arrays = self._architecture, self._arrays
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
            head=weight_of(arrays, "head"),
            layers_count=a.layers,
            hidden=a.hidden,
            intermediate=a.intermediate,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            vocab=a.vocab_size,
            positions_max=self._context_max,
            blocks_max=self._blocks_max,
            kv_form=kv_form,
            mix=mix,
            threads=threads,
            epsilon=a.norm_epsilon,
        )
