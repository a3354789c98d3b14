"""
A checkpoint on its way to disk: complete under its name, or not there at all.

    PARENT/.pellucid-quantize-*   where it grows, beside OUT and so on the same file system; locked by its process
    PARENT/OUT                    by one rename at the end, after all bytes are on the disk

What a killed process leaves has no lock any more, and the next conversion beside it removes it.

Tensors are written as they come, so that a conversion needs the memory of one layer and not of a model.  A safetensors
file begins with a header that names them all: room is left for it, and what it does not need are spaces, which the
format allows at its end.
"""

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from launch.errors import UserError
from launch.sizes import format_bytes

PREFIX = ".pellucid-quantize-"
SHARD_BYTES_MAX = 2 * 2**30
HEADER_BYTES_PER_TENSOR = 192  # name, dtype, shape, offsets: about 130 for the longest of our names
ALIGNMENT_BYTES = 8
NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def refuse_out(out: Path) -> None:
    """Raises UserError if OUT is there already or cannot be made."""
    if os.path.lexists(out):
        raise UserError(f"{out} exists: choose another place with --out, or remove it")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is no directory: make it first, or choose another place with --out")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise UserError(f"{out.parent} cannot be written to: choose another place with --out")
    report = report_place(out)
    try:
        if stat.S_ISDIR(report.lstat().st_mode):
            raise UserError(f"{report} is a directory, and a report may have to be written there: choose another --out")
    except FileNotFoundError:
        pass
    except OSError as error:  # a name that is too long would only be found out by the rename at the end
        raise UserError(f"{out.name} cannot be a name: {error.strerror}: choose another with --out") from error


def report_place(out: Path) -> Path:
    """Where the report lies if the result is below the gate."""
    return out.with_name(f"{out.name}.report.json")


def refuse_full_disk(parent: Path, need_bytes: int) -> None:
    """Raises UserError if `parent` has less room than that."""
    room = shutil.disk_usage(parent).free
    if room < need_bytes:
        raise UserError(
            f"the result needs about {format_bytes(need_bytes)} of disk and {parent} has {format_bytes(room)}: "
            "make room, or choose another place with --out"
        )


@contextmanager
def growing(out: Path) -> Iterator[Path]:
    """A directory beside `out` that becomes `out` through `publish`, or is gone afterwards.  Raises UserError."""
    try:
        remove_leftovers(out.parent)
        while True:
            folder = out.parent / f"{PREFIX}{secrets.token_hex(4)}"
            lock = -1
            try:
                folder.mkdir()
                lock = _locked(folder)
                if lock >= 0:
                    yield folder
                    return
            finally:  # a signal may have come at any moment since the directory was made
                shutil.rmtree(folder, ignore_errors=True)  # not there any more if it was published
                if lock >= 0:
                    os.close(lock)
    except OSError as error:
        raise UserError(os_message(error, out)) from error


def _locked(folder: Path) -> int:
    """The descriptor that holds the lock of a fresh directory; -1: somebody takes it for a leftover at this moment."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return -1
    if _hold(lock) and folder.is_dir():
        return lock
    os.close(lock)
    return -1


def _hold(directory: int) -> bool:
    """Lock it, if nobody else holds it."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_leftovers(parent: Path) -> None:
    """Remove the directories of conversions that were killed; those at work hold their locks."""
    for left in sorted(parent.glob(f"{PREFIX}*")):
        try:
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # gone in this instant, or not ours
        try:
            if _hold(lock):
                shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)


def publish(folder: Path, out: Path) -> None:
    """Give a complete directory its name, after all of it is on the disk.  Raises UserError if the name is taken."""
    _sync_directory(folder)
    if os.path.lexists(out):  # an empty directory would be replaced by the rename
        raise UserError(f"{out} has come into being meanwhile: choose another place with --out")
    folder.rename(out)
    _sync_directory(out.parent)


def write_file(path: Path, content: bytes) -> None:
    """A small file, readable by all, on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        _sync(file)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """The same, as JSON for people."""
    write_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def replace_file(path: Path, content: bytes) -> None:
    """A file under its name whole, or not at all.  Raises UserError."""
    draft = path.with_name(f"{PREFIX}{secrets.token_hex(4)}")
    try:
        try:
            write_file(draft, content)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(os_message(error, path)) from error


def os_message(error: OSError, out: Path) -> str:
    """What to tell the person about a disk that refuses."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = format_bytes(shutil.disk_usage(out.parent).free)
        return f"the disk is full: {free} left under {out.parent}; make room, or choose another place with --out"
    if error.errno == errno.EFBIG:
        return f"a file under {out.parent} may not grow so large (ulimit -f): choose another place with --out"
    place = error.filename or out
    return f"cannot write to {place}: {error.strerror or error}; choose another place with --out"


