"""
The native decoder against the one in torch: every architecture, every width, windows, and contexts of several splits.
"""

import functools
import random
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from engine.device.native.library import BF16, INT4, INT8
from engine.device.native.pack import Unpackable
from engine.device.weights import Weights
from engine.plan import Slice, StepPlan
from quant.formats.checkpoint import open_checkpoint
from quant.formats.rounding import AT_LOAD
from quant.formats.scheme import Scheme
from quant.formats.weights import Affine, Quantized
from tests.torch.kernels import every, every_isa, in_chunks, native, native_model
from tests.torch.native_oracle import oracle
from tests.torch.rounded import SCHEMES, with_kept, write_rounded
from tests.torch.test_models import LLAMA3, YARN
from tests.torch.tiny import bfloat16_model, load, table

LONG: dict[str, object] = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 3,
                           "num_key_value_heads": 1}  # fmt: skip
MISTRAL: dict[str, object] = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2: dict[str, object] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3: dict[str, object] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def _heads(heads: int, kv_heads: int, dim: int = 16, **more: object) -> dict[str, object]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim, **more}


CASES: dict[str, tuple[int, dict[str, object]]] = {  # tokens, changes
    "llama": (40, {}),
    "biases_tied": (24, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "odd_widths": (20, {"hidden_size": 40, "intermediate_size": 72, "vocab_size": 131}),
    "more_widths": (20, {"hidden_size": 200, "intermediate_size": 24, "vocab_size": 33}),
    "rope_llama3": (40, {"rope_parameters": LLAMA3}),
    "rope_yarn": (40, {"rope_parameters": YARN}),
    "rope_linear": (40, {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "qwen2": (40, QWEN2 | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": (40, QWEN3 | _heads(4, 2, 32, attention_bias=True)),
    "mistral_window": (40, MISTRAL | {"sliding_window": 7}),
    "window_of_one": (40, MISTRAL | {"sliding_window": 1}),
    "window_of_a_block": (50, MISTRAL | {"sliding_window": 16}),
    **{f"dim_{dim}": (24, _heads(2, 1, dim)) for dim in (16, 48, 64, 80, 112, 128, 192, 256)},
    **{f"heads_{heads}_{keys}": (24, _heads(heads, keys)) for heads, keys in (
        (1, 1), (5, 1), (7, 1), (10, 2), (12, 1), (13, 1), (16, 16), (16, 1), (20, 1), (33, 1))},
    "long": (620, LONG),
    "long_many_heads": (530, LONG | _heads(18, 1)),
    **{f"long_window_{window}": (620, LONG | MISTRAL | {"sliding_window": window}) for window in (40, 255, 257, 300)},
}  # fmt: skip
FORMS: dict[str, Scheme | None] = {"bf16": None, "int8": AT_LOAD["int8"]}
# How far off, relative to the largest logit: root of the mean square, and the worst.  Measured over all cases: mostly 0
# (the same codes everywhere), else what comes of one code more or less, at most 0.005 and 0.03 (int8), 0.003 and 0.013.
CLOSE = {"bf16": (0.006, 0.03), "int8": (0.01, 0.06), "int4": (0.01, 0.06)}


@functools.cache
def _directory(root: Path, case: str) -> Path:
    return bfloat16_model(root / case, CASES[case][1], seed=len(case))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are."""
    return tmp_path_factory.mktemp("native")


def _tokens(directory: Path, count: int, seed: int = 1) -> tuple[int, ...]:
    vocab = open_checkpoint(directory).architecture.vocab_size
    return tuple(random.Random(seed).choices(range(vocab), k=count))


@functools.cache
def _expected(directory: Path, rounding: Scheme | None, count: int, *, kv_int8: bool, exact: bool = False) -> Tensor:
    """Logits of all tokens; computed once for all instruction sets."""
    weights = Weights(open_checkpoint(directory), torch.float32, rounding)
    blocks = table(0, count)
    model = oracle(weights, kv_int8=kv_int8, blocks_max=len(blocks), exact=exact)
    piece = Slice(sequence=1, start=0, tokens=_tokens(directory, count), blocks=blocks)
    return model.logits(StepPlan(step_id=1, slices=(piece,)))


def _check(found: Tensor, expected: Tensor, form: str) -> None:
    assert bool(torch.isfinite(found).all())
    off = (found - expected).abs() / expected.abs().max()
    mean, worst = CLOSE[form]
    assert float(off.square().mean().sqrt()) < mean and float(off.max()) < worst, (
        off.square().mean().sqrt(),
        off.max(),
    )


def _native(isa: str, directory: Path, count: int, rounding: Scheme | None, *, kv_int8: bool) -> Tensor:
    """All logits, in chunks, through a table that runs backwards."""
    model = native_model(native(isa), directory, rounding=rounding, kv_int8=kv_int8)
    tokens, blocks = _tokens(directory, count), table(3, count)[::-1]
    return in_chunks(model, tokens, every(count, 19 if count < 100 else 250), blocks)


@every_isa
@pytest.mark.parametrize(("form", "kv_int8"), [("int8", False), ("bf16", True)])
@pytest.mark.parametrize("case", CASES)
def test_equals_torch(isa: str, case: str, form: str, kv_int8: bool, root: Path) -> None:
    directory, count, rounding = _directory(root, case), CASES[case][0], FORMS[form]
    expected = _expected(directory, rounding, count, kv_int8=kv_int8)
    _check(_native(isa, directory, count, rounding, kv_int8=kv_int8), expected, form)


@every_isa
@pytest.mark.parametrize("kv_int8", [False, True], ids=["kv_bf16", "kv_int8"])
@pytest.mark.parametrize("form", FORMS)
def test_rounding_costs_no_more_than_it_must(isa: str, form: str, kv_int8: bool, root: Path) -> None:
    """Against float32 with nothing rounded but the weights: the other combinations, and what a user loses."""
    directory, rounding = _directory(root, "llama"), FORMS[form]
    found = _native(isa, directory, 40, rounding, kv_int8=kv_int8)
    _check(found, _expected(directory, rounding, 40, kv_int8=kv_int8), form)
    exact = _expected(directory, rounding, 40, kv_int8=kv_int8, exact=True)
    similar = torch.nn.functional.cosine_similarity(found, exact, dim=-1).min()
    assert float(similar) > (0.998 if form == "bf16" else 0.994)


SIZES: dict[str, object] = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
GPTQ = ("gptq", "gptq-g64", "gptq-asym", "gptq-channel", "packed", "packed-asym")


@every_isa
@pytest.mark.parametrize("name", [*GPTQ, "act", "int8", "int8-kept", "gptq-8bit", "nf4"])
def test_files(isa: str, name: str, root: Path, tmp_path: Path) -> None:
    """Quantized checkpoints: 4 bits in groups, by the order of activations too, int8, and what becomes bfloat16."""
    scheme = SCHEMES.get(name.removesuffix("-kept"), msgspec.structs.replace(SCHEMES["gptq-asym"], desc_act=True))
    kept = ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj") if name.endswith("kept") else ()
    directory, tokens = tmp_path / "model", random.Random(2).choices(range(259), k=30)

    def by_activation(prefix: str, weight: Quantized) -> Quantized:
        assert isinstance(weight, Affine)
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
        codes = torch.empty_like(weight.codes)
        codes[:, torch.argsort(order)] = weight.codes
        return Affine(codes, weight.scale, weight.zero, weight.column_groups[order].int(), weight.bits)

    source = bfloat16_model(root / f"files_{isa}_{name}", SIZES)
    write_rounded(source, directory, with_kept(scheme, *kept), *([by_activation] if name == "act" else []))
    weights = Weights(open_checkpoint(directory), torch.float32)
    piece = Slice(sequence=1, start=0, tokens=tuple(tokens), blocks=(0, 1))
    expected = oracle(weights, kv_int8=True, blocks_max=2).logits(StepPlan(step_id=1, slices=(piece,)))
    model = native_model(native(isa), directory)
    form = "bf16" if name in ("gptq-8bit", "nf4") else "int8" if name.startswith("int8") else "int4"
    assert model._layers[0].gate_up.form == {"int8": INT8, "int4": INT4, "bf16": BF16}[form]
    _check(in_chunks(model, tokens, [30], (1, 0)), expected, form)


@every_isa
def test_gate_and_up_of_different_kinds_are_refused(isa: str, root: Path, tmp_path: Path) -> None:
    """Not packed wrongly, and no IndexError: the engine takes the decoder in torch then."""
    source = bfloat16_model(root / f"refused_{isa}", SIZES)
    write_rounded(source, tmp_path / "model", with_kept(SCHEMES["int8"], "model.layers.1.mlp.gate_proj"))
    with pytest.raises(Unpackable, match=r"1\.gate_up is made of weights that have no form in common"):
        native_model(native(isa), tmp_path / "model")
    assert load(tmp_path / "model", dtype="bfloat16").facts.details["kernels"] == "onednn"


@every_isa
@pytest.mark.parametrize("kv_int8", [False, True], ids=["kv_bf16", "kv_int8"])
@pytest.mark.parametrize("window", [1, 7, 16, 17, 255, 256, 257, 300])
def test_where_a_window_ends(isa: str, window: int, kv_int8: bool, root: Path) -> None:
    """In one layer, a row does not change with the last token that it cannot see, but with the first that it can."""
    changes = LONG | MISTRAL | {"sliding_window": window, "vocab_size": 64}
    directory = bfloat16_model(root / f"window_{isa}_{window}_{kv_int8}", changes)
    model = native_model(native(isa), directory, rounding=AT_LOAD["int8"], kv_int8=kv_int8)
    tokens = _tokens(directory, 560)
    blocks = table(0, 560)
    expected = in_chunks(model, tokens, [560], blocks)
    for row in (0, 15, 16, 17, 254, 255, 256, 257, 300, 511, 512, 559):
        for seen in (row - window, row - window + 1):
            if seen < 0:
                continue
            other = (*tokens[:seen], (tokens[seen] + 1) % 64, *tokens[seen + 1 :])
            found = in_chunks(model, other[: row + 1], [row, 1] if row else [1], blocks)[row]
            assert torch.equal(found, expected[row]) == (seen == row - window), (row, seen)
