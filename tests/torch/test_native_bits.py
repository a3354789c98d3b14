"""
A row's bits do not depend on its company: chunks, neighbours, block tables, threads, and how a long context is shared.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.device.compute import Computed
from engine.device.native.model import NativeModel
from engine.plan import Slice, StepPlan
from quant.formats.rounding import AT_LOAD
from quant.formats.scheme import Scheme
from tests.torch.kernels import every, every_isa, in_chunks, native, native_model
from tests.torch.rounded import SCHEMES, write_rounded, write_rounded_file
from tests.torch.tiny import GREEDY, bfloat16_model, table

TOTAL = 300
CHUNKS = (1, 7, 64, 100)
LONG = 700  # three splits of keys
SIZES: dict[str, object] = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 6, "head_dim": 32,
    "sliding_window": 270, "model_type": "mistral", "architectures": ["MistralForCausalLM"],
}  # fmt: skip
FORMS: dict[str, Scheme | None] = {"bf16": None, "int8": AT_LOAD["int8"], "int4": None}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same random model for each form of its weights."""
    root = tmp_path_factory.mktemp("bits")
    floats = bfloat16_model(root / "floats", SIZES)
    write_rounded(floats, root / "int4", SCHEMES["gptq-asym"])
    return {"bf16": floats, "int8": floats, "int4": root / "int4"}


def _beside(model: NativeModel, pieces: list[Slice], number: int) -> Tensor:
    """The logits of the row that piece `number` samples, in one step with the others."""
    computed = model.compute(StepPlan(step_id=1, slices=tuple(pieces)), [True] * len(pieces))
    _check_best(computed)
    return computed.logits[number]


def _check_best(computed: Computed) -> None:
    """What comes with every row is what its logits say."""
    assert not computed.broken
    logits = computed.logits
    assert computed.best == logits.argmax(-1).tolist()
    assert computed.highest == logits.amax(-1).tolist() and computed.lowest == logits.amin(-1).tolist()


def _batch(model: NativeModel, tokens: tuple[int, ...], lengths: list[int]) -> Tensor:
    """A step with one more token for sequences of these lengths, whose earlier tokens are computed before."""
    pieces, first = [], 0
    for number, length in enumerate(lengths):
        blocks = table(first, length + 1)
        first += len(blocks)
        before = Slice(sequence=number, start=0, tokens=tokens[:length], blocks=blocks)
        if length:
            model.compute(StepPlan(step_id=1, slices=(before,)), [])
        pieces.append(Slice(sequence=number, start=length, tokens=(tokens[length],), blocks=blocks, sample=GREEDY))
    random.Random(3).shuffle(pieces)
    computed = model.compute(StepPlan(step_id=2, slices=tuple(pieces)), [True] * len(pieces))
    _check_best(computed)
    found = torch.empty_like(computed.logits)
    found[[piece.sequence for piece in pieces]] = computed.logits
    return found


@every_isa
@pytest.mark.parametrize("kv_int8", [False, True], ids=["kv_bf16", "kv_int8"])
@pytest.mark.parametrize("form", FORMS)
def test_company_changes_no_bit(isa: str, form: str, kv_int8: bool, directories: dict[str, Path]) -> None:
    def model(threads: int) -> NativeModel:
        return native_model(
            native(isa), directories[form], rounding=FORMS[form], kv_int8=kv_int8, threads=threads, blocks_max=260
        )

    one, two, three = model(1), model(2), model(3)
    dice = random.Random(5)
    tokens = tuple(dice.choices(range(259), k=LONG))
    expected = in_chunks(one, tokens, [LONG], table(0, LONG))
    shuffled = dice.sample(range(260), len(table(0, LONG)))
    for count in CHUNKS:
        found = in_chunks(one, tokens[:TOTAL], every(TOTAL, count), shuffled)
        assert torch.equal(found, expected[:TOTAL]), count
    for threaded, counts in ((two, [TOTAL, 390, *[1] * 10]), (three, [450, 1, 1, 2, 3, 243])):
        assert torch.equal(in_chunks(threaded, tokens, counts, shuffled), expected), counts
    eight, forty = [5, 299, 17, 128, 250, 64, 257, 200], [dice.randrange(60) for _ in range(39)] + [690]
    assert torch.equal(_batch(one, tokens, eight), expected[eight])
    assert torch.equal(_batch(two, tokens, forty), expected[forty])


