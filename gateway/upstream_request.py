"""
A request for an upstream: what we must know of it, and what is sent on.

Checked is what this side needs: JSON within bounds, the fields that say how to read the answer and how much to reserve.
All else is the upstream's to judge, and its bytes are passed on as they came.

Tokens are estimated, since the tokenizer is elsewhere: one for each 4 bytes of text in messages, tools and prompts, 4
for each message, 1024 for each image, sound or file; token ids are counted.  In the end the usage counts.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from gateway import errors
from gateway.config import GatewayOptions
from gateway.decode import parse_json
from gateway.wire import INT64_MAX, TOKENS_MAX_MAX, Json
from telemetry.live import Attribute

BYTES_PER_TOKEN = 4
MESSAGE_TOKENS = 4
MEDIUM_TOKENS = 1024
CHOICES_MAX = 128
"""More than so many are not reserved for; whether they are made is the upstream's to say."""
AFFINITY_CHARS_MAX = 2048
_MEDIA = ("image_url", "input_audio", "audio_url", "video_url", "file")
_NO_TEXT = ("role", "id", "type", "object")
_SHOWN = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "ignore_eos",
)  # fmt: skip
"""For the request span."""

Kind = Literal["chat", "completion"]
PATHS: dict[Kind, str] = {"chat": "/chat/completions", "completion": "/completions"}
"""All that an upstream is ever asked for, but its models."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class _Named(msgspec.Struct):
    model: object = None


_named = msgspec.json.Decoder(_Named)


def model_in(body: bytes) -> str:
    """The model that a body names; empty where it names none, or is no JSON."""
    try:
        model = _named.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return model if isinstance(model, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that an upstream may be sent."""

    kind: Kind
    stream: bool
    include_usage: bool
    """Whether the client wants to see the usage of a stream."""
    prompts: int
    choices: int
    """Of all prompts together."""
    tokens_max: int | None
    prompt_tokens: int
    """Estimated."""
    affinity: bytes
    """Requests with the same one go to the same upstream, where the load allows it."""
    parameters: dict[str, Attribute]
    fields: dict[str, msgspec.Raw]
    """The body, its values as they came."""

    def body(self, model: str) -> bytes:
        """What is sent: the client's fields, the upstream's name of the model, and the wish for a usage."""
        changes: dict[str, msgspec.Raw] = {"model": msgspec.Raw(_encode(model))}
        if self.stream:
            given = self.fields.get("stream_options", msgspec.Raw(b"null"))
            options = _fields.decode(given) if bytes(given) != b"null" else {}
            changes["stream_options"] = msgspec.Raw(_encode(options | {"include_usage": msgspec.Raw(b"true")}))
        return _encode(self.fields | changes)


def read(body: bytes, kind: Kind, options: GatewayOptions) -> Asked:
    """A request for an upstream.  Raises ApiError: 400, `param` names the field."""
    raw = parse_json(body, depth_max=options.depth_max)
    if not isinstance(raw, dict):
        raise errors.invalid("The request body must be a JSON object.")
    stream = _flag(raw, "stream")
    if _flag(raw, "include_metrics"):
        raise errors.unsupported("include_metrics", "an upstream does not tell what it did")
    wishes = raw.get("stream_options")
    if stream and not isinstance(wishes, dict | None):
        raise errors.invalid("'stream_options' must be an object.", "stream_options")
    include_usage = stream and isinstance(wishes, dict) and _flag(wishes, "include_usage", "stream_options.")
    texts, tokens = _chat(raw, options.messages_max) if kind == "chat" else _completion(raw)
    text_bytes, media = measure([texts, raw.get("tools"), raw.get("functions")])
    prompts = _prompts(texts) if kind == "completion" else 1
    return Asked(
        kind=kind,
        stream=stream,
        include_usage=include_usage,
        prompts=prompts,
        choices=min(CHOICES_MAX, max(1, _count(raw.get("n")) or 1) * prompts),
        tokens_max=_count(raw.get("max_completion_tokens")) or _count(raw.get("max_tokens")),
        prompt_tokens=tokens + tokens_of(text_bytes) + media * MEDIUM_TOKENS,
        affinity=_affinity(raw, texts),
        parameters=_parameters(raw),
        fields=_fields.decode(body),
    )


