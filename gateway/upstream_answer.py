"""
An upstream's answer on its way to the client: its events and its whole bodies, with our names in them.

Replaced are `id` (the request's, as everywhere) and `model` (as the client knows it); a usage that only we asked for is
taken out.  An event of a stream with neither choices nor a usage is none of OpenAI's, such as a ping, and is left out;
choices that are null are an empty list, which clients go through.  All else passes byte for byte.  What is no JSON
object, or no UTF-8, does not pass.
"""

from typing import Annotated

import msgspec

from gateway.stream import Tokens, event
from gateway.upstream_request import measure, tokens_of

EVENT_BYTES_MAX = 1024 * 1024
WHOLE_BYTES_MAX = 32 * 1024 * 1024
"""Of an answer that is no stream; it is kept until it is complete."""

Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class Garbage(Exception):
    """Not what an OpenAI server says."""


class Refusal(Exception):
    """The answer is an error object, under whichever status it came."""

    def __init__(self, error: bytes) -> None:
        super().__init__("an error object")
        self.error = error


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: Count
    completion_tokens: Count = 0
    prompt_tokens_details: _Details | None = None


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[dict[str, object]] | None)
_usage = msgspec.json.Decoder(_Usage)
_encode = msgspec.json.Encoder().encode
_NULL = msgspec.Raw(b"null")


class Relayed:
    """What is known of an answer from what has passed so far.  Without an upstream all of it stays empty."""

    def __init__(self) -> None:
        self.upstream = ""
        """Who was sent the request last; empty: nobody."""
        self.said: Tokens | None = None
        """The usage, as the upstream says it."""
        self.first_token_ns = 0
        self.first_token_states: dict[str, int] = {}
        self.gap_max_ns = 0
        self.cut_short = False
        """Whether a choice ended because its tokens were spent."""
        self._pieces = 0
        self._text_bytes = 0
        self._last_ns = 0

    @property
    def gap_states(self) -> dict[str, int]:
        """Where the longest gap went: nobody knows what the upstream did."""
        return {"upstream": self.gap_max_ns} if self.gap_max_ns else {}

    @property
    def usage(self) -> Tokens | None:
        """What to believe of it: not that there was no output, once some has passed."""
        said = self.said
        return None if said is not None and not said.output and (self._pieces or self._text_bytes) else said

    @property
    def output_tokens(self) -> int:
        """As the usage says; without one about as many as have passed: a piece is one token, or some."""
        if self.usage is not None:
            return self.usage.output
        return max(self._pieces, tokens_of(self._text_bytes))

    @property
    def estimated(self) -> bool:
        """Whether the upstream never said how many tokens there were."""
        return bool(self.upstream) and self.usage is None

    def passed(self, text_bytes: int, now_ns: int) -> None:
        """A piece of an output."""
        if self.first_token_ns:
            self.gap_max_ns = max(self.gap_max_ns, now_ns - self._last_ns)
        else:
            self.first_token_ns = now_ns
        self._last_ns = now_ns
        self._pieces += 1
        self._text_bytes += text_bytes

    def counted(self, text_bytes: int) -> None:
        """A whole output, of which nobody here saw the beginning."""
        self._text_bytes += text_bytes


class Translator:
    """One request's answer."""

    def __init__(
        self, relayed: Relayed, *, request_id: str, model: str, include_usage: bool, choices: int = 1, prompts: int = 1
    ) -> None:
        """`choices` and `prompts`: how many were asked for."""
        self._relayed = relayed
        self._names = {"id": msgspec.Raw(_encode(request_id)), "model": msgspec.Raw(_encode(model))}
        self._include_usage = include_usage
        self._choices_asked = choices
        self._prompts = prompts
        self._bills: Tokens | None = None  # of the choices that have ended, where each has one of its own

    def event(self, data: bytes, now_ns: int) -> bytes:
        """An event of a stream as the client gets it; it may get nothing.  Raises Garbage, Refusal."""
        fields = _object(data)
        choices = self._choices(fields)
        counted = self._count(fields)
        if not counted and "choices" not in fields:
            return b""
        if counted and not choices and self._choices_asked > 1:
            self._add_up()
        if not self._include_usage:
            fields.pop("usage", None)
            if counted and not choices:
                return b""
        for choice in choices:
            text_bytes, _ = measure([choice.get("delta"), choice.get("text")])
            if text_bytes:
                self._relayed.passed(text_bytes, now_ns)
        return event(_encode(fields | self._names))

    def whole(self, body: bytes) -> bytes:
        """A whole answer as the client gets it.  Raises Garbage, Refusal."""
        fields = _object(body)
        choices = self._choices(fields)
        if not choices:
            raise Garbage("no choices")
        for choice in choices:
            text_bytes, _ = measure([choice.get("message"), choice.get("text")])
            self._relayed.counted(text_bytes)
        self._count(fields)
        return _encode(fields | self._names)

    def _choices(self, fields: dict[str, msgspec.Raw]) -> list[dict[str, object]]:
        if bytes(fields.get("error", _NULL)) != b"null":
            raise Refusal(bytes(fields["error"]))
        if bytes(fields.get("object", _NULL)) == b'"error"':
            raise Refusal(_encode(fields))  # the older form of vLLM and SGLang, without `error` around it
        try:
            choices = _list.decode(fields.get("choices", _NULL))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise Garbage("choices that are none") from None
        if choices is None:
            if "choices" in fields:
                fields["choices"] = msgspec.Raw(b"[]")
            return []
        for choice in choices:
            self._relayed.cut_short |= choice.get("finish_reason") == "length"
        return choices

    def _count(self, fields: dict[str, msgspec.Raw]) -> bool:
        """Whether there is a usage; one that makes no sense is none."""
        try:
            usage = _usage.decode(fields.get("usage", _NULL))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
        self._relayed.said = Tokens(
            prompt=usage.prompt_tokens, cached=min(cached or 0, usage.prompt_tokens), output=usage.completion_tokens
        )
        return True

    def _add_up(self) -> None:
        """A usage at the end of a stream may be of one choice only: llama.cpp sends as many as there are choices."""
        usage, so_far = self._relayed.said, self._bills
        assert usage is not None
        if so_far is not None:
            prompt = so_far.prompt + usage.prompt if self._prompts > 1 else usage.prompt  # else they all have the same
            cached = so_far.cached + usage.cached if self._prompts > 1 else usage.cached
            usage = Tokens(prompt=prompt, cached=cached, output=so_far.output + usage.output)
        self._bills = self._relayed.said = usage


def _object(data: bytes) -> dict[str, msgspec.Raw]:
    try:
        data.decode()  # What is passed on as it came is not looked at by the decoder below.
        return _fields.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Garbage("no JSON object") from None
