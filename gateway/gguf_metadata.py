"""
The key-value section of a GGUF file, read without touching its tensors.

The `gguf` package reads it too, through one numpy view per string: seconds for a vocabulary of today, which would be
the gateway's whole start.  Layout: GGUF specification of ggml, versions 2 and 3, little-endian.
"""

import struct
from pathlib import Path
from typing import BinaryIO

Value = bool | int | float | str | list["Value"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_KEYS_MAX = 65_536
_ITEMS_MAX = 16_777_216
_STRING_BYTES_MAX = 64 * 1024 * 1024


class GgufError(Exception):
    """The file is no GGUF that can be read here."""


def read_metadata(path: Path) -> dict[str, Value]:
    """All metadata of a file.  Raises GgufError and OSError."""
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise GgufError("it does not begin with GGUF")
        version = _scalar(file, "<I")
        if version not in _VERSIONS:
            raise GgufError(f"version {version} is not supported")
        _scalar(file, "<Q")  # How many tensors there are.
        keys = _bounded(_scalar(file, "<Q"), _KEYS_MAX, "keys")
        return dict(_pair(file) for _ in range(keys))


def _pair(file: BinaryIO) -> tuple[str, Value]:
    key = _string(file)
    return key, _value(file, int(_scalar(file, "<I")), nested=False)


def _value(file: BinaryIO, kind: int, *, nested: bool) -> Value:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY and not nested:
        inner = int(_scalar(file, "<I"))
        count = _bounded(_scalar(file, "<Q"), _ITEMS_MAX, "items of an array")
        if inner in _SCALARS:
            return _scalars(file, _SCALARS[inner], count)
        return [_value(file, inner, nested=True) for _ in range(count)]
    if kind not in _SCALARS:
        raise GgufError(f"value type {kind} is not known")
    return _scalar(file, _SCALARS[kind])


def _scalars(file: BinaryIO, layout: str, count: int) -> list[Value]:
    data = _exactly(file, struct.calcsize(layout) * count)
    return list(struct.unpack(f"<{count}{layout[1]}", data))


def _scalar(file: BinaryIO, layout: str) -> bool | int | float:
    value: bool | int | float = struct.unpack(layout, _exactly(file, struct.calcsize(layout)))[0]
    return value


def _string(file: BinaryIO) -> str:
    length = _bounded(_scalar(file, "<Q"), _STRING_BYTES_MAX, "bytes of a string")
    try:
        return _exactly(file, length).decode()
    except UnicodeDecodeError:
        raise GgufError("a string is not UTF-8") from None


def _bounded(count: float, most: int, what: str) -> int:
    if count > most:
        raise GgufError(f"{count} {what} are more than {most}")
    return int(count)


def _exactly(file: BinaryIO, length: int) -> bytes:
    data = file.read(length)
    if len(data) != length:
        raise GgufError("it ends too early")
    return data