def measure(root: object) -> tuple[int, int]:
    """Bytes of the texts in a JSON value, and how many images, sounds and files there are: their bytes do not count."""
    text_bytes = media = 0
    pending = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            text_bytes += len(value.encode())
        elif isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, dict):
            if value.get("type") in _MEDIA:
                media += 1  # Its bytes are no text.
            else:
                pending.extend(part for name, part in value.items() if name not in _NO_TEXT)
    return text_bytes, media


def tokens_of(text_bytes: int) -> int:
    """About how many tokens a text is; never too few to be none."""
    return -(-text_bytes // BYTES_PER_TOKEN)


def _chat(raw: dict[str, Json], messages_max: int) -> tuple[list[Json], int]:
    messages = raw.get("messages")
    if messages is None:
        raise errors.missing("messages")
    if not isinstance(messages, list) or not messages:
        raise errors.invalid("'messages' must be a list with at least one message.", "messages")
    if len(messages) > messages_max:
        raise errors.invalid(f"At most {messages_max} messages are allowed.", "messages")
    return messages, MESSAGE_TOKENS * len(messages)


def _completion(raw: dict[str, Json]) -> tuple[list[Json], int]:
    prompt = raw.get("prompt")
    if prompt is None:
        raise errors.missing("prompt")
    if not isinstance(prompt, str | list):
        raise errors.invalid("'prompt' must be a string or a list.", "prompt")
    parts: list[Json] = [prompt] if isinstance(prompt, str) else prompt
    ids = sum(isinstance(part, int) for part in parts)
    return parts, ids + sum(len(part) for part in parts if isinstance(part, list))


def _prompts(parts: list[Json]) -> int:
    """How many prompts there are: a list of token ids is one."""
    return 1 if not parts or isinstance(parts[0], int) else len(parts)


def _flag(raw: dict[str, Json], name: str, where: str = "") -> bool:
    value = raw.get(name)
    if not isinstance(value, bool | None):
        raise errors.invalid(f"'{where}{name}' must be true or false.", where + name)
    return bool(value)


def _count(value: Json) -> int | None:
    """A number that can be reserved for; of others the upstream says what is wrong with them."""
    good = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= TOKENS_MAX_MAX
    return value if good and isinstance(value, int) else None


def _affinity(raw: dict[str, Json], texts: list[Json]) -> bytes:
    named = raw.get("prompt_cache_key") or raw.get("user")
    opening = named if isinstance(named, str) else "".join(_opening(texts[:1]))
    return hashlib.blake2b(opening[:AFFINITY_CHARS_MAX].encode(), digest_size=8).digest()


def _opening(value: Json) -> Iterator[str]:
    """The first strings of a message or a prompt, as many as it takes."""
    left = AFFINITY_CHARS_MAX
    pending: list[Json] = [value]
    while pending and left > 0:
        value = pending.pop()
        if isinstance(value, str):
            yield value[:left]
            left -= len(value)
        elif isinstance(value, list):
            pending.extend(reversed(value[:left]))
        elif isinstance(value, dict):
            pending.extend(reversed(list(value.values())))
        elif isinstance(value, int):
            yield f"{value},"
            left -= 1


def _parameters(raw: dict[str, Json]) -> dict[str, Attribute]:
    """What was asked for: numbers only, no text of the client's."""
    named = {name: raw.get(name) for name in _SHOWN}
    named["max_tokens"] = raw.get("max_completion_tokens") or raw.get("max_tokens")
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, int | float) and -INT64_MAX <= value <= INT64_MAX
    }
