"""
From the bytes of a body to a checked request, or to a 400 that names the field.

Order: bytes -> text (UTF-8) -> JSON (strict: no NaN, no duplicate names, bounded depth, no lone surrogates) -> typed
struct (msgspec) -> rules that types cannot say.  What is accepted is in `gateway.wire`, as types and rules; here is how
that is checked, and the words for what is not.
"""

import asyncio
import difflib
import json
import re
from collections.abc import Callable, Iterator
from typing import Never, TypeVar

import msgspec

from cache.key_records import RULES as RULES_OF_NAMES
from gateway import errors
from gateway.errors import ApiError
from gateway.wire import (
    NEUTRAL,
    RULES,
    TOKEN_ID_KEY,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    Generation,
    Json,
    Texts,
    TokenIdLists,
    TokenIds,
    TokenizeRequest,
)

INLINE_BYTES_MAX = 64 * 1024
"""Larger bodies are looked at on a thread."""
FIELD_NAME_CHARS_MAX = 64  # of an unknown field, in the error message

Result = TypeVar("Result")
T = TypeVar("T", bound=msgspec.Struct)

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"^Object (?P<kind>missing required|contains unknown) field `(?P<name>.*)`$", re.DOTALL)
_PART = re.compile(r"(?P<where>messages\[(?P<message>\d+)\]\.content\[(?P<part>\d+)\])(?:\.\w+)?")
_TOKEN_ID_KEY = re.compile(TOKEN_ID_KEY)
_INTEGER_MAX = 2.0**64  # beyond it nothing is an integer to us


async def of_body(body: bytes, work: Callable[[], Result]) -> Result:
    """What `work` makes of a body, without holding up the others."""
    return work() if len(body) <= INLINE_BYTES_MAX else await asyncio.to_thread(work)


def decode(body: bytes, kind: type[T], *, depth_max: int) -> T:
    """A request of this kind.  Raises ApiError: 400, `param` names the field."""
    raw = parse_json(body, depth_max=depth_max)
    if not isinstance(raw, dict):
        raise errors.invalid("The request body must be a JSON object.")
    raw = _drop_neutral(raw, kind)
    try:
        request = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _about_part(raw, _explain(error, kind)) from None
    _check(request)
    return request


# ---- JSON


