"""
What the failure of an upstream means: for the client, for the next attempt, and for the upstream's reputation.

| the upstream | the client gets | another is asked | counts against it |
|---|---|---|---|
| cannot be connected to | 503 no_healthy_engine | yes | yes |
| is not connected to in time | 504 engine_timeout | yes | yes |
| 400, 422 | 400, its message | no | no |
| 413 | 413 request_too_large | no | no |
| 429 | 429 rate_limit_exceeded, its retry-after | yes | no: it rests that long |
| 502 | 502 bad_gateway | yes | yes |
| 503 | 503 no_healthy_engine, its retry-after | yes | yes |
| 408, 504 | 504 engine_timeout | no | yes |
| 401 | 502 bad_gateway | yes | yes |
| 500, 403, 404, redirects, all else | 502 bad_gateway | yes | where another one then answers |
| closes without an answer | 502 bad_gateway | once: a request may kill | yes, unless the connection was an old one |
| says what is no answer, or half of one | 502 bad_gateway | no | yes |
| is silent, or takes too long | 504 engine_timeout | no | where it was silent |

An answer such as a 500 may be the request's fault: llama.cpp says it to an image that it cannot read.  If that
counted, one client could have an upstream left alone that serves all others well.  So it counts once another upstream
has been able to do what this one was not.

Of its words only the message and the parameter of a 400 are shown, cut and without what looks like a key or is one; its
code, where it is one of ours.  What an operator should know is in `reason`, which repeats nothing that the upstream has
said.
"""

import os
from typing import Literal

import aiohttp
import msgspec

from gateway import errors
from gateway.errors import ApiError
from telemetry.redact import MASK, clean_text

MESSAGE_CHARS_MAX = 1000
WORD_CHARS_MAX = 200
RETRY_AFTER_MS = 1000
RETRY_AFTER_MS_MAX = 3_600_000
_CODES = frozenset(row.code for row in errors.TABLE if row.status == 400)
"""Those that the document names: of others the message says enough."""
_OVER_CONTEXT = ("maximum context length", "exceed_context_size", "context_length_exceeded")


Verdict = Literal["fault", "suspect", "sound", "none"]
"""What a failed attempt says of the upstream: that it is not well, perhaps, that it is, nothing."""


