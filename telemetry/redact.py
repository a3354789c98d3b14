"""
What must never be in a log: prompts, completions, keys.

A value is kept out by its name (`prompt`, `authorization`, ...), by its looks (a bearer token, an `sk-` key, a password
in a URL), or by its kind: an object that is not plain data is named by its type, because its repr may hold a prompt.
"""

import re
from collections.abc import Mapping, MutableMapping
from pathlib import PurePath
from typing import Any  # structlog's processors are typed with it.

MASK = "[redacted]"
SECRET_NAMES = frozenset(
    {
        # What people say to the model, and what it says to them.
        "prompt", "prompts", "messages", "message", "content", "contents", "text", "texts", "completion", "input",
        "inputs", "output", "body", "chunk", "delta", "stop", "suffix", "tools", "arguments", "choices",
        # What lets somebody in.
        "authorization", "proxy_authorization", "api_key", "apikey", "x_api_key", "api_keys", "key", "keys",
        "access_token", "refresh_token", "token", "secret", "password", "cookie", "set_cookie", "headers",
    }
)  # fmt: skip
_SECRET_LOOKS = (
    (re.compile(r"(?i)\b(bearer)\s+[A-Za-z0-9._~+/=-]{4,}"), rf"\1 {MASK}"),
    (re.compile(r"(?i)\b(basic)\s+[A-Za-z0-9+/=]{16,}"), rf"\1 {MASK}"),
    (re.compile(r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{6,}"), MASK),
    (re.compile(r"(?i)\b(api[-_]?key|authorization|password|secret|token)(\s*[=:]\s*)[^\s&,;]+"), rf"\1\2{MASK}"),
    (re.compile(r"://[^/\s:@]*:[^/\s@]*@"), f"://{MASK}@"),
)
_QUOTED = re.compile(r"""(['"])(?:(?!\1).){40,}\1""")
_DEPTH_MAX = 6
_CHARS_MAX = 16_384


def redact(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The structlog processor: the same event, fit to be written down."""
    del logger, method
    for name in list(event):
        if name.startswith("_"):
            continue  # structlog's own.
        value = event[name]
        if _is_secret_name(name):
            event[name] = MASK
        elif name == "exception":
            event[name] = clean_exception(str(value))
        else:
            event[name] = _clean(value, 0)
    return event


def clean_text(text: str) -> str:
    """The text without anything that looks like a key."""
    for look, mask in _SECRET_LOOKS:
        text = look.sub(mask, text)
    return text if len(text) <= _CHARS_MAX else text[:_CHARS_MAX] + "..."


def clean_exception(text: str) -> str:
    """A traceback whose messages keep no long quotation: a quoted value may be somebody's prompt."""
    lines = (line if line.startswith('  File "') else _QUOTED.sub(MASK, line) for line in text.split("\n"))
    return clean_text("\n".join(lines))


def _is_secret_name(name: str) -> bool:
    return name.lower().replace("-", "_") in SECRET_NAMES


def _clean(value: object, depth: int) -> object:
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return clean_text(value)
        case PurePath():
            return clean_text(str(value))
        case BaseException():
            return clean_exception(f"{type(value).__name__}: {value}")
        case bytes() | bytearray() | memoryview():
            return f"<{len(value)} bytes>"
        case _ if depth >= _DEPTH_MAX:
            return f"<{type(value).__name__}>"
        case Mapping():
            return {
                str(name): MASK if _is_secret_name(str(name)) else _clean(inner, depth + 1)
                for name, inner in value.items()
            }
        case list() | tuple() | set() | frozenset():
            return [_clean(inner, depth + 1) for inner in value]
    return f"<{type(value).__name__}>"
