"""
Several ranks as one model: what one computes, up to the order of sums; the same on every run, in any company.
"""

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.api import Sampling
from engine.device import DeviceLost
from engine.device import runner as runner_module
from engine.device.compute import Computed, from_logits
from engine.device.errors import ModelError
from engine.device.kernels.reference import ReferenceKernels
from engine.device.ranks.model import merged, report
from engine.device.ranks.shard import Span, even
from engine.device.runner import Runner
from engine.device.sampler import choose, logits_wanted
from engine.plan import SampleSpec, Slice, StepPlan
from quant.formats.weights import Affine, Quantized
from tests.torch.rounded import SCHEMES, write_rounded
from tests.torch.test_models import PROMPTS
from tests.torch.thread_ranks import options_of, split
from tests.torch.tiny import GREEDY, generate, generate_all, load, logits, run, table, write_any_model, write_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about itself

TOLERANCE = 1e-4  # relative, float32
PROMPT = tuple(range(3, 60))
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {},
    "llama-tied-biased": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 7},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 6},
}


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_number_of_ranks_computes_what_one_does(name: str, tmp_path: Path) -> None:
    model = write_any_model(tmp_path / "model", seed=len(name), **ARCHITECTURES[name])
    alone = load(model)
    expected, continued = logits(alone, PROMPT), generate(alone, PROMPT, 12)
    for ranks in (2, 4):
        with split(options_of(model, tensor=ranks)) as runner:
            assert _error(logits(runner, PROMPT), expected) < TOLERANCE
            assert generate(runner, PROMPT, 12) == continued
            assert runner.facts.reproducible and runner.facts.fingerprint != alone.facts.fingerprint


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (3, 1), (1, 2)])
def test_every_rank_gives_back_what_loading_took(
    tensor: int, pipeline: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each holds a whole model's worth of freed memory, and ranks need more of it than one process."""
    gave: list[int] = []
    monkeypatch.setattr(runner_module, "give_back_memory", lambda: gave.append(threading.get_ident()))
    model = write_any_model(tmp_path / "model", seed=3)
    with split(options_of(model, tensor=tensor, pipeline=pipeline)):
        assert len(set(gave)) == tensor * pipeline


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_so_do_the_shared_models(shared: Path, name: str) -> None:
    directory = shared / "fixtures/models" / name
    if not directory.is_dir():
        pytest.skip(f"no {directory}")
    expected = logits(load(directory), PROMPT)
    for ranks in (2, 4):
        with split(options_of(directory, tensor=ranks)) as runner:
            assert _error(logits(runner, PROMPT), expected) < TOLERANCE


def _by_activation(_: str, weight: Quantized) -> Quantized:
    assert isinstance(weight, Affine)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
    return Affine(weight.codes, weight.scale, weight.zero, weight.column_groups[order].int(), weight.bits)


@pytest.mark.parametrize("name", [*SCHEMES, "gptq-act"])
def test_every_format_is_cut_right(name: str, tmp_path: Path) -> None:
    """
    Weights alone are the same numbers in parts.  Where activations are rounded each rank does it for its own channels,
    with a scale of their own: finer, so no further from the floats than what one rank computes.
    """
    source = write_model(tmp_path / "float", seed=5, hidden_size=128, intermediate_size=192, num_attention_heads=4)
    scheme = SCHEMES.get(name, msgspec.structs.replace(SCHEMES["gptq-asym"], desc_act=True))
    dense = write_rounded(source, tmp_path / "model", scheme, *([_by_activation] if name == "gptq-act" else []))
    shutil.copytree(source, tmp_path / "dense")
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    weights_only = logits(load(tmp_path / "dense"), PROMPT)
    noise = _rms(logits(load(tmp_path / "model"), PROMPT), weights_only)
    assert noise < 1e-5 if scheme.activations == "float" else 1e-3 < noise < 0.2
    for ranks in (2, 4):
        with split(options_of(tmp_path / "model", tensor=ranks, quantization="auto")) as runner:
            assert _rms(logits(runner, PROMPT), weights_only) < max(1.2 * noise, TOLERANCE)


def test_ten_texts_of_the_default_model_by_three_ranks(gguf_file: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    prompts: list[list[int]] = [tokenizer(text).input_ids for text in PROMPTS]
    assert len(prompts) == 10
    expected = generate_all(load(gguf_file, kv_memory_bytes=64 << 20, context_max=128), prompts, 16)
    options = options_of(gguf_file, tensor=3, kv_memory_bytes=64 << 20, context_max=128)
    with split(options) as runner:
        assert generate_all(runner, prompts, 16) == expected


def test_the_reference_kernels_can_be_divided_too(tiny_model: Path) -> None:
    expected = logits(load(tiny_model, kernels=ReferenceKernels()), PROMPT)
    with split(options_of(tiny_model, tensor=2), ReferenceKernels()) as runner:
        assert _error(logits(runner, PROMPT), expected) < TOLERANCE


SPECS = (
    GREEDY,
    SampleSpec(sampling=Sampling(temperature=0.9, seed=4), uniforms=(0.63,)),
    SampleSpec(sampling=Sampling(temperature=1.1, top_k=7), uniforms=(0.81,)),
    SampleSpec(sampling=Sampling(temperature=0.8, logprobs=20), uniforms=(0.37,)),
    SampleSpec(sampling=Sampling(temperature=0, repetition_penalty=1.3), uniforms=(0.0,), prompt=PROMPT),
)


@pytest.fixture(scope="module", params=[("float32", 3), ("bfloat16", 2)], ids=str)
def ranks(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Runner]:
    """The tiny model by several ranks, computed in torch."""
    dtype, count = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PELLUCID_KERNELS", "torch")
        with split(options_of(tiny_model, tensor=count, dtype=dtype)) as runner:
            yield runner


def test_company_changes_no_bit(ranks: Runner) -> None:
    """Logprobs show the bits of the logits: the same alone, among others, in chunks, on another table."""
    tokens = tuple(range(5, 45))
    for spec in SPECS:
        mine = Slice(sequence=1, start=0, tokens=tokens, blocks=table(0, 40), sample=spec)
        alone = run(ranks, mine)[0]
        others = [
            Slice(sequence=2 + i, start=0, tokens=tokens[: 3 + i], blocks=table(4 + i, 16), sample=SPECS[i % 5])
            for i in range(9)
        ]
        assert run(ranks, *others[:4], mine, *others[4:])[4] == alone
        run(ranks, Slice(sequence=3, start=0, tokens=tokens[:17], blocks=table(20, 40)))
        rest = Slice(sequence=3, start=17, tokens=tokens[17:], blocks=table(20, 40), sample=spec)
        assert run(ranks, rest, *others[2:5])[0] == alone


def test_another_group_says_the_same(tiny_model: Path) -> None:
    said = []
    for _ in range(2):
        with split(options_of(tiny_model, tensor=3)) as runner:
            piece = Slice(sequence=1, start=0, tokens=PROMPT, blocks=table(0, len(PROMPT)), sample=SPECS[3])
            said.append(run(runner, piece)[0])
    assert said[0] == said[1]


def test_a_step_has_a_book(ranks: Runner) -> None:
    piece = Slice(sequence=1, start=0, tokens=PROMPT, blocks=table(0, len(PROMPT)), sample=GREEDY)
    result = ranks.run(StepPlan(step_id=1, slices=(piece,)))
    book = result.interconnect
    assert book.kind == "threads" and book.imbalance() == 0 and len(book.rank_wait_ns) > 1
    assert {name: one.calls for name, one in book.exchanges.items()} == {"plan": 1, "attention": 2, "mlp": 2, "head": 1}
    assert book.exchanges["mlp"].bytes == (len(book.rank_wait_ns) - 1) * 2 * len(PROMPT) * 96 * 4
    assert ranks.run(StepPlan(step_id=2, slices=())).interconnect.kind == "none"


def test_one_sequence_that_breaks_breaks_alone(tmp_path: Path) -> None:
    """A token whose embedding is no number: its sequence fails, its neighbours do not notice, later ones neither."""
    model = write_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("nan")
    save_file(tensors, model / "model.safetensors")
    with split(options_of(model, tensor=3)) as runner:
        fine = Slice(sequence=1, start=0, tokens=(5, 6, 9), blocks=(0,), sample=GREEDY)
        broken = Slice(sequence=2, start=0, tokens=(5, 7, 9), blocks=(1,), sample=GREEDY)
        alone = run(runner, fine)[0]
        assert [bool(one.fault) for one in run(runner, fine, broken)] == [False, True]
        assert run(runner, fine, msgspec.structs.replace(fine, sequence=3, blocks=(1,))) == (alone, alone)


def test_what_cannot_be_divided_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="--tensor-parallel 7: the model has 6 query heads; choose 1 to 6"):
        Runner.load(options_of(tiny_model, tensor=7))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_what_ranks_report_is_what_one_would_see(data: st.DataObject) -> None:
    """Ties across parts, best ones that are few, rows without numbers: chosen as from the whole vocabulary."""
    vocab = data.draw(st.integers(8, 80))
    specs = data.draw(st.lists(st.sampled_from(SPECS), min_size=1, max_size=6))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    whole = (torch.randn(len(specs), vocab) * 2).round() / 2  # many ties
    if data.draw(st.booleans()):
        whole[0, data.draw(st.integers(0, vocab - 1))] = float("nan")
    wanted = [logits_wanted(spec) for spec in specs]
    spans = even(vocab, data.draw(st.integers(1, 5)), (data.draw(st.sampled_from([1, 2, 8])), 1))
    found = merged([_report(whole, wanted, span) for span in spans], spans, wanted, len(specs), vocab)
    specs = [msgspec.structs.replace(spec, prompt=(1, 2)) if spec.prompt else spec for spec in specs]
    assert choose(found, specs) == choose(from_logits(whole.clone(), wanted), specs)


def _report(whole: torch.Tensor, wanted: list[int], span: Span) -> torch.Tensor:
    computed: Computed = from_logits(whole[:, span.start : span.stop].clone(), wanted)
    return report(computed, wanted, span, len(wanted))


def test_a_step_that_fails_is_the_end_of_the_group(tiny_model: Path) -> None:
    """Its slices must not be tried one by one: nobody knows where the others are.  Here they may fail as well."""
    failed = False
    with contextlib.suppress(AssertionError), split(options_of(tiny_model, tensor=2)) as runner:
        beyond = Slice(sequence=1, start=0, tokens=(5,), blocks=(10**6,), sample=GREEDY)
        with pytest.raises(DeviceLost, match="rank 0 failed in a step that it shares: a block beyond the pool"):
            run(runner, beyond)
        failed = True
    assert failed
