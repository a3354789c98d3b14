"""
The files of the live page, as they are sent: what a browser may keep, and what it may do with them.

They are read once.  Nothing else can be asked for: a name is one of those that were there.
"""

import hashlib
from importlib import resources
from typing import NamedTuple

INDEX = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What a page of ours may do: nothing but to load its own files, and to ask its own server."""


class File(NamedTuple):
    """One file."""

    body: bytes
    headers: dict[str, str]


def load() -> dict[str, File]:
    """All of them, by name."""
    folder = resources.files("dashboards").joinpath("page")
    named = [(one.name, one.read_bytes()) for one in folder.iterdir() if one.name.rpartition(".")[2] in _TYPES]
    return {name: _file(name, body) for name, body in named}


def _file(name: str, body: bytes) -> File:
    headers = {
        "content-type": _TYPES[name.rpartition(".")[2]],
        "content-security-policy": POLICY,
        "cache-control": "no-cache",  # kept, and asked for each time: after an upgrade all files are of one version
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return File(body, headers)
