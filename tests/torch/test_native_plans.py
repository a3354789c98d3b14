"""
Plans that break their promises write nothing, and numbers that are none spoil their own sequence and no other.
"""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.device.errors import MemoryShort
from engine.device.native.library import FAULTS, Step
from engine.device.native.model import NativeModel
from engine.plan import Slice, StepPlan
from quant.formats.rounding import AT_LOAD
from tests.torch.kernels import every_isa, in_chunks, kv_of, native, native_model
from tests.torch.test_runner import BROKEN
from tests.torch.tiny import GREEDY, bfloat16_model, table

INT8 = AT_LOAD["int8"]
BLOCKS = 200
FORMS = pytest.mark.parametrize(("form", "kv_int8"), [("int8", True), ("bf16", False)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], NativeModel]:
    """A small model for each instruction set."""
    directory = bfloat16_model(tmp_path_factory.mktemp("plans") / "model", {})
    made: dict[str, NativeModel] = {}

    def model_of(isa: str) -> NativeModel:
        if isa not in made:
            made[isa] = native_model(native(isa), directory, rounding=INT8, blocks_max=BLOCKS, threads=2)
        return made[isa]

    return model_of


MORE_BROKEN: dict[str, tuple[Slice, ...]] = BROKEN | {
    "nothing": (),
    "a_token_beyond_32_bits": (Slice(sequence=1, start=0, tokens=(2**40,), blocks=(0,)),),
    "a_block_beyond_32_bits": (Slice(sequence=1, start=0, tokens=(1,), blocks=(2**40,)),),
    "the_first_block_beyond_the_pool": (Slice(sequence=1, start=0, tokens=(1,), blocks=(BLOCKS,)),),
    "a_negative_start": (Slice(sequence=1, start=-1, tokens=(1, 2), blocks=(0,)),),
    "a_start_that_wraps": (Slice(sequence=1, start=2**31 - 1, tokens=(1, 2), blocks=(0,)),),
    "an_earlier_block_is_none": (Slice(sequence=1, start=40, tokens=(1,), blocks=(0, -1, 2)),),
    "the_second_of_two": (
        Slice(sequence=1, start=0, tokens=(1, 2), blocks=(0,)),
        Slice(sequence=2, start=0, tokens=(1, 259), blocks=(1,)),
    ),
    "more_drafts_than_tokens": (Slice(sequence=1, start=0, tokens=(1,), blocks=(0,), sample=GREEDY, drafts=3),),
}


@every_isa
def test_a_model_that_finds_no_memory_says_so_and_no_more(isa: str, tmp_path: Path) -> None:
    """What is half made is forgotten in silence: an exception that nobody sees is an error here."""
    directory = bfloat16_model(tmp_path / "model", {})
    with pytest.raises(MemoryShort, match="choose a smaller --kv-memory"):
        native_model(native(isa), directory, rounding=INT8, blocks_max=2**40)
    gc.collect()


@every_isa
@pytest.mark.parametrize("name", MORE_BROKEN)
def test_a_broken_plan_writes_nothing(isa: str, name: str, model: Callable[[str], NativeModel]) -> None:
    native_one, pieces = model(isa), MORE_BROKEN[name]
    in_chunks(native_one, (1, 2, 3), [3], (5,))
    before = kv_of(native_one)
    rows = sum(piece.drafts + 1 for piece in pieces if piece.sample is not None)
    with pytest.raises(AssertionError):
        native_one.compute(StepPlan(step_id=1, slices=pieces), [True] * rows)
    assert np.array_equal(before, kv_of(native_one))


@every_isa
def test_as_many_words_as_sampling_rows(isa: str, model: Callable[[str], NativeModel]) -> None:
    """On whether the logits are wanted: the library reads one for each."""
    plan = StepPlan(step_id=1, slices=(Slice(sequence=1, start=0, tokens=(1, 2), blocks=(0,), sample=GREEDY),))
    for wanted in ([], [True, True]):
        with pytest.raises(AssertionError):
            model(isa).compute(plan, wanted)


FIRST = [15, 2, 3, 1, 0, 1, 2, 3, 4, -7]  # start, count, blocks, outs; no logits; tokens; beyond what is used, anything
SECOND = [0, 2, 1, 1, 1, 3, 4, 5]


