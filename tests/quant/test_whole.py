"""From the command line to the engine: the real conversion of a small model, by each scheme."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from quant.convert import relative
from quant.formats.checkpoint import open_checkpoint
from quant.formats.errors import ModelError
from quant.table import Report
from quant.text_files import tokenizing
from quant.texts import read_evaluation
from tests.quant.plainly import Plainly
from tests.quant.running import Runner
from tests.quant.small import Done, complaint, leftovers, run_command, write_model
from tests.torch.tiny import load, logits

LAX = ("--max-ppl-increase", "1e9", "--min-top1", "0")  # a random model has nothing to lose
SCHEMES = {
    "int8": (),
    "int8-tensor": ("--granularity", "tensor"),
    "int8-g32": ("--granularity", "group", "--group-size", "32"),
    "fp8": (),
    "gptq-4bit-g32": ("--group-size", "32"),
    "gptq-8bit-channel-asym": ("--bits", "8", "--group-size", "-1", "--asym"),
    "gptq-4bit-g32-act": ("--group-size", "32", "--desc-act"),
    "nf4": (),
    "llm-int8": (),
}


@pytest.fixture
def arguments(source: Path, calibration: Path) -> tuple[str, ...]:
    return ("quantize", str(source), "--calibration", str(calibration), "--eval", str(calibration), *LAX)


def perplexity(model: Path, text: Path) -> float:
    """By the engine."""
    runner = load(model)
    with tokenizing(model) as tokenize:
        pieces = read_evaluation(text, tokenize, open_checkpoint(model).architecture)
    losses = [F.cross_entropy(logits(runner, piece.tolist())[:-1], piece[1:], reduction="none") for piece in pieces]
    return float(torch.cat(losses).mean().exp())


def scheme_of(label: str) -> tuple[str, ...]:
    if label in ("nf4", "llm-int8"):
        pytest.importorskip("bitsandbytes", reason="the extra bnb is not installed")
        return ("--scheme", label)
    return ("--scheme", label.partition("-")[0], *SCHEMES[label])


@pytest.mark.parametrize("label", SCHEMES)
def test_the_engine_runs_what_comes_out(
    label: str,
    arguments: tuple[str, ...],
    source: Path,
    calibration: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And finds the perplexity that the report tells, though it computes by other means."""
    out = tmp_path / "out"
    done = run_command([*arguments, *scheme_of(label), "--out", str(out)], capsys)
    assert done.code == 0, done
    report = msgspec.json.decode((out / "report.json").read_bytes(), type=Report)
    assert report.label == label and len(report.linears) == 14
    assert all(0 < linear.output_error < 0.5 for linear in report.linears)
    for place, told in ((source, report.quality.source_perplexity), (out, report.quality.perplexity)):
        assert perplexity(place, calibration) == pytest.approx(told, rel=0.01)


