"""
From the bytes of a body to a checked request, or to a 400 that names the field.

Order: bytes -> text (UTF-8) -> JSON (strict: no NaN, no duplicate names, bounded depth, no lone surrogates) -> typed
struct (msgspec) -> rules that types cannot say.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Never, TypeVar

import msgspec

from gateway import errors
from gateway.errors import ApiError
from gateway.wire import (
    NEUTRAL,
    PROMPTS_MAX,
    TOKENS_MAX_MAX,
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMMON,
    UNSUPPORTED_COMPLETION,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    Json,
    TokenizeRequest,
)

STOP_CHARS_MAX = 1024
FIELD_NAME_CHARS_MAX = 64  # of an unknown field, in the error message

T = TypeVar("T", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"^Object (?P<kind>missing required|contains unknown) field `(?P<name>.*)`$", re.DOTALL)
_UNSUPPORTED: dict[type, Mapping[str, tuple[Json, ...]]] = {
    ChatRequest: UNSUPPORTED_CHAT,
    CompletionRequest: UNSUPPORTED_COMPLETION,
    TokenizeRequest: {},
    DetokenizeRequest: {},
}


def decode(body: bytes, kind: type[T], *, depth_max: int) -> T:
    """A request of this kind.  Raises ApiError: 400, `param` names the field."""
    raw = parse_json(body, depth_max=depth_max)
    if not isinstance(raw, dict):
        raise errors.invalid("The request body must be a JSON object.")
    raw = _drop_neutral(raw, kind)
    try:
        request = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _explain(error, kind) from None
    _check(request)
    return request


# ---- JSON


def parse_json(body: bytes, *, depth_max: int) -> Json:
    """Strict JSON.  Raises ApiError."""
    try:
        value: Json = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant)
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
    unsupported = _UNSUPPORTED[kind]
    kept: dict[str, Json] = {}
    for name, value in raw.items():
        if name not in unsupported:
            kept[name] = value
        elif not any(_same(value, neutral) for neutral in (*NEUTRAL, *unsupported[name])):
            raise errors.unsupported(name)
    return kept


def _same(left: Json, right: Json) -> bool:
    return type(left) is type(right) and left == right  # 0 == False, but only one of them is neutral


def _explain(error: msgspec.ValidationError, kind: type) -> ApiError:
    """msgspec's words as an OpenAI error."""
    match = _WHERE.match(str(error))
    assert match is not None, "the pattern matches every text"
    what, path = match["what"], (match["path"] or "").removeprefix(".")
    named = _NAMED.match(what)
    if named is None:
        path = path.removesuffix("[...]")  # the value of a mapping; its key is not in the message
        return errors.invalid(f"Invalid value for '{path}': {_lower(what)}.", path or None)
    where = f"{path}.{named['name']}" if path else named["name"]
    if named["kind"] == "missing required":
        return errors.missing(where)
    return errors.unknown(_shown(where), None if path else _nearest(named["name"], kind))


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:].replace("`", "")


def _nearest(name: str, kind: type) -> str | None:
    known = [field.name for field in msgspec.structs.fields(kind)] + list(_UNSUPPORTED[kind])
    found = difflib.get_close_matches(name[:FIELD_NAME_CHARS_MAX], known, n=1, cutoff=0.6)
    return found[0] if found else None


# ---- rules


def _check(request: ChatRequest | CompletionRequest | TokenizeRequest | DetokenizeRequest) -> None:
    match request:
        case ChatRequest():
            check_messages(request.messages)
            _check_generation(request)
            if request.top_logprobs is not None and not request.logprobs:
                raise errors.invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
        case CompletionRequest():
            _check_generation(request)
            if request.echo and request.logprobs is not None:
                raise errors.unsupported("echo", "together with 'logprobs' it needs logprobs of the prompt")
        case TokenizeRequest():
            check_messages(request.messages or [])
        case DetokenizeRequest():
            pass


def check_messages(messages: list[ChatMessage]) -> None:
    """What a role may and must carry."""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if isinstance(message.content, list):
            _check_parts(message.content, where)
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            raise errors.invalid(f"A {message.role} message needs content.", f"{where}.content")
        if message.tool_calls and message.role != "assistant":
            raise errors.invalid("Only assistant messages carry tool calls.", f"{where}.tool_calls")
        if message.tool_call_id is not None and message.role != "tool":
            raise errors.invalid("Only tool messages carry a tool call id.", f"{where}.tool_call_id")


def _check_parts(parts: list[dict[str, object]], where: str) -> None:
    if not parts:
        raise errors.invalid("A list of content parts must not be empty.", f"{where}.content")
    for index, part in enumerate(parts):
        here = f"{where}.content[{index}]"
        kind = part.get("type")
        if kind is None:
            raise errors.missing(f"{here}.type")
        if kind != "text":
            shown = _shown(kind) if isinstance(kind, str) else "this type"
            raise errors.invalid(f"Content parts must be text; {shown!r} is not supported.", f"{here}.type")
        if not isinstance(part.get("text"), str):
            raise errors.invalid("A text part needs a string.", f"{here}.text")
        for name in part:
            if name not in ("type", "text"):
                raise errors.unknown(f"{here}.{_shown(name)}", None)


def _check_generation(request: Generation) -> None:
    if request.stream_options is not None and not request.stream:
        raise errors.invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    for index, stop in enumerate(stops):
        where = "stop" if isinstance(request.stop, str) else f"stop[{index}]"
        if not 0 < len(stop) <= STOP_CHARS_MAX:
            raise errors.invalid(f"A stop string has 1 to {STOP_CHARS_MAX} characters.", where)


def token_biases(request: Generation, vocab_size: int) -> dict[int, float]:
    """`logit_bias` with its keys as token ids of this vocabulary.  Raises ApiError."""
    biases: dict[int, float] = {}
    for key, bias in (request.logit_bias or {}).items():
        where = f"logit_bias.{_shown(key)}"
        if not key.isascii() or not key.isdigit() or len(key) > 10:
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
    if not prompt:
        raise errors.invalid("The prompt is empty.", "prompt")
    if _is_id(prompt[0]):
        return [_ids(prompt, "prompt")]
    if len(prompt) > PROMPTS_MAX:
        raise errors.invalid(f"At most {PROMPTS_MAX} prompts are allowed in one request.", "prompt")
    texts: list[str | list[int]] = []
    for index, one in enumerate(prompt):
        if isinstance(one, str) and isinstance(prompt[0], str):
            texts.append(one)
        elif isinstance(one, list) and isinstance(prompt[0], list):
            texts.append(_ids(one, f"prompt[{index}]"))
        else:
            message = "A prompt is a string, a list of strings, a list of token ids or a list of lists of token ids."
            raise errors.invalid(message, f"prompt[{index}]")
    return texts


def _ids(values: list[object], where: str) -> list[int]:
    for index, value in enumerate(values):
        if not _is_id(value):
            raise errors.invalid(f"A token id is an integer of 0 to {TOKENS_MAX_MAX}.", f"{where}[{index}]")
    return [value for value in values if isinstance(value, int)]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= TOKENS_MAX_MAX


assert UNSUPPORTED_COMMON.keys() <= UNSUPPORTED_CHAT.keys()