@every_isa
def test_a_prompt_beside_others(isa: str, directories: dict[str, Path]) -> None:
    """Slices of any lengths in one step: some alone on a thread, some shared by all."""
    model = native_model(native(isa), directories["int8"], rounding=AT_LOAD["int8"], threads=2, blocks_max=200)
    dice = random.Random(6)
    tokens = tuple(dice.choices(range(259), k=150))
    expected = in_chunks(model, tokens, [150], table(0, 150))
    for _ in range(20):
        start, first, pieces = dice.randrange(149), 20, []
        stop = dice.randrange(start + 1, 151)
        in_chunks(model, tokens[:start], [start] if start else [], table(0, 150))
        for number in range(dice.randrange(9)):
            count = dice.choice((1, 1, 2, 17, 40))
            blocks = table(first, count)
            first += len(blocks)
            words = tuple(dice.choices(range(259), k=count))
            pieces.append(Slice(sequence=number, start=0, tokens=words, blocks=blocks, sample=GREEDY))
        mine = Slice(sequence=99, start=start, tokens=tokens[start:stop], blocks=table(0, 150), sample=GREEDY)
        place = dice.randrange(len(pieces) + 1)
        pieces.insert(place, mine)
        assert torch.equal(_beside(model, pieces, place), expected[stop - 1])


@every_isa
@pytest.mark.parametrize("vocab", [33, 259, 320])
@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_the_best_is_the_lowest_id_of_the_highest_logit(isa: str, vocab: int, form: str, tmp_path: Path) -> None:
    """Five rows of the head, over and over: each logit comes many times, in every lane and every thread's share."""
    directory = bfloat16_model(tmp_path / "model", {"vocab_size": vocab})
    tensors = load_file(directory / "model.safetensors")
    five = tensors["lm_head.weight"][:5]
    tensors["lm_head.weight"] = five[(torch.arange(vocab) + 2) % 5].contiguous()
    save_file(tensors, directory / "model.safetensors")
    seen = set()
    for threads in (1, 2, 3):
        model = native_model(native(isa), directory, rounding=FORMS[form], threads=threads)
        for count in (1, 2, 3, 20):
            pieces = tuple(
                Slice(sequence=i, start=0, tokens=((7 * i + count) % vocab,), blocks=(i,), sample=GREEDY)
                for i in range(count)
            )
            wanted = [number % 3 != 1 for number in range(count)]
            computed = model.compute(StepPlan(step_id=1, slices=pieces), wanted)
            whole = model.compute(StepPlan(step_id=1, slices=pieces), [True] * count)
            _check_best(whole)
            assert torch.equal(computed.logits, whole.logits[wanted])
            assert (computed.best, computed.highest, computed.lowest) == (whole.best, whole.highest, whole.lowest)
            seen.update(whole.best)
    assert len(seen) > 1 and max(seen) < 5


@every_isa
def test_steps_larger_than_there_was_room_for(isa: str, directories: dict[str, Path]) -> None:
    """The buffers grow with the first step that needs it, and nothing else changes."""
    model = native_model(native(isa), directories["int8"], rounding=AT_LOAD["int8"], threads=2, blocks_max=60)
    tokens = tuple(np.random.default_rng(1).integers(0, 259, 600).tolist())
    small = in_chunks(model, tokens, every(600, 100), table(0, 600))
    assert torch.equal(in_chunks(model, tokens, [600], table(0, 600)), small)
    assert torch.equal(in_chunks(model, tokens, every(600, 100), table(0, 600)), small)


@pytest.fixture(scope="module")
def first_layers(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, so far as it makes a difference here."""
    directory = tmp_path_factory.mktemp("default") / "model"
    write_rounded_file(gguf_file, directory, None, layers=2)
    return directory


@every_isa
def test_the_default_model(isa: str, first_layers: Path) -> None:
    """The widths that people run, in its first layers."""
    tokens = tuple(random.Random(7).choices(range(49152), k=90))
    one, two = (
        native_model(native(isa), first_layers, rounding=AT_LOAD["int8"], context_max=512, threads=n, blocks_max=100)
        for n in (1, 2)
    )
    expected = in_chunks(two, tokens, [90], table(0, 90))
    assert torch.equal(in_chunks(one, tokens, [64, 7, 1, 18], table(50, 90)[::-1]), expected)
    eight = [5, 89, 17, 71, 80, 64, 33, 16]
    assert torch.equal(_batch(two, tokens, eight), expected[eight])
