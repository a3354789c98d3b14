"""
The headers of answers: what they mean, who gets them, and those that every answer has.

`gateway.cors` tells browsers that they may read them, and `gateway.openapi` what is in them.
"""

from typing import Literal

import msgspec

Kind = Literal["every", "limited", "generation", "error"]


class Header(msgspec.Struct, frozen=True):
    """One header."""

    name: str
    meaning: str
    kind: Kind
    """On every answer; where something may be limited; where something was generated; as the table of errors says."""
    pattern: str = ""


TABLE = (
    Header("x-request-id", "Names the request: the client's own id if it is fit and free, else a new one.", "every"),
    Header("x-pellucid-overhead-ms", "The gateway's own time before the engine had the request.", "generation"),
    Header("server-timing", "The phases up to the engine's acceptance.", "generation"),
    Header("x-pellucid-degraded", "`limits`: the server that keeps them is away.", "limited"),
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