class Failure(Exception):
    """One attempt has come to nothing."""

    def __init__(
        self,
        reason: str,
        error: ApiError,
        *,
        elsewhere: bool = False,
        verdict: Verdict = "fault",
        rest_ms: int = 0,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        """For operators."""
        self.error = error
        """For the client."""
        self.elsewhere = elsewhere
        """Whether another upstream may be sent the same request: this one has not begun, or says that it gave up."""
        self.verdict: Verdict = verdict
        self.rest_ms = rest_ms
        """How long it wants to be left alone."""


def bad_gateway() -> ApiError:
    """It failed, in whichever way: that is no concern of the client's."""
    message = "The server that answers for this model failed."
    return ApiError(502, "bad_gateway", message, kind="server_error", outcome="upstream_failed")


def of_connecting(error: aiohttp.ClientError, *, connect_timeout_s: float) -> Failure:
    """Nobody listens there, or in time, or the name is unknown, or the certificate is no good."""
    match error:
        case aiohttp.ConnectionTimeoutError():
            late = errors.engine_timeout(
                f"The server of this model did not take a connection within {connect_timeout_s:g} s."
            )
            return Failure(f"took no connection within {connect_timeout_s:g} s", late, elsewhere=True)
        case aiohttp.ClientSSLError():
            why = "its certificate, or its TLS, is not accepted"
        case OSError(errno=int(number)) if number > 0:
            why = os.strerror(number)
        case _:
            why = type(error).__name__
    return Failure(f"cannot be connected to: {why}", errors.no_engine(), elsewhere=True)


def hung_up(*, reused: bool, elsewhere: bool) -> Failure:
    """It closed the connection without a word.  One that was open before may just have been closed for its age."""
    verdict: Verdict = "none" if reused else "fault"
    return Failure("closed the connection without an answer", bad_gateway(), elsewhere=elsewhere, verdict=verdict)


def broken(reason: str) -> Failure:
    """What came is no answer, or not the whole of one."""
    return Failure(reason, bad_gateway())


def resting(rest_ms: int) -> ApiError:
    """Its limits are reached."""
    message = f"The server of this model is at its rate limit; try again in {rest_ms / 1000:g} s."
    headers = _after(rest_ms)
    return ApiError(429, "rate_limit_exceeded", message, kind="requests", headers=headers, outcome="rate_limited")


def of_status(status: int, body: bytes, *, rest_ms: int | None, secrets: tuple[str, ...]) -> Failure:
    """
    An answer that is not 200.

    Args:
        status: as it came.
        body: as much of it as was read.
        rest_ms: what its headers say of trying again.
        secrets: texts that must not reach the client.
    """
    reason = f"answers {status}"
    rest_ms = min(RETRY_AFTER_MS_MAX, max(1, RETRY_AFTER_MS if rest_ms is None else rest_ms))
    match status:
        case 400 | 422:
            return Failure(reason, _relayed(body, secrets), verdict="sound")
        case 413:
            error = ApiError(413, "request_too_large", "The request is larger than the server of this model takes.")
            return Failure(reason, error, verdict="sound")
        case 429:
            return Failure(reason, resting(rest_ms), elsewhere=True, verdict="sound", rest_ms=rest_ms)
        case 503:
            unavailable = errors.no_engine()
            unavailable.headers |= _after(rest_ms)
            return Failure(reason, unavailable, elsewhere=True)
        case 408 | 504:
            return Failure(reason, errors.engine_timeout("The server of this model took too long."))
        case 401:
            return Failure("answers 401: is its API key right?", bad_gateway(), elsewhere=True)
        case 502:
            return Failure(reason, bad_gateway(), elsewhere=True)
        case 403:
            reason = "answers 403: is its API key right?"
        case 404:
            reason = "answers 404: does its url end as it should, in /v1, and does it know the model?"
        case _ if 300 <= status < 400:
            reason = f"answers {status}, a redirect: those are not followed"
    return Failure(reason, bad_gateway(), elsewhere=True, verdict="suspect")


def of_error(error: bytes, *, secrets: tuple[str, ...]) -> Failure:
    """An error object in place of an answer, or in the middle of one; its code may be that of a status."""
    words = _words(error)
    status = words.code if isinstance(words.code, int) and 400 <= words.code <= 599 else 500
    failure = of_status(status, b'{"error":' + error + b"}", rest_ms=None, secrets=secrets)
    failure.elsewhere = False  # It had begun.
    return failure


def error_in(body: bytes) -> bytes:
    """The error object of a body, as it came; empty: there is none."""
    try:
        error = bytes(msgspec.json.decode(body, type=_Body).error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return b""
    return b"" if error == b"null" else error


def retry_after_ms(headers: dict[str, str]) -> int | None:
    """What `retry-after-ms` or `retry-after` say, where they say it in numbers."""
    for name, scale in (("retry-after-ms", 1), ("retry-after", 1000)):
        try:
            value = float(headers[name]) * scale
        except (KeyError, ValueError):
            continue
        if 0 <= value <= RETRY_AFTER_MS_MAX:
            return int(value)
    return None


class _Words(msgspec.Struct, frozen=True):
    message: object = None
    type: object = None
    code: object = None
    param: object = None


class _Body(msgspec.Struct, frozen=True):
    error: msgspec.Raw = msgspec.Raw(b"null")


def _words(raw: bytes) -> _Words:
    try:
        return msgspec.json.decode(raw, type=_Words)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Words()


def _relayed(body: bytes, secrets: tuple[str, ...]) -> ApiError:
    """A 400 of the upstream as ours: `{"error": {...}}`, or the older form of vLLM and SGLang without that."""
    words = _words(error_in(body) or body)
    message = _clean(words.message, secrets, MESSAGE_CHARS_MAX) or "The server of this model refused the request."
    code = words.code if isinstance(words.code, str) and words.code in _CODES else "invalid_value"
    if any(sign in f"{words.message} {words.type} {words.code}" for sign in _OVER_CONTEXT):
        code = "context_length_exceeded"
    param = _clean(words.param, secrets, WORD_CHARS_MAX) or None
    return ApiError(400, code, message, param=param, outcome="refused")


def _clean(value: object, secrets: tuple[str, ...], chars_max: int) -> str:
    if not isinstance(value, str):
        return ""
    for secret in secrets:
        value = value.replace(secret, MASK)
    return clean_text(value)[:chars_max]


def _after(rest_ms: int) -> dict[str, str]:
    return {"retry-after": str(-(-rest_ms // 1000)), "retry-after-ms": str(rest_ms)}
