"""What cannot be converted, and what fails on the way: one line, and nothing is left."""

import importlib.util
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launch.errors import UserError
from quant import run as run_module
from quant.convert import convert
from quant.formats.checkpoint import Checkpoint
from quant.formats.errors import ModelError
from quant.options import ConvertOptions, Progress
from quant.report import Measured
from quant.run import Convert
from quant.write import PREFIX
from tests.quant.plainly import Plainly
from tests.quant.running import Runner
from tests.quant.small import change_config, complaint, leftovers, run_command, write_model


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
        (
            {"scheme": "gptq", "group_size": "32", "backend": "auto-gptq"},
            "--backend auto-gptq needs --device cuda: it waits for CUDA after each layer",
        ),
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


def test_biases_that_the_configuration_does_not_declare_are_not_lost(runner: Runner, tmp_path: Path) -> None:
    """The engine would add them; zeros, which some converters write, are of no consequence."""
    source = write_model(tmp_path / "odd")
    file = source / "model.safetensors"
    tensors = load_file(file)
    bias = "model.layers.1.self_attn.q_proj.bias"
    tensors[bias] = torch.zeros(tensors["model.layers.1.self_attn.q_proj.weight"].shape[0])
    save_file(tensors, file)
    assert runner(convert, model=str(source), max_ppl_increase="100", min_top1="0") == 0
    shutil.rmtree(runner.out)
    tensors[bias][3] = 0.5
    save_file(tensors, file)
    said = runner.refused_by(convert, str(source))
    assert f"the file has {bias}, of which its configuration says nothing" in said


@pytest.mark.parametrize("scheme", ["gptq", "fp8", "int8"])
def test_activations_that_overflow_are_refused(scheme: str, runner: Runner, tmp_path: Path) -> None:
    source = write_model(tmp_path / "huge")
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.post_attention_layernorm.weight"] *= 1e20
    save_file(tensors, file)
    group = {"group_size": "32"} if scheme == "gptq" else {"smooth": "0"}
    said = runner.refused_by(convert, str(source), scheme=scheme, **group)
    assert "a broken model?" in said


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