def parse_json(body: bytes, *, depth_max: int) -> Json:
    """Strict JSON.  Raises ApiError."""
    try:
        value: Json = json.loads(
            body.decode(), object_pairs_hook=_object, parse_float=_number, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        raise errors.invalid(f"The request body is not valid UTF-8 (byte {error.start}).") from None
    except json.JSONDecodeError as error:
        raise errors.invalid(f"The request body is not valid JSON: {error.msg} at character {error.pos}.") from None
    except RecursionError:
        raise errors.invalid(f"The request body is nested deeper than {depth_max} levels.") from None
    except ValueError:
        raise errors.invalid("The request body holds a number with too many digits.") from None
    if _SURROGATE.search(body) or body.count(b"[") + body.count(b"{") > depth_max:
        _check_tree(value, depth_max)
    return value


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise errors.invalid(f"The name {_shown(name)} appears twice in one object.", _shown(name))
            seen.add(name)
    return value


def _number(text: str) -> int | float:
    """JSON has one kind of number: 1.0 is an integer."""
    value = float(text)
    return int(value) if abs(value) < _INTEGER_MAX and value.is_integer() else value


def _refuse_constant(name: str) -> Never:
    raise errors.invalid(f"{name} is not a JSON number.")


def _shown(name: str) -> str:
    """A client's text, fit for an error message: bounded and encodable."""
    return name[:FIELD_NAME_CHARS_MAX].encode(errors="replace").decode()


def _check_tree(root: Json, depth_max: int) -> None:
    """No lone surrogates, no deep nesting.  Without recursion: the input chooses the depth."""
    pending: list[tuple[str, int, Json]] = [("", 0, root)]
    while pending:
        path, depth, value = pending.pop()
        if isinstance(value, str):
            _check_text(value, path)
        elif isinstance(value, (dict, list)):
            if depth >= depth_max:
                raise errors.invalid(f"The request body is nested deeper than {depth_max} levels.")
            pending.extend((where, depth + 1, child) for where, child in _children(path, value))


def _children(path: str, value: dict[str, Json] | list[Json]) -> Iterator[tuple[str, Json]]:
    if isinstance(value, list):
        for index, child in enumerate(value):
            if isinstance(child, (str, dict, list)):
                yield f"{path}[{index}]", child
        return
    for name, child in value.items():
        where = f"{path}.{_shown(name)}" if path else _shown(name)
        _check_text(name, where)
        yield where, child


def _check_text(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise errors.invalid("A string holds half of a surrogate pair.", path or None) from None


# ---- types


def _drop_neutral(raw: dict[str, Json], kind: type) -> dict[str, Json]:
    """The body without those fields that ask for nothing.  Raises ApiError on what is not supported."""
    unsupported = UNSUPPORTED.get(kind, {})
    kept: dict[str, Json] = {}
    for name, value in raw.items():
        if name not in unsupported:
            kept[name] = value
        elif not any(_same(value, neutral) for neutral in (*NEUTRAL, *unsupported[name])):
            raise errors.unsupported(name)
    return kept


def _same(left: Json, right: Json) -> bool:
    return type(left) is type(right) and left == right  # 0 == False, but only one of them is neutral


def _explain(error: msgspec.ValidationError, kind: type, root: str = "") -> ApiError:
    """msgspec's words as an OpenAI error, about a request or its field `root`."""
    match = _WHERE.match(str(error))
    assert match is not None, "the pattern matches every text"
    what, path = match["what"], (root + (match["path"] or "")).removeprefix(".")
    named = _NAMED.match(what)
    if named is None:
        path = path.removesuffix("[...]")  # the value of a mapping; its key is not in the message
        rule = RULES_OF_NAMES.get(path.rpartition(".")[2].partition("[")[0])
        if rule is not None and "matching regex" in what:
            what = f"expected {rule}"
        return errors.invalid(f"Invalid value for '{path}': {_lower(what)}.", path or None)
    where = f"{path}.{named['name']}" if path else named["name"]
    if named["kind"] == "missing required":
        return errors.missing(where)
    return errors.unknown(_shown(where), None if path else _nearest(named["name"], kind))


def _about_part(raw: dict[str, Json], error: ApiError) -> ApiError:
    """Of a part of a message that is no text, that it is none, whichever of its fields came first."""
    found = _PART.fullmatch(error.param or "")
    messages = raw.get("messages")
    if found is None or not isinstance(messages, list):
        return error
    message = messages[int(found["message"])]
    parts = message.get("content") if isinstance(message, dict) else None
    part = parts[int(found["part"])] if isinstance(parts, list) else None
    kind = part.get("type", "text") if isinstance(part, dict) else "text"
    if kind == "text":
        return error
    shown = repr(_shown(kind)) if isinstance(kind, str) else "this type"
    return errors.invalid(f"Content parts must be text; {shown} is not supported.", f"{found['where']}.type")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:].replace("`", "")


def _nearest(name: str, kind: type) -> str | None:
    known = [field.name for field in msgspec.structs.fields(kind)] + list(UNSUPPORTED.get(kind, {}))
    found = difflib.get_close_matches(name[:FIELD_NAME_CHARS_MAX], known, n=1, cutoff=0.6)
    return found[0] if found else None


# ---- rules


def _check(request: msgspec.Struct, where: str = "") -> None:
    for kind in type(request).__mro__:
        for rule in RULES.get(kind, ()):
            if not rule.kept(request):
                raise errors.invalid(rule.message, where + rule.field)
    if isinstance(request, ChatRequest | TokenizeRequest):
        for index, message in enumerate(request.messages or ()):
            _check(message, f"messages[{index}].")


def token_biases(request: Generation, vocab_size: int) -> dict[int, float]:
    """`logit_bias` with its keys as token ids of this vocabulary.  Raises ApiError."""
    biases: dict[int, float] = {}
    for key, bias in (request.logit_bias or {}).items():
        where = f"logit_bias.{_shown(key)}"
        if not _TOKEN_ID_KEY.fullmatch(key):
            raise errors.invalid("The keys of 'logit_bias' must be token ids.", where)
        if int(key) >= vocab_size:
            raise errors.invalid(f"Token id {int(key)} is outside the vocabulary of {vocab_size}.", where)
        biases[int(key)] = bias
    return biases


def check_token_ids(tokens: list[int], vocab_size: int, where: str) -> None:
    """Ids of this vocabulary.  Raises ApiError."""
    if tokens and max(tokens) >= vocab_size:
        index = next(i for i, token in enumerate(tokens) if token >= vocab_size)
        raise errors.invalid(
            f"Token id {tokens[index]} is outside the vocabulary of {vocab_size}.", f"{where}[{index}]"
        )


def split_prompts(prompt: str | list[object]) -> list[str | list[int]]:
    """The prompts of a completion, each as text or as ids.  Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    first = prompt[0] if prompt else ""
    try:
        if isinstance(first, str):
            return [*msgspec.convert(prompt, Texts)]
        if isinstance(first, list):
            return [*msgspec.convert(prompt, TokenIdLists)]
        return [msgspec.convert(prompt, TokenIds)]
    except msgspec.ValidationError as error:
        raise _explain(error, CompletionRequest, "prompt") from None
