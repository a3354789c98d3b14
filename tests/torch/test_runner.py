"""
The runner: a row's result does not depend on its company (DESIGN 5), one bad slice fails alone, broken plans are ours.
"""

import random
from pathlib import Path

import msgspec
import pytest
import torch

from engine.api import Sampling
from engine.device.batch import padded_rows, padded_slots
from engine.device.kernels.torch_fast import TorchFastKernels
from engine.device.runner import Runner
from engine.device.torch_model import TorchModel
from engine.plan import SampleSpec, Slice, SliceResult, StepPlan
from tests.torch.tiny import GREEDY, load, run, table, write_model

LENGTH = 230  # past the place where a sum over keys would be halved
SPEC = SampleSpec(sampling=Sampling(temperature=0.8, logprobs=20), uniforms=(0.37,))  # logprobs show the logits' bits


@pytest.fixture(scope="module", params=[("float32", 1), ("float32", 2), ("bfloat16", 2)], ids=str)
def runner(request: pytest.FixtureRequest, tiny_model: Path) -> Runner:
    """The tiny model in each precision."""
    dtype, threads = request.param
    return load(tiny_model, dtype=dtype, threads=threads)


def _tokens(seed: int, count: int = LENGTH) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(259), k=count))


def _in_chunks(
    runner: Runner, tokens: tuple[int, ...], counts: list[int], blocks: tuple[int, ...], others: int
) -> SliceResult:
    """The last result of a sequence computed in slices of `counts`, beside `others` slices that vary."""
    assert sum(counts) == len(tokens)
    dice, start, result = random.Random(others), 0, SliceResult()
    for count in counts:
        pieces = []
        for number in range(others):
            total = dice.choice((1, 2, 17, 40))
            chunk = dice.choice((1, 1, total))
            first = len(blocks) + 4 * number
            words = _tokens(number, total)[total - chunk :]
            pieces.append(
                Slice(sequence=2 + number, start=total - chunk, tokens=words, blocks=table(first, total), sample=GREEDY)
            )
        place = dice.randrange(others + 1)
        mine = Slice(sequence=1, start=start, tokens=tokens[start : start + count], blocks=blocks, sample=SPEC)
        pieces.insert(place, mine)
        result = run(runner, *pieces)[place]
        start += count
    return result


def test_probe_says_reproducible(runner: Runner) -> None:
    assert runner.facts.reproducible


