"""
The headers of answers: what they mean, who gets them, and those that every answer has.

`gateway.cors` tells browsers that they may read them, and `gateway.openapi` what is in them.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

Kind = Literal["every", "key", "limited", "generation", "error"]


class Header(msgspec.Struct, frozen=True):
    """One header."""

    name: str
    meaning: str
    kind: Kind
    """On all answers; where a key is asked for; where limits hold; on what is generated; as the errors' table says."""
    pattern: str = ""


TABLE = (
    Header("x-request-id", "Names the request: the client's own id if it is fit and free, else a new one.", "every"),
    Header("server-timing", "Where the time went until the answer began: the states of the request so far.", "every"),
    Header("x-pellucid-overhead-ms", "The gateway's own time before the engine had the request.", "generation"),
    Header("x-pellucid-degraded", "`limits`: the server that keeps them is away.", "key"),
    Header("x-ratelimit-limit-requests", "Of the level that is tightest, a minute.", "limited", r"^\d+$"),
    Header("x-ratelimit-remaining-requests", "What is left.", "limited", r"^\d+$"),
    Header("x-ratelimit-reset-requests", "Until all is there again: `12ms`, `6m0s`.", "limited"),
    Header("x-ratelimit-limit-tokens", "Of the level that is tightest, a minute.", "limited", r"^\d+$"),
    Header("x-ratelimit-remaining-tokens", "What is left.", "limited", r"^\d+$"),
    Header("x-ratelimit-reset-tokens", "Until all is there again: `12ms`, `6m0s`.", "limited"),
    Header("retry-after", "Seconds until trying again may help.", "error", r"^\d+$"),
    Header("retry-after-ms", "The same in milliseconds.", "error", r"^\d+$"),
    Header("x-should-retry", "`false`: trying again does not help.", "error"),
    Header("www-authenticate", "How to present a key.", "error"),
    Header("allow", "The methods that the URL knows.", "error"),
)

SECURITY = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
"""On every answer that does not say otherwise: nothing here is a page, or to be kept by anybody in between."""
_SECURITY = [(name.encode(), value.encode()) for name, value in SECURITY.items()]


def missing(given: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Those of `SECURITY` that an answer with these headers does not have yet; ASGI's names are in lower case."""
    names = {name for name, _ in given}
    return [(name, value) for name, value in _SECURITY if name not in names]
