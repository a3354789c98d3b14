"""
Sizes of memory: as a person writes them, and how much of it this machine has.
"""

import os
import re
from pathlib import Path

import msgspec

_UNITS = {
    "": 1, "b": 1,
    "k": 2**10, "kib": 2**10, "kb": 10**3,
    "m": 2**20, "mib": 2**20, "mb": 10**6,
    "g": 2**30, "gib": 2**30, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*")
KV_BYTES_MIN = 1024 * 1024
FLIGHT_BYTES_MIN = 1024 * 1024


class KvMemory(msgspec.Struct, frozen=True):
    """How much memory the KV pool gets: so many bytes, or a share of what is available.  One of them is zero."""

    size_bytes: int = 0
    share: float = 0.0

    def resolve_bytes(self, available_bytes: int) -> int:
        """Bytes, where `available_bytes` can be had."""
        return self.size_bytes or int(self.share * available_bytes)


def parse_bytes(text: str) -> int:
    """`512MiB` -> 536870912.  A bare K, M, G or T is binary.  Raises ValueError."""
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else "?"
    if match is None or unit not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 2GiB")
    size_bytes = int(float(match[1]) * _UNITS[unit])
    if not 0 < size_bytes < 2**50:
        raise ValueError(f"{text!r} is out of range")
    return size_bytes


def parse_flight_memory(text: str) -> int:
    """A size, or 0 for none.  Raises ValueError."""
    if text.strip() == "0":
        return 0
    size_bytes = parse_bytes(text)
    if size_bytes < FLIGHT_BYTES_MIN:
        raise ValueError(f"{text!r} is less than {format_bytes(FLIGHT_BYTES_MIN)}; 0 records nothing")
    return size_bytes


def parse_kv_memory(text: str) -> KvMemory:
    """A size, or a share such as `25%`.  Raises ValueError."""
    match = _SIZE.fullmatch(text)
    if match and match[2] == "%":
        percent = float(match[1])
        if not 0 < percent <= 100:
            raise ValueError(f"{text!r} is not in 0% .. 100%")
        return KvMemory(share=percent / 100)
    try:
        size_bytes = parse_bytes(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a size such as 512MiB, 2GiB or 25%") from None
    if size_bytes < KV_BYTES_MIN:
        raise ValueError(f"{text!r} is less than {format_bytes(KV_BYTES_MIN)}")
    return KvMemory(size_bytes=size_bytes)


def format_bytes(size_bytes: int) -> str:
    """`1.5 GiB`, for people."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def available_bytes(root: Path = Path("/")) -> int | None:
    """
    Memory that this process may still take, the limit of its control group included.  None: there is no way to tell.

    `root` is where /proc and /sys are found; tests put their own there.
    """
    found = [_meminfo_bytes(root), _cgroup_bytes(root)]
    known = [value for value in found if value is not None]
    if known:
        return min(known)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # macOS: all there is, a generous bound
    except (ValueError, OSError):
        return None


def _meminfo_bytes(root: Path) -> int | None:
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _cgroup_bytes(root: Path) -> int | None:
    """What the container's limit leaves: version 2, then version 1.  Page cache that can go counts as free."""
    for limit, usage, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        folder = root / "sys/fs/cgroup"
        try:
            text = (folder / limit).read_text().strip()
            if text == "max" or int(text) >= 2**60:
                continue
            match = re.search(r"^(?:total_)?inactive_file (\d+)", (folder / stat).read_text(), re.MULTILINE)
            used = int((folder / usage).read_text()) - (int(match[1]) if match else 0)
        except (OSError, ValueError):
            continue
        return max(0, int(text) - used)
    return None
