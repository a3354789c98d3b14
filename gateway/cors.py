"""
What browsers must be told: who may call, with what, and which headers of an answer they may read.
"""

from collections.abc import Mapping

from gateway import headers

_EXPOSED = ", ".join(header.name for header in headers.TABLE)
_METHODS = "GET, POST, OPTIONS"
_PREFLIGHT_AGE_S = 600


def response_headers(origins: tuple[str, ...], request: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """What the answer to a request from an allowed origin carries."""
    origin = request.get("origin")
    if origin is None or not ("*" in origins or origin in origins):
        return []
    if "*" in origins:
        origin = "*"
    headers = [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", _EXPOSED.encode()),
    ]
    return headers if origin == "*" else [*headers, (b"vary", b"origin")]


def preflight_headers(request: Mapping[str, str]) -> dict[str, str]:
    """The answer to the question before the request.  It needs no API key: browsers send none."""
    wanted = request.get("access-control-request-headers", "")
    return {
        "access-control-allow-methods": _METHODS,
        "access-control-allow-headers": wanted if wanted.isprintable() and wanted else "*",
        "access-control-max-age": str(_PREFLIGHT_AGE_S),
    }
