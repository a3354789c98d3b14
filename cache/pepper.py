"""
The pepper: the secret that every digest of an API key is made with.  It is never on the server that has the digests.

It is in the variable PELLUCID_PEPPER, else in a file of mode 0600, which is made when the first key is.  So where there
is no pepper, no key was ever made, and the gateway can tell that while its server is away.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from cache.errors import Misconfigured, NotAllowed
from cache.key_records import PEPPER_BYTES_MIN
from cache.private_file import make_private, read_private

VARIABLE = "PELLUCID_PEPPER"
FILE = "pepper"
"""In the data directory, unless --pepper-file names another."""
UNSET = bytes(32)
"""For those who only count keys, or have none to compare with."""
_WHAT = "the pepper of the API keys"


def read_pepper(file: Path | None, environ: Mapping[str, str]) -> bytes | None:
    """The pepper; None where there is none yet.  Raises Misconfigured, without a word of it."""
    given = environ.get(VARIABLE, "")
    if given:
        return _checked(given.encode(errors="surrogateescape"), VARIABLE)
    if file is None:
        return None
    pepper = read_private(file, _WHAT)
    return None if pepper is None else _checked(pepper, str(file))


def make_pepper(file: Path, environ: Mapping[str, str]) -> bytes:
    """The pepper that is there, or a new one, on disk before it is used.  Raises Misconfigured."""
    found = read_pepper(file, environ)
    if found is not None:
        return found
    make_private(file, _WHAT)
    found = read_pepper(file, environ)
    if found is None:
        raise Misconfigured(f"{file}: the pepper of the API keys went away")
    return found


async def pepper_for_digest(file: Path, environ: Mapping[str, str], count: Callable[[], Awaitable[int]]) -> bytes:
    """
    The pepper that is there, or a new one, which is made with the first key and with no other.

    `count` says how many keys were ever made.  Raises NotAllowed, Misconfigured, and what `count` raises.
    """
    pepper = await asyncio.to_thread(read_pepper, file, environ)
    if pepper is not None:
        return pepper
    if await count():
        raise NotAllowed(
            f"there are API keys already, and the pepper that they were made with is not here: copy it to {file} from "
            f"where they were made, or set {VARIABLE}"
        )
    return await asyncio.to_thread(make_pepper, file, environ)


def _checked(pepper: bytes, place: str) -> bytes:
    if len(pepper) < PEPPER_BYTES_MIN:
        raise Misconfigured(f"{place}: the pepper of the API keys has at least {PEPPER_BYTES_MIN} bytes")
    return pepper
