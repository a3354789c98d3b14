"""
The conversion as a whole, on tiny models: what it writes, what it measures, what it refuses.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from quant.convert import convert, round_activations, stored_dtype
from quant.formats.checkpoint import Checkpoint, open_checkpoint
from quant.formats.errors import ModelError
from quant.formats.layouts import suffixes, unpack
from quant.formats.scheme import Scheme
from quant.forward import ALL_LINEARS, LayerForward, layer_shapes, norm
from quant.options import ConvertOptions, Rotation, matches
from quant.report import Measured
from tests.torch.tiny import write_model

GPTQ = Scheme(method="gptq", bits=4, granularity="group", group_size=32)
SCHEMES: dict[str, Scheme] = {
    "int8": Scheme(method="int8", bits=8),
    "int8-tensor": Scheme(method="int8", bits=8, granularity="tensor"),
    "int8-group": Scheme(method="int8", bits=8, granularity="group", group_size=32),
    "fp8": Scheme(method="fp8", bits=8),
    "fp8-tensor": Scheme(method="fp8", bits=8, granularity="tensor"),
    "gptq": GPTQ,
    "gptq-asym": Scheme(method="gptq", bits=4, granularity="group", group_size=32, symmetric=False),
    "gptq-act": Scheme(method="gptq", bits=4, granularity="group", group_size=32, desc_act=True),
    "gptq-channel": Scheme(method="gptq", bits=4),
    "gptq-8bit": Scheme(method="gptq", bits=8, granularity="group", group_size=32),
    "nf4": Scheme(method="nf4", bits=4),
    "llm-int8": Scheme(method="llm-int8", bits=8),
    "int8-offline": Scheme(method="int8", bits=8),
    "int8-full": Scheme(method="int8", bits=8),
}
ROTATIONS: dict[str, Rotation] = {"int8-offline": "offline", "int8-full": "full"}


class Conversion:
    """One conversion of a tiny model and all that came out of it."""

    def __init__(self, checkpoint: Checkpoint, options: ConvertOptions) -> None:
        self.checkpoint = checkpoint
        self.names: list[str] = []
        self.tensors: dict[str, Tensor] = {}
        self.progress: list[tuple[str, int, int]] = []
        generator = torch.Generator().manual_seed(1)
        self.calibration = torch.randint(259, (12, 32), generator=generator)
        self.evaluation = [torch.randint(259, (length,), generator=generator) for length in (40, 7, 2, 23)]
        self.measured: Measured = convert(
            checkpoint,
            options,
            self.calibration,
            self.evaluation,
            self._take,
            lambda what, done, total: self.progress.append((what, done, total)),
        )

    def _take(self, tensors: dict[str, Tensor]) -> None:
        assert not self.tensors.keys() & tensors.keys()
        self.names += tensors
        self.tensors |= {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("convert") / "model", hidden_size=128, intermediate_size=192)


@pytest.fixture(scope="module")
def conversions(model: Path) -> Iterator[Callable[[str], Conversion]]:
    """Conversions by the names of `SCHEMES`, each made once."""
    made: dict[str, Conversion] = {}

    def conversion(name: str) -> Conversion:
        if name in ("nf4", "llm-int8"):
            pytest.importorskip("bitsandbytes")
        if name not in made:
            options = ConvertOptions(scheme=SCHEMES[name], rotate=ROTATIONS.get(name, "none"))
            made[name] = Conversion(open_checkpoint(model), options)
        return made[name]

    yield conversion


def logits_of_result(found: Conversion, scheme: Scheme, tokens: Tensor) -> Tensor:
    """What the written tensors compute: unpacked again, activations rounded as the scheme says."""
    a = found.checkpoint.architecture
    x = F.embedding(tokens, found.tensors["model.embed_tokens.weight"].float())[None]
    for number in range(a.layers):
        prefix = f"model.layers.{number}."
        weights: dict[str, Tensor] = {}
        rounded: set[str] = set()
        for name, shape in layer_shapes(a).items():
            full = prefix + name
            linear = name.removesuffix(".weight")
            if linear in ALL_LINEARS and f"{prefix}{linear}" not in found.measured.scheme.kept:
                parts = {
                    suffix: found.tensors[f"{prefix}{linear}.{suffix}"]
                    for suffix in suffixes(scheme)
                    if f"{prefix}{linear}.{suffix}" in found.tensors
                }
                weights[name] = unpack(scheme, parts, (shape[0], shape[1])).dense(torch.float32)
                rounded.add(linear)
            else:
                weights[name] = found.tensors[full].float()

        def linear_(name: str, z: Tensor, weights: dict[str, Tensor] = weights, rounded: set[str] = rounded) -> Tensor:
            seen = round_activations(z, scheme.activations) if name in rounded else z
            return F.linear(seen, weights[f"{name}.weight"])

        x = LayerForward(a, number, found.measured.scheme.mix).whole(x, weights, linear_)
    x = norm(x, found.tensors["model.norm.weight"].float(), a.norm_epsilon)
    return F.linear(x, found.tensors["lm_head.weight"].float())[0]


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name: str, conversions: Callable[[str], Conversion]) -> None:
    found, scheme = conversions(name), SCHEMES[name]
    reports = found.measured.linears
    assert [report.name for report in reports] == [
        f"model.layers.{i}.{linear}" for i in (0, 1) for linear in ALL_LINEARS
    ]
    for report in reports:
        assert not report.kept
        assert scheme.bits <= report.bits_per_weight < scheme.bits + 2
        assert 0 < report.relative_error < 0.3
        assert 0 < report.output_error < 0.3
        assert report.sqnr_db is not None
        assert math.isclose(report.sqnr_db, -20 * math.log10(report.relative_error), rel_tol=1e-6)
        assert (report.rounded_error is not None) == (scheme.method in ("gptq", "fp8"))
    quality = found.measured.quality
    assert quality.tokens == 39 + 6 + 1 + 22
    assert 0 < quality.kl_mean < quality.kl_p99
    assert math.isclose(quality.perplexity_increase, quality.perplexity / quality.source_perplexity - 1, abs_tol=1e-9)
    assert found.names[0] == "model.embed_tokens.weight"
    assert found.names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert found.progress[0] == ("quantizing layers", 0, 2)
    assert found.progress[-1] == ("quantizing layers", 2, 2)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_report_is_about_the_written_tensors(name: str, conversions: Callable[[str], Conversion]) -> None:
    """Perplexity from the files alone, by another path than the streams."""
    found = conversions(name)
    losses = []
    for tokens in found.evaluation:
        logs = logits_of_result(found, SCHEMES[name], tokens).log_softmax(-1)
        losses.append(-logs[:-1].gather(1, tokens[1:, None])[:, 0])
    perplexity = float(torch.cat(losses).double().mean().exp())
    assert math.isclose(perplexity, found.measured.quality.perplexity, rel_tol=2e-3)


def test_better_formats_are_better(conversions: Callable[[str], Conversion]) -> None:
    divergence = {
        name: conversions(name).measured.quality.kl_mean for name in ("int8", "gptq-8bit", "gptq", "gptq-channel")
    }
    assert divergence["gptq-8bit"] < divergence["gptq"] < divergence["gptq-channel"]
    assert divergence["int8"] < divergence["gptq"]


def test_gptq_beats_rounding_in_every_layer(conversions: Callable[[str], Conversion]) -> None:
    for name in ("gptq", "gptq-asym", "gptq-act", "gptq-channel"):
        for report in conversions(name).measured.linears:
            assert report.rounded_error is not None
            assert report.output_error < report.rounded_error, f"{name}: {report.name}"


@pytest.mark.parametrize("name", ["gptq", "gptq-act", "int8", "int8-full", "fp8"])
def test_same_seed_same_bytes(name: str, model: Path, conversions: Callable[[str], Conversion]) -> None:
    torch.manual_seed(99)  # nobody's business
    options = ConvertOptions(scheme=SCHEMES[name], rotate=ROTATIONS.get(name, "none"))
    again = Conversion(open_checkpoint(model), options)
    first = conversions(name)
    assert again.names == first.names
    for tensor_name, tensor in first.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), again.tensors[tensor_name].view(torch.uint8)), tensor_name
    assert again.measured == first.measured


def test_kept_layers_stay_floats(model: Path) -> None:
    options = ConvertOptions(scheme=GPTQ, keep=("layers.1.mlp", "model.layers.0.*.o_proj"))
    found = Conversion(open_checkpoint(model), options)
    kept = ("model.layers.0.self_attn.o_proj", *(f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")))
    assert found.measured.scheme.kept == kept
    source = load_file(model / "model.safetensors")
    for name in kept:
        assert torch.equal(found.tensors[f"{name}.weight"], source[f"{name}.weight"].bfloat16())
        assert f"{name}.qweight" not in found.tensors
    assert not set(found.measured.suggestions) & set(kept)
    assert found.measured.quality.kl_mean > 0


def test_all_kept_costs_only_the_stored_dtype(model: Path) -> None:
    found = Conversion(open_checkpoint(model), ConvertOptions(scheme=SCHEMES["int8"], keep=("model",)))
    assert len(found.measured.scheme.kept) == 14
    assert found.measured.suggestions == ()
    assert found.measured.quality.kl_mean < 1e-3


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_smoothing_as_asked(alpha: float, model: Path) -> None:
    found = Conversion(open_checkpoint(model), ConvertOptions(scheme=SCHEMES["int8"], smooth=alpha))
    source = load_file(model / "model.safetensors")
    for name in ("input_layernorm", "post_attention_layernorm"):
        full = f"model.layers.0.{name}.weight"
        assert torch.equal(found.tensors[full], source[full].bfloat16()) == (alpha == 0)


@pytest.mark.parametrize("rotate", ["offline", "full"])
def test_rotation_changes_nothing_but_the_rounding(rotate: Rotation, tmp_path: Path) -> None:
    """With all layers kept what is left is the stored dtype; a tied head becomes a tensor of its own."""
    checkpoint = open_checkpoint(write_model(tmp_path / "m", intermediate_size=192, tie_word_embeddings=True))
    found = Conversion(checkpoint, ConvertOptions(scheme=SCHEMES["int8"], rotate=rotate, keep=("model",)))
    assert found.measured.quality.kl_mean < 1e-3
    assert found.measured.scheme.mix == (4 if rotate == "full" else 0)
    assert found.names[-2:] == ["model.norm.weight", "lm_head.weight"]
    head, embedding = found.tensors["lm_head.weight"], found.tensors["model.embed_tokens.weight"]
    assert head.shape == embedding.shape and not torch.equal(head, embedding)
    assert torch.equal(found.tensors["model.norm.weight"], torch.ones(96).bfloat16())


def test_the_report_tells_what_became_of_outliers(tmp_path: Path) -> None:
    """One channel of the residual stream, and one inside the MLP, far larger than the others."""
    directory = write_model(tmp_path / "model", intermediate_size=192)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 11] *= 100  # what the MLP adds must not hide it
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"][70] *= 30
    save_file(tensors, directory / "model.safetensors")
    peaks = {}
    for rotate in ("none", "offline", "full"):
        options = ConvertOptions(scheme=SCHEMES["int8"], smooth=0.0, rotate=rotate)
        reports = Conversion(open_checkpoint(directory), options).measured.linears
        peaks[rotate] = {report.name: report.input_peak / report.source_input_peak for report in reports}
    for name, share in peaks["none"].items():
        assert math.isclose(share, 1, rel_tol=0.05), name
        assert name.endswith(("o_proj", "down_proj")) or peaks["offline"][name] < 0.8
        assert not name.endswith("down_proj") or (peaks["offline"][name] > 0.9 and peaks["full"][name] < 0.7)


def test_tied_head_is_left_out(tmp_path: Path) -> None:
    found = Conversion(
        open_checkpoint(write_model(tmp_path / "tied", tie_word_embeddings=True)), ConvertOptions(scheme=GPTQ)
    )
    assert found.names[-1] == "model.norm.weight"
    assert found.measured.quality.source_perplexity > 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_floats_keep_the_dtype_of_the_source(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = write_model(tmp_path / "model")
    halves = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(halves, directory / "model.safetensors")
    found = Conversion(open_checkpoint(directory), ConvertOptions(scheme=GPTQ))
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(found.tensors[name], halves[name])
    assert stored_dtype(torch.tensor([1 / 3])) == torch.bfloat16  # float32: the wider range wins


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers(tmp_path: Path, value: float) -> None:
    directory = write_model(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has NaN or infinite weights"):
        Conversion(open_checkpoint(directory), ConvertOptions(scheme=GPTQ))


def test_groups_that_do_not_fit_are_refused_before_any_work(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "model"))
    scheme = Scheme(method="gptq", bits=4, granularity="group", group_size=64)
    taken: list[str] = []
    arguments = (torch.zeros(1, 8, dtype=torch.int64), [torch.arange(4)], taken.extend)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj: groups of 64 do not divide 96.*16, 32, -1"):
        convert(checkpoint, ConvertOptions(scheme=scheme), *arguments, lambda what, done, total: None)
    assert taken == []


def test_one_token_of_calibration(model: Path) -> None:
    results: list[str] = []
    measured = convert(
        open_checkpoint(model),
        ConvertOptions(scheme=GPTQ),
        torch.tensor([[5]]),
        [torch.arange(20)],
        results.extend,
        lambda what, done, total: None,
    )
    assert math.isfinite(measured.quality.perplexity)
    assert results


def test_patterns() -> None:
    name = "model.layers.3.mlp.down_proj"
    for pattern in (name, "down_proj", "mlp", "layers.3", "*.down_proj", "layers.[0-3]", "layers.3.mlp.*"):
        assert matches(name, pattern), pattern
    for pattern in ("layers.30", "own_proj", "layers.[0-2]", "mlp.up_proj", "3.down_proj", ""):
        assert not matches(name, pattern), pattern
