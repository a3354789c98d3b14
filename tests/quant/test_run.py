"""The command around the conversion: what comes out, what is refused, and what is said."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launch.errors import UserError
from quant import table, texts
from quant.formats import checkpoint
from quant.formats.checkpoint import open_checkpoint
from quant.formats.scheme import Scheme
from quant.options import Rotation, matches
from quant.plan import plan
from quant.report import Quality
from quant.run import run
from quant.settings import read_settings
from quant.text_files import tokenizing
from tests.quant.plainly import GOOD, Plainly
from tests.quant.running import Runner
from tests.quant.small import leftovers, write_model

BAD = msgspec.structs.replace(GOOD, perplexity=20.0, perplexity_increase=1.0, top1=0.5)


# ---- what comes out


def test_a_checkpoint_with_all_its_files(runner: Runner, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Plainly()
    assert runner(work, rotate="none") == 0
    files = ["config.json", "model.safetensors", "report.json", "tokenizer.json", "tokenizer_config.json"]
    assert leftovers(runner.folder) == ["out"] and leftovers(runner.out) == files
    assert all((runner.out / name).stat().st_mode & 0o777 == 0o644 for name in files)
    config, original = (json.loads((place / "config.json").read_text()) for place in (runner.out, source))
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config.pop("pellucid") == {"origin": open_checkpoint(source).origin}
    assert config == original | {"torch_dtype": "bfloat16"}
    opened = open_checkpoint(runner.out)
    assert opened.scheme is not None and opened.scheme.method == "int8"
    said = capsys.readouterr()
    assert "int8 of source: the worst layers" in said.out and "1.mlp.down_proj" in said.out
    assert "gate                passed" in said.out and str(runner.out) in said.out
    assert "converting: 2 of 2, 0:00 elapsed" in said.err


@pytest.mark.parametrize("scheme", ["int8", "fp8", "gptq", "nf4", "llm-int8"])
def test_every_scheme_can_be_opened_again(scheme: str, runner: Runner) -> None:
    given = {"group_size": "32"} if scheme == "gptq" else {}
    if scheme in ("nf4", "llm-int8"):
        pytest.importorskip("bitsandbytes", reason="the extra bnb is not installed")
    assert runner(Plainly(), scheme=scheme, keep=("layers.0.mlp",), **given) == 0
    opened = open_checkpoint(runner.out)
    assert opened.scheme is not None and opened.scheme.method == scheme
    assert isinstance(opened.weight("model.layers.0.mlp.down_proj", (96, 160), torch.float32), Tensor)
    assert not isinstance(opened.weight("model.layers.1.mlp.down_proj", (96, 160), torch.float32), Tensor)
    assert ("quantize_config.json" in leftovers(runner.out)) == (scheme == "gptq")


def test_quantize_config_says_the_same_and_the_damping(runner: Runner) -> None:
    assert runner(Plainly(), scheme="gptq", group_size="32", damp="0.05") == 0
    alone = json.loads((runner.out / "quantize_config.json").read_text())
    assert alone == json.loads((runner.out / "config.json").read_text())["quantization_config"]
    assert (alone["damp_percent"], alone["group_size"], alone["bits"]) == (0.05, 32, 4)


def test_the_size_that_was_planned_is_the_size_that_comes_out(runner: Runner, source: Path) -> None:
    for scheme, more in (("int8", {}), ("fp8", {}), ("gptq", {"group_size": "32"}), ("gptq", {"group_size": "-1"})):
        settings = read_settings("m", {"scheme": scheme, "out": "x", **more})
        planned = plan(open_checkpoint(source), settings.scheme, ("v_proj",))
        runner.out = runner.folder / f"{scheme}{more}"
        assert runner(Plainly(), scheme=scheme, keep=("v_proj",), **more) == 0
        tensors = load_file(runner.out / "model.safetensors")
        assert planned.size_bytes == sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        assert len(tensors) <= planned.tensors_max


@pytest.mark.parametrize("rotate", ["none", "offline", "full"])
def test_a_rotated_model_has_a_head_of_its_own(rotate: Rotation, runner: Runner, tmp_path: Path) -> None:
    """And its configuration says so; the size is the one that was planned, and the architecture is the old one."""
    source = write_model(tmp_path / "tied", tie_word_embeddings=True)
    config = json.loads((source / "config.json").read_text())
    del config["architectures"]  # the model type tells as well
    (source / "config.json").write_text(json.dumps(config))
    planned = plan(open_checkpoint(source), Scheme(method="int8", bits=8), (), rotate=rotate)
    assert runner(Plainly(), str(source), rotate=rotate) == 0
    tensors = load_file(runner.out / "model.safetensors")
    assert planned.size_bytes == sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    opened = open_checkpoint(runner.out)
    assert opened.tied == planned.tied == (rotate == "none") == ("lm_head.weight" not in tensors)
    expected = msgspec.structs.replace(open_checkpoint(source).architecture, tied=opened.tied)
    assert opened.architecture == expected


def test_the_report_says_what_was_done(runner: Runner, source: Path, calibration: Path) -> None:
    assert runner(Plainly(), scheme="gptq", group_size="32", seed="7", keep=("o_proj",)) == 0
    report = msgspec.json.decode((runner.out / "report.json").read_bytes())
    assert list(report) == list(table.Report.__struct_fields__)
    assert report["label"] == "gptq-4bit-g32" and report["settings"]["seed"] == 7
    assert report["settings"]["keep"] == ["o_proj"] and len(report["scheme"]["kept"]) == 2
    assert report["source"]["name"] == "source"
    assert report["source"]["identity"] == open_checkpoint(source).identity
    assert report["calibration"]["origin"] == calibration.name and len(report["calibration"]["sha256"]) == 64
    assert report["evaluation"]["origin"] == "the text that ships with Pellucid"
    assert report["gate"]["passed"] and report["gate"]["suggestions"] == []
    assert report["size"]["result_bytes"] == (runner.out / "model.safetensors").stat().st_size
    assert report["size"]["source_bytes"] == (source / "model.safetensors").stat().st_size
    assert report["cost"]["peak_memory_bytes"] > 2**20 and report["cost"]["seconds"] > 0
    assert report["versions"]["torch"] == torch.__version__ and report["host"]["threads"] > 0
    assert len(report["linears"]) == 14 and len(report["worst"]) == 10
    assert not any("o_proj" in name for name in report["worst"])
    errors = {linear["name"]: linear["output_error"] for linear in report["linears"]}
    assert [errors[name] for name in report["worst"]] == sorted(errors.values(), reverse=True)[:10]
    assert next(one for one in report["linears"] if one["kept"])["sqnr_db"] is None  # no noise


def test_json_is_the_report_and_nothing_else(runner: Runner, capfd: pytest.CaptureFixture[str]) -> None:
    assert runner(Plainly(), json=True) == 0
    said = capfd.readouterr()
    assert said.out == (runner.out / "report.json").read_text() and said.err == ""


def test_calibration_is_sampled_if_no_text_is_given(runner: Runner, tmp_path: Path) -> None:
    source = write_model(tmp_path / "short", max_position_embeddings=32)  # which bounds the sequences
    works = [Plainly(), Plainly(), Plainly()]
    for work, seed in zip(works, ("3", "3", "4"), strict=True):
        runner.out = runner.folder / f"out{len(leftovers(runner.folder))}"
        given = {"scheme": "int8", "out": str(runner.out), "seed": seed, "calibration_tokens": "128"}
        assert run(read_settings(str(source), given), {}, work) == 0
        report = msgspec.json.decode((runner.out / "report.json").read_bytes(), type=table.Report)
        assert report.calibration == table.Text(
            origin=f"sampled from the model itself, seed {seed}", sha256=None, tokens=128
        )
    assert torch.equal(works[0].calibration, works[1].calibration)
    assert not torch.equal(works[0].calibration, works[2].calibration)


def test_calibration_tokens_bound_the_text(runner: Runner) -> None:
    work = Plainly()
    assert runner(work, calibration_tokens="256") == 0
    assert work.calibration.shape == (1, 256)


def test_a_source_of_several_shards(runner: Runner, tmp_path: Path) -> None:
    source = write_model(tmp_path / "sharded")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[:9]), dict(list(tensors.items())[9:])]
    weight_map: dict[str, str] = {}
    for number, half in enumerate(halves):
        save_file(half, source / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(half, f"model-{number}.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert runner(Plainly(), model=str(source)) == 0
    assert not (runner.out / "model.safetensors.index.json").exists()


# ---- the gate


def test_below_the_gate_is_a_report_and_no_checkpoint(runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner(Plainly(BAD)) == 3
    assert leftovers(runner.folder) == ["out.report.json"]
    place = runner.folder / "out.report.json"
    report = msgspec.json.decode(place.read_bytes(), type=table.Report)
    assert not report.gate.passed and len(report.gate.complaints) == 2
    said = capsys.readouterr()
    assert "perplexity rose by 100.00%, at most 5.00%; top-1 agreement is 50.00%, at least 90.00%" in said.out
    last = said.err.splitlines()[-1]
    assert last.startswith(f"pellucid: below the gate, nothing was kept but {place}")
    assert "--keep model.layers.1.mlp.down_proj --keep model.layers.1.mlp.up_proj" in last


def test_below_the_gate_in_json(runner: Runner, capfd: pytest.CaptureFixture[str]) -> None:
    assert runner(Plainly(BAD), json=True) == 3
    said = capfd.readouterr()
    assert said.out == (runner.folder / "out.report.json").read_text() and said.err == ""


@pytest.mark.parametrize(
    ("quality", "given", "code"),
    [
        (BAD, {"max_ppl_increase": "1.0", "min_top1": "0.5"}, 0),
        (BAD, {"max_ppl_increase": "0.99", "min_top1": "0.5"}, 3),
        (BAD, {"max_ppl_increase": "1.0", "min_top1": "0.51"}, 3),
        (msgspec.structs.replace(GOOD, perplexity_increase=float("nan")), {}, 3),
        (msgspec.structs.replace(GOOD, perplexity_increase=float("inf")), {"max_ppl_increase": "1e9"}, 3),
        (msgspec.structs.replace(GOOD, top1=float("nan")), {}, 3),
        (msgspec.structs.replace(GOOD, perplexity_increase=-0.5), {"max_ppl_increase": "0"}, 0),
    ],
)
def test_the_gate(quality: Quality, given: dict[str, str], code: int, runner: Runner) -> None:
    assert runner(Plainly(quality), **given) == code
    assert runner.out.exists() == (code == 0)


# ---- dry run, and the rest


def test_a_dry_run_says_what_would_be_and_writes_nothing(runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner(Plainly(), dry_run=True, keep=("o_proj",)) == 0
    assert leftovers(runner.folder) == []
    said = capsys.readouterr()
    assert said.err == ""
    assert "12 linear layers: mlp.down_proj, mlp.gate_proj" in said.out
    assert "model.layers.0.self_attn.o_proj, model.layers.1.self_attn.o_proj, embeddings and head" in said.out
    assert "nothing was written" in said.out
    assert runner(Plainly(), dry_run=True, json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (
        len(facts["quantized"]) == 14 and "lm_head" in facts["kept"] and facts["result_bytes"] < facts["source_bytes"]
    )


def test_a_dry_run_needs_no_out_and_fetches_nothing(source: Path, tmp_path: Path) -> None:
    assert run(read_settings(str(source), {"scheme": "nf4", "dry_run": True}), {}) == 0
    settings = read_settings("SmolLM2-135M-Instruct", {"scheme": "int8", "dry_run": True, "data_dir": str(tmp_path)})
    with pytest.raises(UserError, match="is not here, and --dry-run fetches nothing"):
        run(settings, {})
    assert leftovers(tmp_path) == []


def test_a_dry_run_does_not_read_all_the_weights(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large model that takes long, and nothing is kept that would have to be found again."""
    monkeypatch.setattr(checkpoint, "_identity", lambda _: pytest.fail("hashed"))
    assert runner(Plainly(), dry_run=True) == 0


def test_a_dry_run_finds_the_same_mistakes(runner: Runner) -> None:
    assert "does not divide" in runner.refused(dry_run=True, scheme="gptq")
    assert "matches no linear layer" in runner.refused(dry_run=True, keep=("zzz",))


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        ("model.layers.3.mlp.down_proj", True),
        ("down_proj", True),
        ("mlp.down_proj", True),
        ("layers.3", True),
        ("*.down_proj", True),
        ("model.layers.[0-3].*", True),
        ("mlp", True),
        ("down", False),
        ("layers.30", False),
        ("self_attn", False),
        ("layers", True),
    ],
)
def test_a_pattern_is_a_name_a_part_or_a_wildcard(pattern: str, matching: bool) -> None:
    assert matches("model.layers.3.mlp.down_proj", pattern) == matching


def test_the_text_that_ships_is_there_and_large_enough(source: Path) -> None:
    with tokenizing(source) as tokenize:
        pieces = texts.read_evaluation(texts.EVALUATION, tokenize, open_checkpoint(source).architecture)
    assert sum(map(len, pieces)) > 1000
