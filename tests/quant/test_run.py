"""The command around the conversion: what comes out, what is refused, and what is said."""

import importlib.util
import json
import resource
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launch.errors import UserError
from quant import run as run_module
from quant import table, texts
from quant.formats.checkpoint import Checkpoint, open_checkpoint
from quant.formats.errors import ModelError
from quant.options import ConvertOptions
from quant.plan import matches, plan
from quant.progress import Lines, Progress
from quant.report import Measured, Quality
from quant.run import Convert, run
from quant.settings import Given, read_settings
from quant.text_files import tokenizing
from quant.write import PREFIX
from tests.quant.plainly import GOOD, Plainly
from tests.quant.small import change_config, complaint, leftovers, run_command, write_model

BAD = msgspec.structs.replace(GOOD, perplexity=20.0, perplexity_increase=1.0, top1=0.5)
TEXT = "The quick brown fox jumps over the lazy dog, and one two three four five six tokens follow.\n" * 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that nobody changes."""
    return write_model(tmp_path_factory.mktemp("run") / "source")


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text(TEXT)
    return file


class Runner:
    """`run`, with what most tests want."""

    def __init__(self, source: Path, calibration: Path, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.out = folder / "out"
        self._model = str(source)
        self._calibration = str(calibration)

    def __call__(self, work: Convert, model: str = "", **given: str | bool | tuple[str, ...]) -> int:
        chosen: Given = {"scheme": "int8", "out": str(self.out), "calibration": self._calibration, **given}
        return run(read_settings(model or self._model, chosen), {"HOME": str(self.folder)}, work)

    def refused(self, model: str = "", **given: str | bool | tuple[str, ...]) -> str:
        with pytest.raises(UserError) as caught:
            self(Plainly(), model, **given)
        assert leftovers(self.folder) == []
        return str(caught.value)


@pytest.fixture
def runner(source: Path, calibration: Path, tmp_path: Path) -> Runner:
    return Runner(source, calibration, tmp_path / "place")


# ---- what comes out


def test_a_checkpoint_with_all_its_files(runner: Runner, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Plainly()
    assert runner(work) == 0
    files = ["config.json", "model.safetensors", "report.json", "tokenizer.json", "tokenizer_config.json"]
    assert leftovers(runner.folder) == ["out"] and leftovers(runner.out) == files
    assert all((runner.out / name).stat().st_mode & 0o777 == 0o644 for name in files)
    config, original = (json.loads((place / "config.json").read_text()) for place in (runner.out, source))
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config.pop("pellucid") == {"origin": open_checkpoint(source).origin}
    assert config == original
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


# ---- what is refused


def test_an_out_that_is_there_is_refused_before_anything_else(runner: Runner) -> None:
    runner.out.mkdir()
    with pytest.raises(UserError, match=f"{runner.out} exists"):
        runner(Plainly(), model="there/is/no/such.gguf")
    assert leftovers(runner.out) == []
    with pytest.raises(UserError, match="is no directory: make it first"):
        runner(Plainly(), out=str(runner.folder / "absent/out"))


def test_a_place_that_lets_nobody_write_is_refused(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "refuse_full_disk", lambda parent, need_bytes: None)  # /proc says 0 bytes
    if not Path("/proc/self").exists():
        pytest.skip("there is no /proc here")
    said = runner.refused(out="/proc/out")
    assert "cannot write to /proc/" in said or "/proc cannot be written to" in said  # a superuser is told later


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"calibration": "absent.txt"}, "--calibration: there is no file"),
        ({"eval": "absent.txt"}, "--eval: there is no file"),
        ({"keep": ("down_prj",)}, "--keep 'down_prj' matches no linear layer; near are down_proj"),
        ({"keep": ("model.layers.7.mlp.up_proj",)}, "near are model.layers.1.mlp.up_proj"),
        ({"keep": ("lm_head",)}, "--keep 'lm_head' matches no linear layer: embeddings, norms and the head always"),
        ({"keep": ("zzz",)}, "there are model.layers.0.self_attn.q_proj .. model.layers.1.mlp.down_proj"),
        ({"keep": ("model",)}, "--keep leaves nothing to quantize"),
        (
            {"scheme": "gptq", "group_size": "64"},
            "--group-size 64 does not divide the 96 columns of model.layers.0.self_attn.q_proj: "
            "sizes that fit all layers are 32, -1; or --keep those layers",
        ),
        (
            {"granularity": "group", "group_size": "128"},
            "sizes that fit all layers are 32; or --keep those layers",
        ),
        ({"device": "cuda"}, "--device cuda: torch sees no CUDA device here"),
        ({"model": "absent.gguf"}, "no such model file"),
        ({"model": "zzz"}, "no model named 'zzz'"),
    ],
)
def test_a_mistake_leaves_nothing(
    given: dict[str, str | tuple[str, ...]], words: str, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = given.get("model", "")
    assert isinstance(model, str)
    assert words in runner.refused(model, **{name: value for name, value in given.items() if name != "model"})


def test_the_command_says_it_in_one_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantize", str(source), "--scheme", "int8", "--out", str(tmp_path / "out"), "--keep", "zzz"]
    assert "--keep 'zzz' matches no linear layer" in complaint(run_command(arguments, capsys))
    arguments = ["quantize", str(tmp_path), "--scheme", "int8", "--out", str(tmp_path / "out")]
    assert "has no config.json" in complaint(run_command(arguments, capsys))
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantized already (gptq): name the float model"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported: supported are Llama"),
        ({"hidden_size": 128}, "has shape"),
        ({"num_hidden_layers": 3}, "the model lacks the tensor model.layers.2"),
    ],
)
def test_a_source_that_cannot_be_converted(
    changes: dict[str, object], words: str, runner: Runner, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "odd")
    change_config(source, **changes)
    assert words in runner.refused(model=str(source))


def test_sizes_that_gptq_cannot_pack(runner: Runner, tmp_path: Path) -> None:
    source = write_model(tmp_path / "odd", intermediate_size=200)
    words = runner.refused(model=str(source), scheme="gptq", group_size="-1")
    assert "model.layers.0.mlp.gate_proj is 200 x 96, and gptq needs multiples of 32: --keep it" in words
    assert runner(Plainly(), model=str(source), scheme="gptq", group_size="32", keep=("mlp",)) == 0


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", "", "empty.txt holds no text to calibrate on"),
        ("short.txt", "too short", "short.txt holds 7 tokens, too few to calibrate on: at least 128 are needed"),
        ("empty.jsonl", "\n\n", "empty.jsonl holds no text to calibrate on"),
        ("broken.jsonl", '{"text": "a"}\n\n{"text": \n', "broken.jsonl:3 is no JSON"),
        ("other.jsonl", '{"text": "a"}\n{"txt": "b"}', 'other.jsonl:2 is neither a string nor has a "text"'),
        ("bytes.txt", b"\xff\xfe\xfd", "bytes.txt cannot be read as UTF-8 text"),
    ],
)
@pytest.mark.parametrize("flag", ["calibration", "eval"])
def test_a_text_that_cannot_be_used(
    flag: str, name: str, content: str | bytes, words: str, runner: Runner, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = runner.refused(**{flag: str(file)})
    if flag == "eval":
        words = words.replace("to calibrate on", "to measure on")
    assert words in said.replace(f"{tmp_path}/", "")


def test_the_extra_for_bitsandbytes_is_named(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert runner.refused(scheme="nf4") == "--scheme nf4 needs bitsandbytes: pip install 'pellucid[bnb]'"


def test_a_disk_without_room_is_seen_before_the_work(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.write.shutil.disk_usage", lambda place: type("Usage", (), {"free": 1000}))
    assert "of disk and" in runner.refused()


# ---- what fails on the way


def failing(error: Exception) -> Convert:
    """A conversion that fails after its first tensors."""

    def work(
        checkpoint: Checkpoint,
        options: ConvertOptions,
        calibration: Tensor,
        evaluation: list[Tensor],
        sink: Callable[[dict[str, Tensor]], None],
        progress: Progress,
    ) -> Measured:
        sink({"a": torch.ones(1000), "b": torch.ones(3, dtype=torch.uint8)})
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModelError("tensor x has NaN"), "tensor x has NaN"),
        (MemoryError(), "too little memory"),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), "too little memory"),
        (OSError(28, "No space left on device"), "the disk is full"),
    ],
)
def test_a_failure_on_the_way_leaves_nothing(error: Exception, words: str, runner: Runner) -> None:
    with pytest.raises(UserError, match=words):
        runner(failing(error))
    assert leftovers(runner.folder) == []


@pytest.mark.parametrize("error", [RuntimeError("a bug"), AssertionError("a bug"), KeyboardInterrupt()])
def test_a_bug_or_an_interruption_leaves_nothing_either(error: Exception, runner: Runner) -> None:
    with pytest.raises(type(error)):
        runner(failing(error))
    assert leftovers(runner.folder) == []


def test_a_file_that_may_not_grow_leaves_nothing(runner: Runner) -> None:
    """The kernel refuses in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(UserError, match="may not grow so large"):
            runner(Plainly())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert leftovers(runner.folder) == []