def _raw(one: NativeModel, numbers: list[int], **counts: int) -> int:
    """What the library says of a step whose plan is these numbers, and should come to these counts."""
    told = {"slices": 2, "rows": 4, "outs": 2, "wanted": 1, "plan_length": len(numbers)} | counts
    plan = np.array(numbers, np.int32)
    logits, answers = np.zeros((4, 259), np.float32), np.zeros((4, 8), np.int32)
    parts = np.zeros(4, np.int64)
    step = Step(
        plan=plan.ctypes.data,
        logits=logits.ctypes.data,
        best_ids=answers[0].ctypes.data,
        highest=answers[1].ctypes.data,
        lowest=answers[2].ctypes.data,
        finite=answers[3].ctypes.data,
        parts_ns=parts.ctypes.data,
        **told,
    )
    fault: int = one._library.step(one._handle, ctypes.byref(step))
    return fault


def _with(numbers: list[int], place: int, value: int) -> list[int]:
    return [*numbers[:place], value, *numbers[place + 1 :]]


@every_isa
@pytest.mark.parametrize(
    ("fault", "numbers"),
    [
        ("plan", []),
        ("plan", FIRST),
        ("plan", FIRST + SECOND[:3]),
        ("plan", FIRST + SECOND[:-1]),
        ("plan", [*FIRST, *SECOND, 1]),
        ("plan", _with(FIRST, 1, 0) + SECOND),
        ("plan", _with(FIRST, 1, -1) + SECOND),
        ("plan", _with(FIRST, 1, 2**31 - 1) + SECOND),
        ("plan", _with(FIRST, 2, 0) + SECOND),
        ("plan", _with(FIRST, 2, 2**31 - 1) + SECOND),
        ("plan", _with(FIRST, 3, -1) + SECOND),
        ("plan", _with(FIRST, 3, 3) + SECOND),
        ("plan", _with(FIRST, 4, 2) + SECOND),
        ("plan", _with(FIRST, 4, 1) + SECOND),  # two rows of logits, and room for one
        ("position", _with(FIRST, 0, -1) + SECOND),
        ("position", _with(FIRST, 0, 2047) + SECOND),
        ("position", _with(FIRST, 0, 2**31 - 1) + SECOND),
        ("token", _with(FIRST, 6, 259) + SECOND),
        ("token", FIRST + _with(SECOND, 6, -1)),
        ("block", _with(FIRST, 8, -1) + SECOND),
        ("block", _with(FIRST, 7, -1) + SECOND),
        ("block", FIRST + _with(SECOND, 7, BLOCKS)),
        ("block", FIRST + _with(SECOND, 7, 4)),  # both would write it
        ("block", _with(FIRST, 8, 3) + SECOND),  # one would write it twice
        ("block", [15, 2, 1, 1, 0, 1, 2, 3, *SECOND]),
    ],
    ids=str,
)
def test_the_library_looks_before_it_writes(
    isa: str, fault: str, numbers: list[int], model: Callable[[str], NativeModel]
) -> None:
    """Whatever Python has checked before."""
    one = model(isa)
    assert _raw(one, FIRST + SECOND) == 0
    one.reset()
    assert fault in FAULTS[_raw(one, numbers)]
    assert not kv_of(one).any()
    assert _raw(one, FIRST + SECOND) == 0 and kv_of(one).any()


@every_isa
@pytest.mark.parametrize(
    "counts",
    [{"rows": 0}, {"rows": 5}, {"rows": -1}, {"slices": 1}, {"slices": 3}, {"slices": 2**31 - 1}, {"outs": 1},
     {"outs": -1}, {"wanted": 0}, {"wanted": 2}, {"plan_length": -1}],
    ids=str,
)  # fmt: skip
def test_a_plan_must_come_to_what_there_is_room_for(
    isa: str, counts: dict[str, int], model: Callable[[str], NativeModel]
) -> None:
    one = model(isa)
    one.reset()
    assert "plan" in FAULTS[_raw(one, FIRST + SECOND, **counts)]
    assert not kv_of(one).any()


def _poisoned(directory: Path, name: str, row: int, value: float) -> Path:
    """A model with one row of a tensor spoilt."""
    bfloat16_model(directory, {"attention_bias": True})
    tensors = load_file(directory / "model.safetensors")
    tensors[name][row] = value
    save_file(tensors, directory / "model.safetensors")
    return directory