@pytest.mark.parametrize("seed", range(4))
def test_company_changes_no_bit(runner: Runner, seed: int) -> None:
    tokens = _tokens(1000 + seed, LENGTH - 31 * seed)
    total = len(tokens)
    blocks = table(0, total)
    runner.reset()
    expected = _in_chunks(runner, tokens, [total], blocks, 0)
    assert expected.emitted
    shuffled = list(blocks)
    random.Random(seed).shuffle(shuffled)
    ways = [
        ([total], 16),
        ([total - 5, 1, 1, 1, 1, 1], 0),
        ([total - 5, 1, 1, 1, 1, 1], 16),
        ([1] * 20 + [total - 20], 1),
        ([7] * (total // 7) + ([total % 7] if total % 7 else []), 3),
        ([64] * (total // 64) + ([total % 64] if total % 64 else []), 5),
    ]
    for counts, others in ways:
        found = _in_chunks(runner, tokens, counts, tuple(shuffled), others)
        assert found == expected, (counts[:3], others)


def test_stale_memory_changes_no_bit(runner: Runner) -> None:
    """Blocks come back with somebody else's keys in them."""
    tokens = _tokens(5, 40)
    runner.reset()
    fresh = _in_chunks(runner, tokens, [40], table(0, 40), 0)
    _in_chunks(runner, _tokens(6, 200), [200], table(0, 200), 0)
    assert _in_chunks(runner, tokens, [33, 7], table(0, 40), 0) == fresh


def test_same_fingerprint_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    first, second = load(tiny_model), load(tiny_model)
    timeless = [msgspec.structs.replace(runner.facts, first_token_ns=0) for runner in (first, second)]
    assert timeless[0] == timeless[1]
    tokens = _tokens(9, 50)
    one = _in_chunks(first, tokens, [50], table(0, 50), 0)
    assert one == _in_chunks(second, tokens, [50], table(3, 50), 0)
    assert load(tiny_model, dtype="bfloat16").facts.fingerprint != first.facts.fingerprint
    other = write_model(tmp_path / "other", seed=1)
    assert load(other).facts.fingerprint != first.facts.fingerprint


def test_slices_that_do_not_sample_answer_nothing(runner: Runner) -> None:
    quiet = Slice(sequence=1, start=0, tokens=(1, 2, 3), blocks=(0,))
    loud = Slice(sequence=2, start=0, tokens=(1, 2, 3), blocks=(1,), sample=GREEDY)
    silent, spoken = run(runner, quiet, loud)
    assert (silent.emitted, silent.fault) == ((), "")
    assert len(spoken.emitted) == 1 and spoken.logprobs == ()
    assert run(runner) == ()


def test_numbers_that_overflow_fail_alone_and_leave_nothing_behind(tmp_path: Path) -> None:
    """Token 7 carries an infinity; its neighbour, and the next owner of its block, do not notice."""
    from safetensors.torch import load_file, save_file

    directory = write_model(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("inf")
    save_file(tensors, directory / "model.safetensors")
    runner = load(directory)
    good = Slice(sequence=1, start=0, tokens=(1,), blocks=(0,), sample=GREEDY)
    bad = Slice(sequence=2, start=0, tokens=(5, 7, 9), blocks=(1,), sample=GREEDY)
    unsampled = Slice(sequence=3, start=0, tokens=(9, 7, 9), blocks=(2,))
    alone = run(runner, good)
    first, second, third = run(runner, good, bad, unsampled)
    assert (first,) == alone
    assert second.fault and third.fault and not second.emitted
    assert second.degenerate == third.degenerate == "not_a_number"
    for block in (1, 2):
        later = Slice(sequence=4, start=0, tokens=(1,), blocks=(block,), sample=GREEDY)
        assert run(runner, later) == alone


def test_reset_forgets(tiny_model: Path) -> None:
    runner = load(tiny_model)
    run(runner, Slice(sequence=1, start=0, tokens=_tokens(1, 32), blocks=(0, 1)))
    ask = Slice(sequence=1, start=32, tokens=(5,), blocks=(0, 1, 2), sample=SPEC)
    before = run(runner, ask)
    runner.reset()
    assert run(runner, ask) != before


GOOD = Slice(sequence=1, start=0, tokens=(1, 2), blocks=(0,))
BROKEN = {
    "empty": (Slice(sequence=1, start=0, tokens=(), blocks=(0,)),),
    "table_too_short": (Slice(sequence=1, start=15, tokens=(1, 2), blocks=(0,)),),
    "beyond_the_context": (Slice(sequence=1, start=2047, tokens=(1, 2), blocks=tuple(range(129))),),
    "beyond_the_vocabulary": (Slice(sequence=1, start=0, tokens=(259,), blocks=(0,)),),
    "negative_token": (Slice(sequence=1, start=0, tokens=(-1,), blocks=(0,)),),
    "beyond_the_pool": (Slice(sequence=1, start=0, tokens=(1,), blocks=(10**6,)),),
    "negative_block": (Slice(sequence=1, start=0, tokens=(1,), blocks=(-1,)),),
    "written_by_two": (GOOD, Slice(sequence=2, start=2, tokens=(1,), blocks=(0,))),
    "written_twice": (Slice(sequence=1, start=0, tokens=(1,) * 32, blocks=(3, 3)),),
    "sequence_twice": (GOOD, Slice(sequence=1, start=0, tokens=(1,), blocks=(1,))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plan_is_our_bug(runner: Runner, name: str) -> None:
    with pytest.raises(AssertionError):
        runner.run(StepPlan(step_id=1, slices=BROKEN[name]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_work_is_one_group(dtype: torch.dtype, tiny_model: Path) -> None:
    """Attention calls are what a step of many sequences is made of; a group that falls apart costs a multiple."""
    model = load(tiny_model, dtype=str(dtype).removeprefix("torch."), kernels=TorchFastKernels(dtype))._model
    assert isinstance(model, TorchModel)
    for length in (1, 16, 17, 180, 200, 330, 500, 700):
        lengths = [length - min(i, length - 1) for i in range(4)]
        pieces = [Slice(sequence=i, start=n - 1, tokens=(1,), blocks=table(44 * i, n)) for i, n in enumerate(lengths)]
        batch = model._builder.build(StepPlan(step_id=1, slices=tuple(pieces)))
        assert len(batch.groups) == 1, length


def test_padding_rules() -> None:
    for tile in (2, 4, 16):
        for rows in range(1, 700):
            padded = padded_rows(rows, tile)
            assert padded % tile == 0 and rows <= padded < max(rows, 6) + max(tile, rows / 4 + 1)
    assert [padded_slots(slots, coarse=False) for slots in (16, 192, 208, 384, 400, 512, 528, 720)] == [
        16, 192, 384, 384, 400, 512, 528, 896,
    ]  # fmt: skip
    assert [padded_slots(slots, coarse=True) for slots in (16, 512, 528)] == [512, 512, 1024]


def test_default_model_in_the_default_precision(gguf_file: Path) -> None:
    """The shapes that people run: the last bits are the same alone, in chunks and in company."""
    runner = load(gguf_file, dtype="auto", kv_memory_bytes=32 << 20, context_max=1024, threads=2)
    assert runner.facts.reproducible
    tokens = tuple(random.Random(3).choices(range(49152), k=150))
    blocks = table(0, 150)
    expected = _in_chunks(runner, tokens, [150], blocks, 0)
    assert _in_chunks(runner, tokens, [97, 51, 1, 1], blocks[::-1], 4) == expected


def test_threads_and_dtype_are_told(tiny_model: Path) -> None:
    facts = load(tiny_model, threads=2).facts
    assert facts.details["threads"] == "2" and facts.details["dtype"] == "float32"
    assert facts.block_slots == 16 and facts.context_max == 2048 and facts.eos_ids == (2,)
    assert facts.blocks_max == (4 << 20) // (2 * 16 * 2 * 2 * 16 * 4)
    assert torch.get_num_threads() == 2
