"""The checkpoint on its way to disk: readable by everybody when it is there, and nothing when it is not."""

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from launch.errors import UserError
from quant import write
from quant.write import PREFIX, CheckpointWriter, growing, publish, refuse_full_disk, refuse_out, replace_file
from tests.quant.small import leftovers

DTYPES = tuple(write.NAMES)


def tensor(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (max(1, count),), generator=generator, dtype=torch.uint8)[:count]
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, NaN too."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """As a loader does it: by the index if there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    found = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        with safe_open(folder / file, framework="pt") as shard:
            found[name] = shard.get_tensor(name)
    return found


@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 9), max_size=3), st.booleans()), min_size=1
    ),
    shard_bytes_max=st.sampled_from([1, 64, 1000, 10**9]),
    tensors_max=st.sampled_from([1, 100]),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_written_can_be_read(
    kinds: list[tuple[torch.dtype, list[int], bool]],
    shard_bytes_max: int,
    tensors_max: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Any types in any order, also transposed: each is found again, aligned to its type, in exactly one shard."""
    folder = tmp_path_factory.mktemp("any")
    writer = CheckpointWriter(folder, tensors_max=tensors_max, shard_bytes_max=shard_bytes_max)
    expected = {}
    for seed, (dtype, shape, transposed) in enumerate(kinds):
        value = tensor(seed, dtype, *shape)
        expected[f"t{seed}"] = value.transpose(0, -1) if transposed and shape else value
        writer.add({f"t{seed}": expected[f"t{seed}"]})
    writer.finish()
    found = read_all(folder)
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name].contiguous()) for name in expected)
    files = sorted(folder.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) == writer.size_bytes
    for file in files:
        header = header_of(file)
        assert header.pop("__metadata__")["format"] == "pt"
        assert file.stat().st_mode & 0o777 == 0o644
        for name, entry in header.items():
            assert int(entry["data_offsets"][0]) % expected[name].itemsize == 0


def header_of(file: Path) -> dict[str, dict[str, Any]]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header: dict[str, dict[str, Any]] = json.loads(content[8 : 8 + length])
    return header


def test_one_shard_has_no_index(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, tensors_max=2)
    writer.add({"a": torch.ones(3), "b": torch.zeros((), dtype=torch.uint8)})
    writer.finish()
    assert leftovers(tmp_path) == ["model.safetensors"]


def test_shards_are_numbered_and_named_by_the_index(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, tensors_max=6, shard_bytes_max=100)
    for layer in range(3):
        writer.add({f"{layer}.a": torch.ones(8), f"{layer}.b": torch.ones(9)})
    writer.finish()
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert leftovers(tmp_path) == [*shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 * 17 * 4
    assert index["weight_map"] == {f"{i}.{kind}": shards[i] for i in range(3) for kind in "ab"}


def test_more_tensors_than_announced_make_more_shards(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, tensors_max=1)
    expected = {f"model.layers.{i}.self_attn.q_proj.weight": torch.full((2,), i) for i in range(50)}
    for name, value in expected.items():
        writer.add({name: value})
    writer.finish()
    found = read_all(tmp_path)
    assert len(leftovers(tmp_path)) > 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_published_directory_is_whole_and_ordinary(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with growing(out) as folder:
        assert folder.parent == tmp_path and folder.name.startswith(PREFIX)
        write.write_json(folder / "a.json", {"a": "ä"})
        publish(folder, out)
    assert leftovers(tmp_path) == ["out"] and leftovers(out) == ["a.json"]
    assert json.loads((out / "a.json").read_text()) == {"a": "ä"}
    umask = os.umask(0o22)
    os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask


def test_what_is_not_published_is_gone(tmp_path: Path) -> None:
    with growing(tmp_path / "out") as folder:
        (folder / "a").touch()
    assert leftovers(tmp_path) == []
    with pytest.raises(ZeroDivisionError), growing(tmp_path / "out") as folder:
        (folder / "a").touch()
        raise ZeroDivisionError
    assert leftovers(tmp_path) == []


def test_leftovers_of_the_dead_are_removed_and_those_at_work_are_not(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}dead").mkdir()
    (tmp_path / f"{PREFIX}dead/shard-1").touch()
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / "other").mkdir()
    with growing(tmp_path / "one") as one, growing(tmp_path / "two") as two:
        assert one.is_dir() and two.is_dir()
        assert set(leftovers(tmp_path)) == {one.name, two.name, "other", f"{PREFIX}file"}
    assert leftovers(tmp_path) == [f"{PREFIX}file", "other"]


def test_a_directory_that_is_taken_away_at_birth_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between making a directory and locking it, another conversion may take it for a leftover."""
    honest = fcntl.flock
    stolen: list[Path] = []

    def flock(descriptor: int, operation: int) -> None:
        if not stolen:
            [path] = tmp_path.iterdir()
            stolen.append(path)
            path.rmdir()
        honest(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with growing(tmp_path / "out") as folder:
        assert folder.is_dir() and folder != stolen[0]


def test_an_out_that_came_into_being_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="has come into being meanwhile"), growing(out) as folder:
        out.mkdir()
        publish(folder, out)
    assert leftovers(tmp_path) == ["out"] and leftovers(out) == []


def test_an_out_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("empty", "file", "link"):
        with pytest.raises(UserError, match=f"{name} exists"):
            refuse_out(tmp_path / name)
    for parent in ("absent", "file"):
        with pytest.raises(UserError, match=f"{parent} is no directory"):
            refuse_out(tmp_path / parent / "out")
    refuse_out(tmp_path / "out")
    (tmp_path / "out.report.json").touch()  # of an earlier try
    refuse_out(tmp_path / "out")
    (tmp_path / "other.report.json").mkdir()
    with pytest.raises(UserError, match=r"other\.report\.json is a directory"):
        refuse_out(tmp_path / "other")
    with pytest.raises(UserError, match="cannot be a name: File name too long"):
        refuse_out(tmp_path / ("x" * 250))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK | os.X_OK)  # a superuser may write anywhere
    with pytest.raises(UserError, match="cannot be written to"):
        refuse_out(tmp_path / "out")


