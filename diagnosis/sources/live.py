"""
A running system: it explains itself.
"""

import urllib.error
import urllib.request
from typing import TypeVar
from urllib.parse import quote

import msgspec

from diagnosis.doctor import Report
from diagnosis.why import Why
from launch.errors import UserError

TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 64 * 1024 * 1024
_Answer = TypeVar("_Answer")


class _Complaint(msgspec.Struct, frozen=True):
    message: str = ""


class _Refused(msgspec.Struct, frozen=True):
    error: _Complaint = _Complaint()


def fetch(url: str, key: str = "", *, server: str = "`pellucid serve`") -> bytes:
    """What is there, where `server` should run.  Raises UserError."""
    if not (key.isascii() and key.isprintable()):
        raise UserError("what PELLUCID_API_KEY holds is no API key: it has characters that no key has")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url!r} is no URL like http://127.0.0.1:8000")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
            data: bytes = answer.read(ANSWER_BYTES_MAX)
            return data
    except urllib.error.HTTPError as error:
        with error:
            raise UserError(f"{url}: {_complaint(error)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"nothing answers at {url} ({reason}): is {server} running there?") from None


def _complaint(error: urllib.error.HTTPError) -> str:
    if error.code in (401, 403):
        return "an API key is needed, in PELLUCID_API_KEY"
    try:
        message = msgspec.json.decode(error.read(65_536), type=_Refused).error.message
    except (msgspec.MsgspecError, OSError):
        message = ""
    return f"{error.code}, {message or error.reason}"


def live_why(request_id: str, url: str, key: str) -> Why:
    """As the system itself says.  Raises UserError."""
    return _decoded(fetch(f"{url.rstrip('/')}/debug/why/{quote(request_id, safe='')}", key), Why, url)


def live_report(url: str, seconds: float, key: str) -> Report:
    """As the system itself says.  Raises UserError."""
    return _decoded(fetch(f"{url.rstrip('/')}/debug/doctor?seconds={seconds:g}", key), Report, url)


def _decoded(data: bytes, kind: type[_Answer], url: str) -> _Answer:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise UserError(f"{url} does not answer as Pellucid does: {error}") from None
