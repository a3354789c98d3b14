"""
Packed weights in a file: packed once, then read by every later start.

    8 bytes   length of the index, little-endian
    16 bytes  checksum of all the rest
    index     JSON: version, and of each array its name, type, shape and place
    arrays    each at a multiple of 64 bytes behind the checksum

The name of the file says what it was made of, so a file is either the right one or not there.  A file that is broken
(a full disk, a flipped bit) is found out by its checksum, and made anew.
"""

import contextlib
import hashlib
import json
import os
import stat
import time
from pathlib import Path

import numpy as np

from engine.device.native.memory import ALIGNED, Array, Arrays, aligned
from engine.device.native.pack import PACKED_VERSION

MODELS_MAX = 4
"""Models whose files are kept in the directory: those used last; each rank of a model has a file of its own."""
_LENGTH_BYTES, _DIGEST_BYTES = 8, 16
_HEAD_BYTES = _LENGTH_BYTES + _DIGEST_BYTES
_SUFFIX, _DRAFT = ".packed", ".draft"
_PIECE_BYTES = 1 << 22
_DRAFT_S_MAX = 3600  # a draft that is older belongs to nobody who still writes it


class BrokenFile(Exception):
    """The file is not what it should be."""


def packed_path(directory: Path, parts: tuple[str, ...]) -> Path:
    """Where weights made of `parts` are kept."""
    digest = hashlib.blake2b("|".join((str(PACKED_VERSION), *parts)).encode(), digest_size=16)
    return directory / f"{digest.hexdigest()}{_SUFFIX}"


def write_packed(path: Path, arrays: Arrays, *, ranks: int = 1) -> None:
    """
    Write a file as a whole or not at all, and remove those that were not used for longest.  Raises OSError.

    `ranks`: how many files a model like this one has.  Nobody waits for the disk: what a power failure leaves of a file
    does not match its checksum.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    entries, place = [], 0
    for name, array in arrays.items():
        entries.append({"name": name, "type": array.dtype.str, "shape": array.shape, "place": place})
        place += array.nbytes + -array.nbytes % ALIGNED
    index = json.dumps({"version": PACKED_VERSION, "arrays": entries}).encode()
    index += b" " * (-len(index) % ALIGNED)
    length = len(index).to_bytes(_LENGTH_BYTES, "little")
    checksum = hashlib.blake2b(length + index, digest_size=_DIGEST_BYTES)
    draft = path.with_suffix(f".{os.getpid()}{_DRAFT}")
    draft.unlink(missing_ok=True)  # whatever it is, nobody else's: to open a pipe for writing would wait for a reader
    try:
        with draft.open("xb") as file:
            file.write(bytes(_HEAD_BYTES) + index)
            for array in arrays.values():
                piece = _padded(array)
                checksum.update(piece)
                file.write(piece)
            file.seek(0)
            file.write(length + checksum.digest())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    _forget_old(path.parent, MODELS_MAX * ranks)


def read_packed(path: Path) -> Arrays:
    """The arrays of a file, read-only, in memory of `aligned`.  Raises FileNotFoundError, OSError or BrokenFile."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:  # a pipe would wait
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise BrokenFile(f"{path.name} is no regular file")
        head, size = file.read(_HEAD_BYTES), state.st_size - _HEAD_BYTES
        if size <= 0 or len(head) < _HEAD_BYTES:
            raise BrokenFile(f"{path.name} is cut short")
        content = aligned(size)
        checksum = hashlib.blake2b(head[:_LENGTH_BYTES], digest_size=_DIGEST_BYTES)
        for start in range(0, size, _PIECE_BYTES):
            piece = content[start : start + _PIECE_BYTES].data
            checksum.update(piece[: file.readinto(piece)])
    if checksum.digest() != head[_LENGTH_BYTES:]:
        raise BrokenFile(f"{path.name} does not match its checksum")
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    index = json.loads(bytes(content[:length]))
    if index["version"] != PACKED_VERSION:
        raise BrokenFile(f"{path.name} is of another version")
    content.flags.writeable = False
    arrays = {entry["name"]: _array(content[length:], entry) for entry in index["arrays"]}
    with contextlib.suppress(OSError):  # a directory that others keep for us
        os.utime(path)  # it was used
    return arrays


def _array(whole: Array, entry: dict[str, object]) -> Array:
    kind, shape, place = np.dtype(str(entry["type"])), entry["shape"], entry["place"]
    assert isinstance(shape, list) and isinstance(place, int)
    size = int(np.prod(shape)) * kind.itemsize
    return whole[place : place + size].view(kind).reshape(shape)


def _padded(array: Array) -> bytes:
    return array.tobytes() + bytes(-array.nbytes % ALIGNED)


def _forget_old(directory: Path, files_max: int) -> None:
    files = sorted(directory.glob(f"*{_SUFFIX}"), key=_used_s, reverse=True)
    for file in files[files_max:]:
        file.unlink(missing_ok=True)
    for draft in directory.glob(f"*{_DRAFT}"):  # of a process that was killed
        if time.time() - _used_s(draft) > _DRAFT_S_MAX:
            draft.unlink(missing_ok=True)


def _used_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has just removed it
        return 0.0