def test_a_disk_without_room_is_refused_with_both_sizes(tmp_path: Path) -> None:
    refuse_full_disk(tmp_path, 1)
    with pytest.raises(UserError, match="needs about 8 EiB|needs about 8.*TiB of disk and .* has .*iB"):
        refuse_full_disk(tmp_path, 2**63)


def make_everything(out: Path) -> None:
    """A small checkpoint in two shards, from the first directory to the last rename."""
    with growing(out) as folder:
        writer = CheckpointWriter(folder, tensors_max=4, shard_bytes_max=100)
        try:
            for name in ("a", "b"):
                writer.add({name: torch.ones(25), f"{name}.odd": torch.ones(3, dtype=torch.uint8)})
            writer.finish()
            write.write_json(folder / "config.json", {})
            publish(folder, out)
        finally:
            writer.abandon()


@pytest.mark.parametrize("call", ["fsync", "fchmod", "mkdir", "rename", "open"])
def test_the_nth_failure_of_the_disk_leaves_nothing(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the 1st, 2nd, 3rd ... call, until the run passes clean."""
    honest: Callable[..., object] = getattr(os, call)
    for number in range(1, 30):
        left = number

        def failing(*arguments: object, **more: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return honest(*arguments, **more)

        out = tmp_path / f"out-{number}"
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                make_everything(out)
            except UserError as error:
                assert "the disk is full" in str(error)
        if left > 0:
            assert read_all(out).keys() == {"a", "a.odd", "b", "b.odd"}
            break
        # The last two may fail after the rename: then it is there, and whole.
        assert not out.exists() or read_all(out).keys() == {"a", "a.odd", "b", "b.odd"}
        assert [name for name in leftovers(tmp_path) if name.startswith(PREFIX)] == []
    else:
        pytest.fail("never passed clean")


def test_a_report_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "out.report.json"
    replace_file(place, b"old")
    replace_file(place, b"new")
    assert place.read_bytes() == b"new"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="the disk is full"):
        replace_file(place, b"newer")
    assert place.read_bytes() == b"new" and leftovers(tmp_path) == ["out.report.json"]


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full"), (errno.EFBIG, "ulimit -f")],
)
def test_a_disk_that_refuses_is_named(number: int, words: str, tmp_path: Path) -> None:
    assert words in write.os_message(OSError(number, os.strerror(number)), tmp_path / "out")
    message = write.os_message(OSError(errno.EROFS, os.strerror(errno.EROFS), "there"), tmp_path / "out")
    assert message.startswith("cannot write to there: Read-only file system")
