"""
Packed weights in a file: what comes back, what is found out and made anew, and that a start never fails for it.
"""

import os
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.device.native import packed_file
from engine.device.native.library import instruction_sets
from engine.device.native.load import load_native
from engine.device.native.memory import ALIGNED, Arrays
from engine.device.native.model import NativeModel
from engine.device.native.pack import PACKED_VERSION, Packer
from engine.device.native.packed_file import MODELS_MAX, BrokenFile, packed_path, read_packed, write_packed
from engine.device.ranks.shard import Shard, shards
from engine.device.weights import Weights
from quant.formats import checkpoint
from quant.formats.checkpoint import open_checkpoint
from quant.formats.rounding import AT_LOAD
from tests.torch.kernels import in_chunks, native
from tests.torch.tiny import bfloat16_model, load, table

ARRAYS: Arrays = {
    "bytes": np.arange(100, dtype=np.uint8),
    "floats": np.linspace(-1, 1, 21, dtype=np.float32).reshape(3, 7),
    "one": np.array([7], np.int32),
    "halves": np.arange(64, dtype=np.int16).reshape(2, 32),
}


def _equal(found: Arrays, wanted: Arrays) -> bool:
    return list(found) == list(wanted) and all(
        np.array_equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype for name in wanted
    )


def test_round_trip(tmp_path: Path) -> None:
    """Equal, aligned, and read-only."""
    path = tmp_path / "deeper" / "a.packed"
    write_packed(path, ARRAYS)
    found = read_packed(path)
    assert _equal(found, ARRAYS)
    for array in found.values():
        assert array.ctypes.data % ALIGNED == 0 and not array.flags.writeable
    assert [file.name for file in path.parent.iterdir()] == ["a.packed"]