class CheckpointWriter:
    """The tensors of a checkpoint, as safetensors in one directory.  Raises OSError."""

    def __init__(self, folder: Path, *, tensors_max: int, shard_bytes_max: int = SHARD_BYTES_MAX) -> None:
        """`tensors_max`: about how many will come; more than that only makes more shards."""
        self._folder = folder
        self._header_bytes = _aligned(512 + HEADER_BYTES_PER_TENSOR * tensors_max)
        self._shard_bytes_max = shard_bytes_max
        self._shards: list[_Shard] = []
        self._file_of: dict[str, int] = {}
        self.dtype = ""  # of the first floats that came: `bfloat16`
        self.tensor_bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write them; a set that belongs together stays in one shard, unless it alone is too large for any."""
        size_bytes = sum(map(_size_bytes, tensors.values()))
        shard = self._shards[-1] if self._shards else None
        if shard is None or shard.size_bytes + size_bytes > self._shard_bytes_max or not shard.has_room(tensors):
            shard = self._next_shard()
        for name, tensor in tensors.items():
            assert name not in self._file_of, f"{name} comes twice"
            if not shard.has_room({name: tensor}):
                shard = self._next_shard()
            shard.add(name, tensor)
            if not self.dtype and tensor.dtype in (torch.bfloat16, torch.float16):
                self.dtype = str(tensor.dtype).removeprefix("torch.")
            self._file_of[name] = len(self._shards) - 1
        self.tensor_bytes += size_bytes

    @property
    def size_bytes(self) -> int:
        """Of the weight files."""
        return self.tensor_bytes + len(self._shards) * (8 + self._header_bytes)

    def finish(self) -> None:
        """Close the last shard, give all of them their names, write the index if there is more than one."""
        assert self._shards, "a checkpoint without tensors"
        self._shards[-1].close()
        count = len(self._shards)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        if count == 1:
            names = ["model.safetensors"]
        for shard, name in zip(self._shards, names, strict=True):
            shard.path.rename(self._folder / name)
        if count > 1:
            weight_map = {name: names[number] for name, number in sorted(self._file_of.items())}
            index = {"metadata": {"total_size": self.tensor_bytes}, "weight_map": weight_map}
            write_json(self._folder / "model.safetensors.index.json", index)

    def abandon(self) -> None:
        """Let go of what is open."""
        if self._shards:
            self._shards[-1].abandon()

    def _next_shard(self) -> "_Shard":
        if self._shards:
            self._shards[-1].close()
        self._shards.append(_Shard(self._folder / f"shard-{len(self._shards) + 1}", self._header_bytes))
        return self._shards[-1]


class _Shard:
    """
    One safetensors file under way.

    A reader looks at each tensor where it lies, so each must be aligned to its type.  Those whose size is no multiple
    of eight bytes, mostly a line of JSON, wait until the others are written.
    """

    def __init__(self, path: Path, header_bytes: int) -> None:
        self.path = path
        self.size_bytes = 0
        self._header_bytes = header_bytes
        self._entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # older transformers insist on it
        self._entry_bytes = 64
        self._odd: dict[str, Tensor] = {}
        self._offset = 0
        self._file: BinaryIO = path.open("wb")
        self._file.seek(8 + header_bytes)

    def has_room(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the header can name these too.  An empty shard takes any."""
        more = sum(_entry_bytes(name, tensor) for name, tensor in tensors.items())
        return self.size_bytes == 0 or self._entry_bytes + more <= self._header_bytes

    def add(self, name: str, tensor: Tensor) -> None:
        """Write it, or keep it for the end."""
        self.size_bytes += _size_bytes(tensor)
        self._entry_bytes += _entry_bytes(name, tensor)
        if _size_bytes(tensor) % ALIGNMENT_BYTES:
            self._odd[name] = tensor.detach().cpu().clone()
        else:
            self._write(name, tensor)

    def _write(self, name: str, tensor: Tensor) -> None:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._file.write(data.data)
        end = self._offset + data.nbytes
        self._entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._offset, end],
        }
        self._offset = end

    def close(self) -> None:
        """All of it on the disk."""
        with self._file:
            for name, tensor in sorted(self._odd.items(), key=lambda item: -item[1].itemsize):
                self._write(name, tensor)
            header = json.dumps(self._entries, separators=(",", ":")).encode()
            assert len(header) <= self._header_bytes, "the header has outgrown its room"
            self._file.seek(0)
            self._file.write(self._header_bytes.to_bytes(8, "little") + header.ljust(self._header_bytes))
            _sync(self._file)

    def abandon(self) -> None:
        """Close without writing what is still held back."""
        try:
            self._file.close()
        except OSError:
            pass  # what could not be written was to be removed anyway


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _entry_bytes(name: str, tensor: Tensor) -> int:
    """What naming it in the header takes at most."""
    return len(json.dumps(name)) + 64 + 2 * 20 + 21 * tensor.dim()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _sync(file: BinaryIO) -> None:
    os.fchmod(file.fileno(), 0o644)
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