def test_the_next_conversion_removes_what_a_killed_one_left(runner: Runner) -> None:
    left = runner.folder / f"{PREFIX}0123"
    left.mkdir()
    (left / "shard-1").write_bytes(bytes(1000))
    assert runner(Plainly()) == 0
    assert leftovers(runner.folder) == ["out"]


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


def test_lines_are_sparse() -> None:
    said: list[str] = []
    clock = iter([0.0, 1.0, 2.0, 12.0, 13.0, 14.0, 15.0])
    lines = Lines(lambda: next(clock), said.append)
    for done in (0, 1, 2, 3, 30):
        lines("sampling", done, 30)
    lines("converting", 1, 2)
    lines("converting", 2, 2)
    assert said == [
        "sampling: 0 of 30, 0:00 elapsed",
        "sampling: 3 of 30, 0:12 elapsed, about 1:48 remaining",
        "sampling: 30 of 30, 0:13 elapsed",
        "converting: 1 of 2, 0:00 elapsed, about 0:00 remaining",
        "converting: 2 of 2, 0:01 elapsed",
    ]


def test_the_text_that_ships_is_there_and_large_enough(source: Path) -> None:
    with tokenizing(source) as tokenize:
        pieces = texts.read_evaluation(texts.EVALUATION, tokenize, open_checkpoint(source).architecture)
    assert sum(map(len, pieces)) > 1000