@every_isa
@FORMS
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_a_broken_sequence_fails_alone(isa: str, form: str, kv_int8: bool, poison: float, tmp_path: Path) -> None:
    """Its neighbours have the same bits as without it, also where all share a thread's tile; so have later owners."""
    directory = _poisoned(tmp_path / "model", "model.embed_tokens.weight", 7, poison)
    one = native_model(
        native(isa), directory, rounding=INT8 if form == "int8" else None, kv_int8=kv_int8, threads=2, blocks_max=80
    )
    good = [Slice(sequence=i, start=0, tokens=(i, 20 + i), blocks=(i,), sample=GREEDY) for i in (1, 2, 3)]
    bad = [
        Slice(sequence=4, start=0, tokens=(5, 7, 9), blocks=(4,), sample=GREEDY),
        Slice(sequence=5, start=0, tokens=(7,), blocks=(5,)),
        Slice(sequence=6, start=0, tokens=(9,) * 40 + (7,), blocks=(6, 7, 8), sample=GREEDY),
    ]
    alone = one.compute(StepPlan(step_id=1, slices=tuple(good)), [True] * 3)
    one.reset()
    mixed = (bad[0], good[0], good[1], bad[1], bad[2], good[2])
    together = one.compute(StepPlan(step_id=2, slices=mixed), [True] * 5)
    assert together.broken == {0, 3, 4} and not alone.broken
    assert torch.equal(together.logits[[1, 2, 4]], alone.logits)
    assert [together.best[i] for i in (1, 2, 4)] == alone.best
    _check_later_owners(one, bad)


def _check_later_owners(one: NativeModel, spoilt: list[Slice]) -> None:
    tokens = tuple(range(10, 43))
    blocks = tuple(block for piece in spoilt for block in piece.blocks)
    expected = in_chunks(one, tokens, [33], table(60, 33))
    for first in range(len(blocks) - 2):
        found = in_chunks(one, tokens, [1, 20, 12], blocks[first : first + 3])
        assert torch.equal(found, expected)


ROUNDS_TO_INFINITY = float.fromhex("0x1.ffp127")
"""In bfloat16; what is nearer to 0 does not."""


@every_isa
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("size", "infinite"),
    [
        (np.finfo(np.float32).max, True),
        (ROUNDS_TO_INFINITY, True),
        (np.nextafter(np.float32(ROUNDS_TO_INFINITY), np.float32(0)), False),
    ],
    ids=["largest", "first", "last"],
)
def test_what_is_infinite_only_in_the_cache_is_none_too(
    isa: str, part: str, sign: int, size: float, infinite: bool, tmp_path: Path
) -> None:
    """It would be finite to all that looks at it before, and 0 times infinity to the block's next owner."""
    directory = bfloat16_model(tmp_path / "model", {"attention_bias": True})
    one = native_model(native(isa), directory, kv_int8=False, blocks_max=80)
    a = one._architecture
    row = a.query_size + 3 + (a.kv_size if part == "value" else 0)
    bias, clean = one._arrays["0.qkv.bias"], one._arrays["0.qkv.bias"].copy()
    bias.flags.writeable = True
    pieces = [Slice(sequence=i, start=0, tokens=(i,), blocks=(i,), sample=GREEDY) for i in (4, 5, 6)]
    bias[row] = sign * size
    computed = one.compute(StepPlan(step_id=1, slices=tuple(pieces)), [False] * 3)
    kept = kv_of(one).view(np.uint16) & 0x7FFF
    assert not (kept >= 0x7F80).any() and (kept == 0x7F7F).any() == (not infinite)
    if infinite:
        assert computed.broken == {0, 1, 2}
    bias[:] = clean
    _check_later_owners(one, pieces)


@every_isa
@FORMS
@pytest.mark.parametrize(
    "name",
    ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.o_proj.weight",
     "self_attn.k_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
     "input_layernorm.weight", "lm_head"],
)  # fmt: skip
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_no_broken_layer_goes_unnoticed(
    isa: str, name: str, form: str, kv_int8: bool, poison: float, tmp_path: Path
) -> None:
    """Rounding to 8 bits would make a number of what is none, and attention would take it for an unlikely key."""
    full = "lm_head.weight" if name == "lm_head" else f"model.layers.1.{name}"
    directory = _poisoned(tmp_path / "model", full, 3, poison)
    one = native_model(native(isa), directory, rounding=INT8 if form == "int8" else None, kv_int8=kv_int8)
    pieces = tuple(
        Slice(sequence=i, start=0, tokens=tuple(range(i, 2 * i)), blocks=table(3 * i, i), sample=GREEDY)
        for i in (1, 2, 20)
    )
    for wanted in (True, False):
        computed = one.compute(StepPlan(step_id=1, slices=pieces), [wanted] * 3)
        noticed = [i in computed.broken or not np.isfinite(computed.highest[i]) for i in range(3)]
        assert noticed == [True] * 3
