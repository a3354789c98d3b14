"""
What runs here, read from /proc.
"""

import json
from pathlib import Path


def children_of(pid: int) -> dict[int, list[str]]:
    """Process ids and command lines."""
    found: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int(_stat(int(entry.name))[1])
            words = [word.decode() for word in (entry / "cmdline").read_bytes().split(b"\0")]
        except OSError:
            continue  # It has just ended.
        if parent == pid:
            found[int(entry.name)] = words
    return found


def ranks_of(leader: int) -> list[int]:
    """Process ids of an engine and of those of its other ranks that have been started, by rank."""
    found = {}
    for pid, words in children_of(leader).items():
        if "--options" in words:  # Between fork and exec it has its parent's words, rank 0.
            found[json.loads(words[words.index("--options") + 1])["rank"]] = pid
    return [leader, *(found[rank] for rank in sorted(found) if rank)]


def is_there(pid: int) -> bool:
    """Whether it runs, or is stopped; what has ended may wait for somebody to ask how."""
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


def ignores(pid: int, number: int) -> bool:
    """Whether it has asked to be left alone by this signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    [ignored] = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")]
    return bool(int(ignored, 16) >> (number - 1) & 1)


def _stat(pid: int) -> list[str]:
    """State, parent and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
