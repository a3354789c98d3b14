"""
Packed weights in a file: packed once, then mapped by every later start.

    8 bytes  length of the index, little-endian
    index    JSON: version, checksum of all that follows it, and of each array its name, type, shape and place
    arrays   each at a multiple of 64 bytes

The name of the file says what it was made of, so a file is either the right one or not there.  A file that is broken
(a full disk, a flipped bit) is found out by its checksum, and made anew.
"""

import hashlib
import json
import mmap
import os
from pathlib import Path

import numpy as np

from engine.device.native.pack import PACKED_VERSION, Array, Arrays

ALIGNED = 64
FILES_MAX = 4
"""Files that are kept in the directory: those used last."""
_INDEX_BYTES_MAX = 1 << 24
_SUFFIX = ".packed"


class BrokenFile(Exception):
    """The file is not what it should be."""


def packed_path(directory: Path, parts: tuple[str, ...]) -> Path:
    """Where weights made of `parts` are kept."""
    digest = hashlib.blake2b("|".join((str(PACKED_VERSION), *parts)).encode(), digest_size=16)
    return directory / f"{digest.hexdigest()}{_SUFFIX}"


def write_packed(path: Path, arrays: Arrays) -> None:
    """Write a file as a whole or not at all, and remove those that were not used for longest.  Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries, place = [], 0
    checksum = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        entries.append({"name": name, "type": array.dtype.str, "shape": array.shape, "place": place})
        checksum.update(_padded(array))
        place += array.nbytes + -array.nbytes % ALIGNED
    index = json.dumps({"version": PACKED_VERSION, "checksum": checksum.hexdigest(), "arrays": entries}).encode()
    index += b" " * (-(len(index) + 8) % ALIGNED)
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(len(index).to_bytes(8, "little") + index)
            for array in arrays.values():
                file.write(_padded(array))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    _forget_old(path.parent)


def map_packed(path: Path) -> Arrays:
    """The arrays of a file, mapped and read-only.  Raises FileNotFoundError, OSError or BrokenFile."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if not 0 < length <= min(size, _INDEX_BYTES_MAX):
            raise BrokenFile(f"{path.name} has no index")
        try:
            index = json.loads(file.read(length))
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            content = memoryview(memory)[8 + length :]
            whole = np.frombuffer(content, np.uint8)
            if index["version"] != PACKED_VERSION:
                raise BrokenFile(f"{path.name} is of another version")
            if hashlib.blake2b(content, digest_size=16).hexdigest() != index["checksum"]:
                raise BrokenFile(f"{path.name} does not match its checksum")
            arrays = {entry["name"]: _array(whole, entry) for entry in index["arrays"]}
        except (ValueError, KeyError, TypeError) as error:
            raise BrokenFile(f"{path.name} is broken: {error}") from error
    os.utime(path)  # it was used
    return arrays


def _array(whole: Array, entry: dict[str, object]) -> Array:
    kind, shape, place = np.dtype(str(entry["type"])), entry["shape"], entry["place"]
    assert isinstance(shape, list) and isinstance(place, int)
    size = int(np.prod(shape)) * kind.itemsize
    return whole[place : place + size].view(kind).reshape(shape)


def _padded(array: Array) -> bytes:
    return array.tobytes() + bytes(-array.nbytes % ALIGNED)


def _forget_old(directory: Path) -> None:
    files = sorted(directory.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in files[FILES_MAX:]:
        file.unlink(missing_ok=True)
