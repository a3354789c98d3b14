"""
Ranks that compute one model together natively: against the decoder in torch, in every way of sharing work, over shared
memory and over any other collective; what is booked, and what becomes of a step that loses a rank.

Ranks are threads here, each with its own model and its own mapping.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from engine.device.native.library import Step, instruction_sets
from engine.device.native.load import load_native
from engine.device.native.model import NativeModel
from engine.device.ranks.book import Interconnect
from engine.device.ranks.collective import Collective, RankLost, Stamps
from engine.device.ranks.shard import shards
from engine.device.ranks.shared_memory import SharedMemory
from engine.device.weights import Weights
from engine.plan import Slice, StepPlan
from quant.formats.checkpoint import open_checkpoint
from quant.formats.rounding import AT_LOAD
from tests.torch.kernels import in_chunks, native, native_model
from tests.torch.native_oracle import oracle
from tests.torch.test_native_decoder import CLOSE
from tests.torch.test_shared_memory import members, together
from tests.torch.tiny import GREEDY, bfloat16_model, table

ISA = instruction_sets()[0] if instruction_sets() else "none"
CHANGES: dict[str, object] = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 160, "hidden_size": 72,
    "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3,
}  # fmt: skip
COUNTS = [1, 2, 3, 20, 50, 1]  # rows of a step: alone, by channels, by rows
TOKENS = tuple(torch.randint(0, 259, (sum(COUNTS),), generator=torch.Generator().manual_seed(3)).tolist())
CHUNKS = table(0, len(TOKENS))


class Passed:
    """A collective that is none of ours to the library, with what it should raise."""

    kind = "passed"
    clock_error_ns = 0

    def __init__(self, to: SharedMemory, raises: Exception | None = None) -> None:
        self.rank, self.size, self._to, self._raises = to.rank, to.size, to, raises

    def sum(self, values: Tensor) -> Stamps:
        if self._raises is not None:
            raise self._raises
        return self._to.sum(values)

    def gather(self, values: Tensor, counts: Sequence[int]) -> tuple[list[Tensor], Stamps]:
        return self._to.gather(values, counts)

    def send(self, values: Tensor, receiver: int) -> Stamps:
        return self._to.send(values, receiver)

    def receive(self, values: Tensor, sender: int) -> Stamps:
        return self._to.receive(values, sender)

    def close(self) -> None:
        self._to.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 4 key/value heads and biases everywhere."""
    return bfloat16_model(tmp_path_factory.mktemp("ranks") / "model", CHANGES, seed=8)


def _model(
    directory: Path, collective: Collective, threads: int, *, int8: bool = False
) -> tuple[NativeModel, Interconnect]:
    checkpoint, interconnect = open_checkpoint(directory), Interconnect(collective)
    rounding = AT_LOAD["int8"] if int8 else None
    shard = shards(checkpoint.architecture, rounding, tensor=collective.size)[collective.rank]
    model = load_native(
        native(ISA),
        Weights(checkpoint, torch.bfloat16, rounding, shard),
        kv_int8=False,
        context_max=256,
        blocks_max=64,
        threads=threads,
        cache="",
        interconnect=interconnect,
    )
    return model, interconnect


def _logits(
    directory: Path, size: int, threads: int, *, int8: bool = False, called_back: bool = False
) -> tuple[Tensor, ...]:
    """Of each rank: those of its part of the vocabulary."""

    def work(rank: SharedMemory) -> Tensor:
        model, _ = _model(directory, Passed(rank) if called_back else rank, threads, int8=int8)
        with torch.inference_mode():
            return in_chunks(model, TOKENS, COUNTS, CHUNKS)

    return tuple(together(members(ISA, size, 1000), work))


@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_equal_torch(size: int, form: str, directory: Path) -> None:
    """And have the same bits however many threads share the work, and whoever makes the exchange."""
    int8 = form == "int8"
    weights = Weights(open_checkpoint(directory), torch.float32, AT_LOAD["int8"] if int8 else None)
    piece = Slice(sequence=1, start=0, tokens=TOKENS, blocks=CHUNKS)
    expected = oracle(weights, kv_int8=False, blocks_max=64).logits(StepPlan(step_id=1, slices=(piece,)))
    found = _logits(directory, size, 1, int8=int8)
    off = (torch.cat(found, 1) - expected).abs() / expected.abs().max()
    mean, worst = CLOSE[form]
    assert float(off.square().mean().sqrt()) < mean and float(off.max()) < worst
    for others in (
        _logits(directory, size, 2, int8=int8),
        _logits(directory, size, 1, int8=int8, called_back=True),
    ):
        assert all(torch.equal(one, other) for one, other in zip(found, others, strict=True))


def test_what_is_booked(directory: Path) -> None:
    """Every exchange of a step, its bytes, and times that are in no other part."""
    plan = StepPlan(step_id=1, slices=(Slice(sequence=1, start=0, tokens=TOKENS[:5], blocks=(0,), sample=GREEDY),))

    def work(rank: SharedMemory) -> None:
        model, interconnect = _model(directory, rank, 1)
        for _ in range(3):
            began_ns = monotonic_ns()
            computed = model.compute(plan, [False])
            took_ns = monotonic_ns() - began_ns
            book = interconnect.close_book()
            spent_ns = book.wait_ns + book.transfer_ns
            assert {name: one.calls for name, one in book.exchanges.items()} == {"attention": 3, "mlp": 3}
            assert all(one.bytes == 3 * 5 * 128 * 4 for one in book.exchanges.values())
            assert book.wait_ns + book.transfer_ns == spent_ns > 0 and book.kind == "shared-memory"
            assert spent_ns + sum(computed.parts.values()) + computed.batch_ns <= took_ns

    together(members(ISA, 2, 1000), work)