@pytest.mark.filterwarnings("ignore")  # transformers warns about itself
@pytest.mark.parametrize("kind", ["none", "offline", "full"])
def test_rotated_checkpoints(
    kind: str,
    arguments: tuple[str, ...],
    source: Path,
    calibration: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The engine reads all; transformers reads what needs no mixing, and refuses the rest whatever it is asked for."""
    out = tmp_path / "out"
    done = run_command([*arguments, "--scheme", "int8", "--rotate", kind, "--out", str(out)], capsys)
    assert done.code == 0, done
    report = msgspec.json.decode((out / "report.json").read_bytes(), type=Report)
    opened = open_checkpoint(out)
    assert (report.settings.rotate, report.label) == (kind, "int8")
    assert opened.scheme == report.scheme and report.scheme.mix == (2 if kind == "full" else 0)
    assert opened.architecture == open_checkpoint(source).architecture
    assert perplexity(out, calibration) == pytest.approx(report.quality.perplexity, rel=0.01)
    tokens = list(range(3, 40))
    found, expected = logits(load(out), tokens), logits(load(source), tokens)
    assert relative(found, expected) < 0.1
    if kind == "full":
        for loader in (transformers.AutoConfig, transformers.AutoModelForCausalLM):
            with pytest.raises(ValueError, match="pellucid_llama"):
                loader.from_pretrained(out)
        with pytest.raises(ValueError, match="compressed-mixed"):
            transformers.LlamaForCausalLM.from_pretrained(out)
    else:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        with torch.inference_mode():
            assert relative(theirs(torch.tensor([tokens])).logits[0].float(), expected) < 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"quantization_config": {"pellucid_mix": None, "quantization_status": "compressed"}},
        {"quantization_config": {"pellucid_mix": 4}},
        {"quantization_config": {"pellucid_mix": 3}},
        {"quantization_config": {"quantization_status": "compressed"}},
        {"quantization_config": {"pellucid_mix": None}},
        {"quantization_config": None},
    ],
)
def test_a_mixed_checkpoint_that_somebody_edited_is_refused(
    changes: dict[str, object], runner: Runner, tmp_path: Path
) -> None:
    assert runner(Plainly(), rotate="full") == 0
    config = json.loads((runner.out / "config.json").read_text())
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (runner.out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        open_checkpoint(runner.out)


def test_the_same_seed_gives_the_same_bytes(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = []
    for number in range(2):
        out = tmp_path / f"out{number}"
        done = run_command([*arguments, *scheme_of("gptq-4bit-g32"), "--seed", "7", "--out", str(out)], capsys)
        assert done.code == 0, done
        contents.append({file.name: file.read_bytes() for file in out.iterdir() if file.name != "report.json"})
    assert contents[0] == contents[1] and "quantize_config.json" in contents[0]


def test_what_is_kept_has_the_bytes_of_the_source(
    arguments: tuple[str, ...], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    done = run_command([*arguments, *scheme_of("gptq-4bit-g32"), "--keep", "layers.1", "--out", str(out)], capsys)
    assert done.code == 0, done
    before, after = (load_file(place / "model.safetensors") for place in (source, out))
    kept = [name for name in before if name.startswith(("model.layers.1.", "lm_head"))]
    assert len(kept) == 10
    assert all(torch.equal(after[name], before[name].to(torch.bfloat16)) for name in kept)
    assert not any(name.endswith("qweight") for name in after if name.startswith("model.layers.1."))
    assert json.loads((out / "config.json").read_text())["quantization_config"]["dynamic"]


def test_float16_stays_float16_and_config_says_so(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_model(tmp_path / "half"), tmp_path / "out"
    halves = {name: tensor.half() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(halves, source / "model.safetensors")
    texts = ("--calibration", str(calibration), "--eval", str(calibration))
    done = run_command(["quantize", str(source), "--scheme", "fp8", *texts, *LAX, "--out", str(out)], capsys)
    assert done.code == 0, done
    after = load_file(out / "model.safetensors")
    assert all(torch.equal(after[name], halves[name]) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float16"


def broken(source: Path, name: str, value: float) -> Path:
    """The model with one bad number."""
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[17] = value
    save_file(tensors, source / "model.safetensors")
    return source


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_a_weight_that_is_no_number_is_named(
    name: str, value: float, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = broken(write_model(tmp_path / "broken"), name, value)
    place = tmp_path / "place"
    place.mkdir()
    arguments = ["quantize", str(source), "--scheme", "int8", "--calibration", str(calibration)]
    done = run_command([*arguments, "--out", str(place / "out")], capsys)
    last = Done(done.code, done.out, done.err.splitlines(keepends=True)[-1])  # the first say how far it was
    assert f"tensor {name} has NaN or infinite weights" in complaint(last)
    assert leftovers(place) == []


def test_a_gate_that_nothing_passes(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    strict = ("--min-top1", "1", "--scheme", "gptq", "--group-size", "-1")
    done = run_command([*arguments, *strict, "--out", str(out)], capsys)
    assert done.code == 3 and "top-1 agreement is" in done.out
    assert not out.exists()
    named = done.err.splitlines()[-1].split("--keep ")[1].strip()
    report = msgspec.json.decode((tmp_path / "out.report.json").read_bytes(), type=Report)
    assert named == report.gate.suggestions[0]
