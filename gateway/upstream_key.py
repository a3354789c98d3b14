"""
The key that an upstream asks for: from the environment or a file, never from arguments, which everybody can read.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from cache.errors import Misconfigured
from gateway.config import UpstreamOptions

KEY_BYTES_MAX = 4096


def read_key(options: UpstreamOptions, environ: Mapping[str, str]) -> str:
    """The key of an upstream; empty where it needs none.  Raises Misconfigured, without a word of it."""
    where = f"upstream {options.name!r}: "
    if options.api_key_env:
        where += f"api_key_env: {options.api_key_env}"
        key = environ.get(options.api_key_env, "")
    elif options.api_key_file:
        where += f"api_key_file: {options.api_key_file}"
        key = _read_file(Path(options.api_key_file).expanduser(), where)
    else:
        return ""
    key = key.strip()
    if not key:
        raise Misconfigured(f"{where}: there is no key in it")
    if not (key.isascii() and key.isprintable()) or " " in key or len(key) > KEY_BYTES_MAX:
        raise Misconfigured(f"{where}: that is no key: one line of ASCII without spaces is expected")
    return key


def _read_file(file: Path, where: str) -> str:
    try:
        with file.open("rb") as opened:
            if os.fstat(opened.fileno()).st_mode & 0o007:  # a group may: secrets that Kubernetes mounts have one
                raise Misconfigured(f"{where}: everybody on this machine may read it: chmod 600")
            return opened.read(KEY_BYTES_MAX + 2).decode(errors="replace")
    except OSError as error:
        raise Misconfigured(f"{where}: cannot read it: {error.strerror}") from error