@given(
    size=st.integers(1, 4),
    numbers=st.lists(st.integers(0, 50), min_size=40, max_size=40),
    layers=st.integers(1, 4),
    data=st.data(),
)
def test_many_are_booked_as_each_one_is(size: int, numbers: list[int], layers: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    stamps: NDArray[np.int64] = np.array(numbers[: layers * 2 * (size + 1)], np.int64).reshape(layers, 2, size + 1)
    stamps[..., -1] = np.maximum(stamps[..., -1], stamps[..., rank])  # it leaves after it came
    collective = cast(Collective, _Counted(rank, size))
    one, all_at_once = Interconnect(collective), Interconnect(collective)
    for layer in stamps:
        for name, (*entered_ns, left_ns) in zip(("attention", "mlp"), layer.tolist(), strict=True):
            one.book(name, Stamps(entered_ns, left_ns), 7)
    all_at_once.book_all(("attention", "mlp"), stamps, 7)
    assert all_at_once.close_book() == one.close_book()


@dataclass(frozen=True)
class _Counted:
    rank: int
    size: int
    kind: str = "counted"
    clock_error_ns: int = 0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 20, 50])
def test_a_rank_that_does_not_come(threads: int, rows: int, directory: Path) -> None:
    """Comes out of `compute`, from whatever way of sharing work, and again from the next one."""
    first, second = members(ISA, 2, 1000, timeout_s=0.1)
    model, interconnect = _model(directory, first, threads)
    plan = StepPlan(step_id=1, slices=(Slice(sequence=1, start=0, tokens=TOKENS[:rows], blocks=CHUNKS),))
    for _ in range(2):
        with pytest.raises(RankLost, match=r"rank 1 did not come to an exchange within 0\.1 s"):
            model.compute(plan, [])
    assert not interconnect.close_book().exchanges
    first.close()
    with pytest.raises(RankLost, match="rank 0 has left the others"):
        model.compute(plan, [])
    second.close()


def test_what_a_collective_raises_comes_out_as_itself(directory: Path) -> None:
    """Not swallowed where Python is called from a thread of the library; and the model is as good as before."""
    first, second = members(ISA, 2, 1000)
    plan = StepPlan(step_id=1, slices=(Slice(sequence=1, start=0, tokens=TOKENS[:3], blocks=CHUNKS),))
    for raises in (RankLost(1, "is gone"), ZeroDivisionError("a bug")):
        model, _ = _model(directory, Passed(first, raises), 2)
        for _ in range(2):
            with pytest.raises(type(raises)) as caught:
                model.compute(plan, [])
            assert caught.value is raises
    second.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_handed_on(threads: int, directory: Path) -> None:
    """A model in two stages has the bits of the whole one."""
    whole = native_model(native(ISA), directory, threads=threads)
    first, last = (native_model(native(ISA), directory, threads=threads) for _ in range(2))
    for stage, layers in ((first, slice(0, 2)), (last, slice(2, 3))):
        stage._decoder.layers_count = layers.stop - layers.start
        own = (type(stage._layers[0]) * stage._decoder.layers_count)(*stage._layers[layers])
        stage._decoder.layers = ctypes.cast(own, type(stage._decoder.layers))
        native(ISA).close(stage._handle)
        stage._handle = native(ISA).open(ctypes.byref(stage._decoder), 256)
    for rows in (1, 5, 60):
        tokens = TOKENS[:rows]
        expected = in_chunks(whole, tokens, [rows], CHUNKS)
        between, nothing = torch.full((rows, 72), 5.0), torch.full((rows, 259), 5.0)
        assert _staged(first, tokens, nothing, rows_out=between) == 0
        assert bool((nothing == 5).all())
        found = torch.empty(rows, 259)
        assert _staged(last, tokens, found, rows_in=between) == 0
        assert torch.equal(found, expected)


def _staged(
    one: NativeModel,
    tokens: Sequence[int],
    logits: Tensor,
    rows_in: Tensor | None = None,
    rows_out: Tensor | None = None,
) -> int:
    """A step of one sequence whose rows are all wanted; what the library says of it."""
    rows = len(tokens)
    blocks = CHUNKS[: (rows - 1) // 16 + 1]
    plan = np.array([0, rows, len(blocks), rows, *[1] * rows, *tokens, *blocks], np.int32)
    room = one._room
    step = Step(
        plan.ctypes.data, logits.data_ptr(), *room.addresses, None, None,
        None if rows_in is None else rows_in.data_ptr(), None if rows_out is None else rows_out.data_ptr(),
        len(plan), 1, rows, rows, rows,
    )  # fmt: skip
    fault: int = one._library.step(one._handle, ctypes.byref(step))
    assert room.finite[0] == 1
    return fault