@given(st.lists(st.tuples(st.integers(1, 300), st.sampled_from(["u1", "<i2", "<f4", "<i4"])), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_arrays(tmp_path: Path, kinds: list[tuple[int, str]]) -> None:
    arrays: Arrays = {f"{i}.x": np.arange(size).astype(kind) for i, (size, kind) in enumerate(kinds)}
    write_packed(tmp_path / "a.packed", arrays)
    assert _equal(read_packed(tmp_path / "a.packed"), arrays)


def test_every_flipped_byte_and_every_cut_is_found(tmp_path: Path) -> None:
    """Of the index too: a wrong place or name would give wrong weights without a word."""
    path = tmp_path / "a.packed"
    write_packed(path, ARRAYS)
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        with pytest.raises(BrokenFile):
            read_packed(path)
    for length in (0, 1, 8, 23, 24, 25, 100, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(BrokenFile):
            read_packed(path)
    path.write_bytes(good)
    assert _equal(read_packed(path), ARRAYS)


def test_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under the same name."""
    path = tmp_path / "a.packed"
    write_packed(path, ARRAYS)
    before = packed_path(tmp_path, ("a", "b"))
    monkeypatch.setattr(packed_file, "PACKED_VERSION", PACKED_VERSION + 1)
    with pytest.raises(BrokenFile, match="of another version"):
        read_packed(path)
    assert packed_path(tmp_path, ("a", "b")) != before


def test_the_name_says_what_it_was_made_of(tmp_path: Path) -> None:
    names = {packed_path(tmp_path, parts) for parts in (("a", "b"), ("a", "c"), ("b", "a"), ("a",))}
    assert len(names) == 4


def test_those_used_last_are_kept(tmp_path: Path) -> None:
    """And what a killed process has left goes, when nobody can be writing it any more."""
    (tmp_path / "x.1.draft").touch()
    (tmp_path / "y.2.draft").touch()
    os.utime(tmp_path / "x.1.draft", (0, 0))
    for number in range(MODELS_MAX):
        write_packed(tmp_path / f"{number}.packed", ARRAYS)
        os.utime(tmp_path / f"{number}.packed", (number, number))
    read_packed(tmp_path / "0.packed")
    write_packed(tmp_path / "new.packed", ARRAYS)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"0.packed", "2.packed", "3.packed", "new.packed", "y.2.draft"}


# ---- whole models


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model."""
    return bfloat16_model(tmp_path_factory.mktemp("packed") / "model", {})


def _start(directory: Path, cache: Path | str, shard: Shard | None = None) -> NativeModel:
    if not instruction_sets():
        pytest.skip("no instruction set of the native kernels")
    weights = Weights(open_checkpoint(directory), torch.bfloat16, AT_LOAD["int8"], shard)
    return load_native(
        native(instruction_sets()[0]), weights, kv_int8=True, context_max=100, blocks_max=8, threads=1,
        cache=str(cache),
    )  # fmt: skip


def _logits(model: NativeModel) -> torch.Tensor:
    return in_chunks(model, tuple(range(40)), [40], table(0, 40))


def test_a_later_start_packs_nothing(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And computes the same bits, from a file as from fresh weights."""
    expected = _logits(_start(directory, ""))
    first = _logits(_start(directory, tmp_path / "cache"))
    monkeypatch.setattr(Packer, "arrays", lambda _: pytest.fail("packed again"))
    assert torch.equal(first, expected) and torch.equal(_logits(_start(directory, tmp_path / "cache")), expected)


def test_each_part_of_a_model_has_a_file(directory: Path, tmp_path: Path) -> None:
    """So that no rank takes another one's weights for its own."""
    for shard in (None, *shards(open_checkpoint(directory).architecture, AT_LOAD["int8"], tensor=2)):
        _start(directory, tmp_path, shard)
    assert len(list(tmp_path.glob("*.packed"))) == 3


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "a directory", "a pipe", "a device", "a socket"])
def test_a_broken_file_is_made_anew(damage: str, directory: Path, tmp_path: Path) -> None:
    expected = _logits(_start(directory, tmp_path))
    (path,) = tmp_path.glob("*.packed")
    good = path.read_bytes()
    match damage:
        case "flipped":
            path.write_bytes(good[:-100] + bytes([good[-100] ^ 1]) + good[-99:])
        case "cut":
            path.write_bytes(good[: len(good) // 2])
        case "empty":
            path.write_bytes(b"")
        case "a directory":
            path.unlink()
            path.mkdir()
        case "a pipe":
            path.unlink()
            os.mkfifo(path)
            os.mkfifo(path.with_suffix(f".{os.getpid()}.draft"))
        case "a device":
            path.unlink()
            path.symlink_to("/dev/zero")
        case "a socket":
            path.unlink()
            os.mknod(path, stat.S_IFSOCK | 0o600)
    assert torch.equal(_logits(_start(directory, tmp_path)), expected)
    if damage != "a directory":  # which is not ours to take away
        assert path.read_bytes() == good and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("trouble", ["full disk", "no directory"])
def test_a_start_goes_on_without_a_file(trouble: str, directory: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    expected = _logits(_start(directory, ""))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trouble == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # a write fails, in the middle of the arrays
    else:
        cache.write_text("a file")
    try:
        found = _logits(_start(directory, cache))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(found, expected)
    assert cache.is_file() or not list(cache.iterdir()), "no draft is left"


def test_two_starts_at_once(directory: Path, tmp_path: Path) -> None:
    """Both write, both read what is whole."""
    code = (
        "import sys; from pathlib import Path; from tests.torch.test_native_packed import _start, _logits; "
        "print(_logits(_start(Path(sys.argv[1]), sys.argv[2])).double().sum().item())"
    )
    command = [sys.executable, "-c", code, str(directory), str(tmp_path)]
    if not instruction_sets():
        pytest.skip("no instruction set of the native kernels")
    root = Path(__file__).parents[2]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)]
    said = [child.communicate(timeout=100)[0] for child in children]
    assert said == [f"{_logits(_start(directory, '')).double().sum().item()}\n"] * 2
    assert len(list(tmp_path.iterdir())) == 1


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of several megabytes whose files differ in one byte, in the middle: the sign of one weight."""
    one, other = (tmp_path_factory.mktemp("twins") / name for name in ("one", "other"))
    bfloat16_model(one, {"hidden_size": 256, "intermediate_size": 3072})
    shutil.copytree(one, other)
    content = bytearray((other / "model.safetensors").read_bytes())
    assert len(content) > 9 << 20
    content[len(content) // 4 * 2 + 1] ^= 0x80  # the higher byte of two
    (other / "model.safetensors").write_bytes(content)
    return one, other


def test_another_model_is_another_file(twins: tuple[Path, Path], tmp_path: Path) -> None:
    """Be it one byte that differs."""
    first, second = (_logits(_start(twin, tmp_path)) for twin in twins)
    assert not torch.equal(first, second) and len(list(tmp_path.iterdir())) == 2
    for twin, logits in zip(twins, (first, second), strict=True):
        assert torch.equal(_logits(_start(twin, "")), logits) and torch.equal(_logits(_start(twin, tmp_path)), logits)


def test_another_model_has_another_fingerprint(twins: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever numbers it is served; and it is read for that once a start."""
    read: list[tuple[Path, ...]] = []
    identify = checkpoint._identity

    def counted(files: tuple[Path, ...]) -> str:
        read.append(files)
        return identify(files)

    monkeypatch.setattr(checkpoint, "_identity", counted)
    for quantization in ("none", "int8"):
        one, other = (load(twin, dtype="bfloat16", quantization=quantization).facts for twin in twins)
        assert one.fingerprint != other.fingerprint and one.weights.origin != other.weights.origin
    assert len(read) == 4
