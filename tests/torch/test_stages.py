"""
Layers in stages, one behind the other: the very bits of one process, in micro-batches that change none.
"""

from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Sampling
from engine.device.errors import ModelError
from engine.device.ranks.stages import MICRO_ROWS_MIN, micro_batches
from engine.device.runner import Runner
from engine.plan import SampleSpec, Slice, StepPlan
from telemetry.records import InterconnectBook
from tests.torch.rounded import SCHEMES, write_rounded
from tests.torch.thread_ranks import options_of, split
from tests.torch.tiny import GREEDY, generate_all, load, logits, run, table, write_model

PROMPT = tuple(range(3, 120))
DRAWING = SampleSpec(sampling=Sampling(temperature=0.8, top_k=9, logprobs=5), uniforms=(0.37,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers, so that no number of stages but five is even."""
    return write_model(tmp_path_factory.mktemp("deep") / "model", num_hidden_layers=5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_stages_say_what_one_process_says_to_the_bit(model: Path, dtype: str, quantization: str) -> None:
    with split(options_of(model, dtype=dtype, quantization=quantization)) as alone:
        expected, said = logits(alone, PROMPT), generate_all(alone, [PROMPT, PROMPT[:7]], 8)
        fingerprint = alone.facts.fingerprint
    for stages in (2, 5):
        with split(options_of(model, pipeline=stages, dtype=dtype, quantization=quantization)) as runner:
            assert torch.equal(logits(runner, PROMPT), expected)
            assert generate_all(runner, [PROMPT, PROMPT[:7]], 8) == said
            assert runner.facts.fingerprint == fingerprint, "the same output, so the same name"


@pytest.mark.parametrize("name", ["gptq-asym", "fp8", "nf4"])
def test_in_any_format(name: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "float", seed=5, hidden_size=128, intermediate_size=192, num_attention_heads=4)
    write_rounded(source, tmp_path / "model", SCHEMES[name])
    expected = logits(load(tmp_path / "model"), PROMPT)
    with split(options_of(tmp_path / "model", pipeline=2, quantization="auto")) as runner:
        assert torch.equal(logits(runner, PROMPT), expected)


def test_many_slices_of_all_kinds_in_one_step(model: Path) -> None:
    """Long prompts, which are cut, beside decodes, drafts and slices that do not sample, through three stages."""
    pieces = [
        Slice(sequence=1, start=0, tokens=PROMPT, blocks=table(0, 117), sample=DRAWING),
        Slice(sequence=2, start=0, tokens=PROMPT[:50], blocks=table(8, 50)),
        Slice(sequence=3, start=0, tokens=PROMPT[:3], blocks=table(12, 3), sample=GREEDY),
        _with_drafts(Slice(sequence=4, start=0, tokens=PROMPT[:70], blocks=table(13, 70), sample=DRAWING), 5),
        Slice(sequence=5, start=0, tokens=PROMPT[:1], blocks=table(18, 1), sample=GREEDY),
    ]
    alone = load(model)
    expected = run(alone, *pieces)
    with split(options_of(model, pipeline=3)) as runner:
        assert run(runner, *pieces) == expected
        for piece, result in zip(pieces, expected, strict=True):
            assert run(runner, piece) == (result,)


def test_a_step_has_its_bubble(model: Path) -> None:
    with split(options_of(model, pipeline=2)) as runner:
        books = [_book(runner, PROMPT) for _ in range(9)]
        assert max(book.bubble_ns for book in books) > 0, "rank 0 may come late itself, but not each time"
        book = books[0]
        assert book.exchanges["stage"].calls == 2 and book.exchanges["stage"].bytes == len(PROMPT) * 96 * 4
        assert book.wait_ns == 0 and book.straggler == -1 and book.imbalance() == 0
        assert _book(runner, PROMPT[:5]).exchanges["stage"].calls == 1, "few rows stay together"


def _book(runner: Runner, tokens: tuple[int, ...]) -> InterconnectBook:
    piece = Slice(sequence=1, start=0, tokens=tokens, blocks=table(0, len(tokens)), sample=GREEDY)
    return runner.run(StepPlan(step_id=1, slices=(piece,))).interconnect


def _with_drafts(piece: Slice, drafts: int) -> Slice:
    assert piece.sample is not None
    spec = msgspec.structs.replace(piece.sample, uniforms=(0.37,) * (drafts + 1))
    return msgspec.structs.replace(piece, drafts=drafts, sample=spec)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_ranks_in_each_stage(model: Path, dtype: str) -> None:
    """The bits of as many ranks in one stage."""
    with split(options_of(model, tensor=3, dtype=dtype)) as runner:
        expected, said = logits(runner, PROMPT), generate_all(runner, [PROMPT, PROMPT[:7]], 8)
        fingerprint = runner.facts.fingerprint
    with split(options_of(model, tensor=3, pipeline=2, dtype=dtype)) as runner:
        assert torch.equal(logits(runner, PROMPT), expected)
        assert generate_all(runner, [PROMPT, PROMPT[:7]], 8) == said
        assert runner.facts.fingerprint == fingerprint
        book = _book(runner, PROMPT)
        assert {name: one.calls for name, one in book.exchanges.items()} == {
            "plan": 1, "attention": 6, "mlp": 6, "stage": 2, "head": 1,
        }  # fmt: skip
        assert book.imbalance() == 0 and len(book.rank_wait_ns) == 6 and book.rank_wait_ns[3:] == (0, 0, 0)
        assert book.straggler in (0, 1, 2)


@given(st.data())
def test_micro_batches_are_the_plan(data: st.DataObject) -> None:
    """All rows once and in order, what samples in one piece, and not many more rows in one than in another."""
    pieces = []
    for number in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(1, 200))
        sampled = data.draw(st.booleans())
        drafts = data.draw(st.integers(0, min(4, count - 1))) if sampled else 0
        piece = Slice(
            sequence=number,
            start=data.draw(st.integers(0, 9)),
            tokens=tuple(range(count)),
            blocks=(0,),
            sample=GREEDY if sampled else None,
        )
        pieces.append(_with_drafts(piece, drafts) if drafts else piece)
    plan, stages = StepPlan(step_id=1, slices=tuple(pieces)), data.draw(st.integers(1, 6))
    found = list(micro_batches(plan, stages))
    assert len(found) <= stages
    if len(found) > 1:
        assert plan.tokens >= MICRO_ROWS_MIN * len(found)
    rows: dict[int, list[Slice]] = {}
    for micro, slices in found:
        assert len({piece.sequence for piece in micro.slices}) == len(micro.slices) == len(slices)
        for piece, index in zip(micro.slices, slices, strict=True):
            rows.setdefault(index, []).append(piece)
    assert sorted(rows) == list(range(len(pieces)))
    for index, cut in rows.items():
        whole = pieces[index]
        assert tuple(token for piece in cut for token in piece.tokens) == whole.tokens
        ends = [piece.start + len(piece.tokens) for piece in cut]
        assert [piece.start for piece in cut] == [whole.start, *ends[:-1]]
        assert all(piece.sample is None and not piece.drafts for piece in cut[:-1])
        assert (cut[-1].sample, cut[-1].drafts) == (whole.sample, whole.drafts)
        assert all(piece.tokens for piece in cut)


def test_what_cannot_be_staged_is_refused(model: Path) -> None:
    with pytest.raises(ModelError, match="--pipeline-parallel 6: the model has 5 layers; choose 1 to 5"):
        Runner.load(options_of(model, pipeline=6))
