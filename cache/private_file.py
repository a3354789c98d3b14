"""
Files that hold a secret: for their owner alone, and small.
"""

import os
import stat
from pathlib import Path

from cache.errors import Misconfigured

BYTES_MAX = 4096


def read_private(file: Path, what: str) -> bytes | None:
    """What is in it, without white space around it; None: no such file.  Raises Misconfigured, without a word of it."""
    try:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            if mode & 0o077:
                raise Misconfigured(f"{file}: others may read {what} (mode {mode:04o}): chmod 600")
            return opened.read(BYTES_MAX).strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Misconfigured(f"{file}: cannot read {what}: {error.strerror}") from error
