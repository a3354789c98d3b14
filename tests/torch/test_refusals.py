"""
Files that cannot be served: one clear line that names the thing, never a traceback, never a pickle.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from engine.device import runner
from engine.device.errors import MemoryShort, ModelError
from tests.torch.tiny import load, write_model


def _config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _write(directory: Path, config: str) -> None:
    (directory / "config.json").write_text(config)


def _drop(directory: Path, name: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors")


def _replace(directory: Path, name: str, tensor: torch.Tensor) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {name: tensor}, directory / "model.safetensors")


def _truncate(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def _pickle(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _index(directory: Path, name: str) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))


NORM = "model.layers.1.input_layernorm.weight"
CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no_config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "broken_config": (lambda d: _truncate(d / "config.json", 0.5), "config.json is broken"),
    "config_is_a_list": (lambda d: _write(d, "[]"), "config.json is broken"),
    "missing_key": (lambda d: _write(d, '{"model_type": "llama"}'), "vocab_size"),
    "architecture": (lambda d: _config(d, architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is not supported"),
    "model_type": (lambda d: _config(d, architectures=None, model_type="falcon"), "falcon is not supported"),
    "activation": (lambda d: _config(d, hidden_act="gelu"), "hidden_act 'gelu'"),
    "rope": (lambda d: _config(d, rope_scaling={"rope_type": "longrope", "factor": 2}), "rope type 'longrope'"),
    "rope_factor": (lambda d: _config(d, rope_scaling={"rope_type": "linear"}), "factor"),
    "partial_rotary": (lambda d: _config(d, partial_rotary_factor=0.5), "partial_rotary_factor"),
    "quantized_by_whom": (lambda d: _config(d, quantization_config={"quant_method": "awq"}), "awq"),
    "quantized_not": (lambda d: _config(d, quantization_config=[]), "quantization_config of config.json is no object"),
    "zero_size": (lambda d: _config(d, num_hidden_layers=0), "below 1"),
    "heads": (lambda d: _config(d, num_key_value_heads=4), "evenly"),
    "no_weights": (lambda d: (d / "model.safetensors").unlink(), "no model.safetensors"),
    "pickle": (_pickle, "pytorch_model.bin"),
    "truncated": (lambda d: _truncate(d / "model.safetensors", 0.7), "model.safetensors is broken"),
    "no_header": (lambda d: _truncate(d / "model.safetensors", 0), "model.safetensors is broken"),
    "missing_tensor": (lambda d: _drop(d, NORM), NORM),
    "wrong_shape": (lambda d: _replace(d, NORM, torch.ones(95)), "shape (95,)"),
    "wrong_dtype": (lambda d: _replace(d, NORM, torch.ones(96, dtype=torch.int8)), "int8"),
    "missing_shard": (lambda d: _index(d, "model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors"),
    "shard_elsewhere": (lambda d: _index(d, "../../secret.safetensors"), "secret.safetensors"),
    "shard_is_a_pickle": (lambda d: _index(d, "pytorch_model.bin"), "pytorch_model.bin"),
    "tied_says_no_but_no_head": (lambda d: _drop(d, "lm_head.weight"), "lm_head.weight"),
}


def _refused(model: Path, **options: int) -> str:
    with pytest.raises(ModelError) as caught:
        load(model, **options)  # type: ignore[arg-type]  # one test passes a context, one passes memory
    message = str(caught.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize("name", CASES)
def test_directory(name: str, tiny_model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    spoil, expected = CASES[name]
    spoil(directory)
    assert expected in _refused(directory)


def test_mixtral_by_name(shared: Path) -> None:
    directory = shared / "fixtures/models/mixtral"
    if not directory.is_dir():
        pytest.skip(f"no {directory}")
    assert "MixtralForCausalLM is not supported" in _refused(directory)


@pytest.mark.parametrize(("name", "expected"), [
    ("nothing", "does not exist"),
    ("model.bin", "pickle"),
    ("model.pt", "pickle"),
    ("model.safetensors", "name its directory"),
    ("model.txt", "neither"),
])  # fmt: skip
def test_path(name: str, expected: str, tmp_path: Path) -> None:
    if name != "nothing":
        (tmp_path / name).write_bytes(b"\x80\x04.")
    assert expected in _refused(tmp_path / name)


@pytest.mark.parametrize("keep", [0.0, 0.0001, 0.3, 0.999])
def test_truncated_gguf(keep: float, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_array("filler", list(range(3000)))
    writer.add_tensor("token_embd.weight", torch.zeros(64, 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _truncate(path, keep)
    assert "no whole GGUF file" in _refused(path)


def test_gguf_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "'gpt2' is not supported" in _refused(path)


def test_more_context_than_trained(tiny_model: Path) -> None:
    assert "2048" in _refused(tiny_model, context_max=2049)


def test_too_little_kv_memory(tiny_model: Path) -> None:
    assert "--kv-memory" in _refused(tiny_model, kv_memory_bytes=100)


def test_too_little_memory(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "memory_bytes", lambda: 1 << 20)
    with pytest.raises(MemoryShort, match="GiB are free"):
        load(tiny_model)


def test_unknown_dtype(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="float64"):
        load(tiny_model, dtype="float64")


def test_extra_files_do_not_matter(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    (directory / "pytorch_model.bin").write_bytes(b"never opened")
    assert load(directory).facts.vocab_size == 259
