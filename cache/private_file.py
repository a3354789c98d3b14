"""
Files that hold a secret: for their owner alone, and small.
"""

import os
import secrets
import stat
from pathlib import Path

from cache.errors import Misconfigured

BYTES_MAX = 4096
_MADE_BYTES = 32


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


def make_private(file: Path, what: str) -> None:
    """Write a new secret there, whole and on disk, unless somebody was faster.  Raises Misconfigured."""
    made = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(secrets.token_hex(_MADE_BYTES).encode() + b"\n")
            opened.flush()
            os.fsync(opened.fileno())
        try:
            os.link(made, file)
        except FileExistsError:
            pass
        finally:
            made.unlink()
    except OSError as error:
        raise Misconfigured(f"{file}: cannot write {what}: {error.strerror}") from error
