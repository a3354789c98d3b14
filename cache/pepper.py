"""
The pepper: the secret that every digest of an API key is made with.  It is never on the server that has the digests.

It is in the variable PELLUCID_PEPPER, else in a file of mode 0600, which is made when the first key is.  So where there
is no pepper, no key was ever made, and the gateway can tell that while its server is away.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from cache.errors import Misconfigured
from cache.key_records import PEPPER_BYTES_MIN
from cache.private_file import read_private

VARIABLE = "PELLUCID_PEPPER"
FILE = "pepper"
"""In the data directory, unless --pepper-file names another."""
UNSET = bytes(32)
"""For those who only count keys, or have none to compare with."""
_MADE_BYTES = 32


def read_pepper(file: Path | None, environ: Mapping[str, str]) -> bytes | None:
    """The pepper; None where there is none yet.  Raises Misconfigured, without a word of it."""
    given = environ.get(VARIABLE, "")
    if given:
        return _checked(given.encode(errors="surrogateescape"), VARIABLE)
    if file is None:
        return None
    pepper = read_private(file, "the pepper of the API keys")
    return None if pepper is None else _checked(pepper, str(file))


def make_pepper(file: Path, environ: Mapping[str, str]) -> bytes:
    """The pepper that is there, or a new one, on disk before it is used.  Raises Misconfigured."""
    found = read_pepper(file, environ)
    if found is not None:
        return found
    made = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(secrets.token_hex(_MADE_BYTES).encode() + b"\n")
            opened.flush()
            os.fsync(opened.fileno())
        try:
            os.link(made, file)  # whole, and only if nobody else was faster
        except FileExistsError:
            pass
        finally:
            made.unlink()
    except OSError as error:
        raise Misconfigured(f"{file}: cannot write the pepper of the API keys: {error.strerror}") from error
    found = read_pepper(file, environ)
    if found is None:
        raise Misconfigured(f"{file}: the pepper of the API keys went away")
    return found


def _checked(pepper: bytes, place: str) -> bytes:
    if len(pepper) < PEPPER_BYTES_MIN:
        raise Misconfigured(f"{place}: the pepper of the API keys has at least {PEPPER_BYTES_MIN} bytes")
    return pepper
