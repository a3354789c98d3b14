"""
The OpenAI JSON of answers: whole ones, and streams of server-sent events.

A writer knows one request's constants (id, time, model) and turns what became certain into ready bytes.  In a stream
the same id and time are in every chunk and the role comes once, because clients concatenate.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.api import TokenLogprobs
from gateway.text import Entry, Piece
from gateway.tokens import ModelText
from gateway.wire import Json

DONE = b"data: [DONE]\n\n"
LOGPROB_MIN = -9999.0  # -inf is not JSON

_encode = msgspec.json.Encoder().encode

JsonObject = dict[str, Json]


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """What a request cost."""

    prompt: int
    cached: int
    output: int

    def json(self) -> JsonObject:
        """The usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "total_tokens": self.prompt + self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Choice:
    """One choice of a whole answer, as it grows."""

    __slots__ = ("entries", "finish_reason", "text")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.entries: list[Entry] = []
        self.finish_reason = ""

    def add(self, piece: Piece) -> None:
        """More text and its tokens."""
        if piece.text:
            self.text.append(piece.text)
        self.entries += piece.entries


class Writer(Protocol):
    """Chat and completions differ in the shape of everything."""

    def opening(self, index: int) -> bytes:
        """The first event of a choice; may be nothing."""

    def delta(self, index: int, piece: Piece) -> bytes:
        """More of a choice."""

    def ending(self, index: int, finish_reason: str) -> bytes:
        """The last event of a choice."""

    def usage(self, tokens: Tokens) -> bytes:
        """The event with the bill."""

    def whole(self, choices: Sequence[Choice], tokens: Tokens) -> bytes:
        """The answer that is not a stream."""


class _Envelope:
    """What chat and completions share: the constants around `choices`."""

    def __init__(self, kind: str, *, request_id: str, created: int, model: str, fingerprint: str) -> None:
        self._head: JsonObject = {
            "id": request_id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._start = _encode(self._head)[:-1] + b',"choices":['

    def chunk(self, choice: JsonObject) -> bytes:
        return b"data: " + self._start + _encode(choice) + b"]}\n\n"

    def usage(self, tokens: Tokens) -> bytes:
        return b"data: " + self._start + b'],"usage":' + _encode(tokens.json()) + b"}\n\n"

    def whole(self, choices: list[Json], tokens: Tokens) -> bytes:
        return _encode({**self._head, "choices": choices, "usage": tokens.json()})


class ChatWriter:
    """Implements `Writer` for /v1/chat/completions."""

    def __init__(
        self,
        text: ModelText,
        *,
        request_id: str,
        created: int,
        model: str,
        fingerprint: str,
        stream: bool,
        logprobs: bool,
    ) -> None:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        self._envelope = _Envelope(kind, request_id=request_id, created=created, model=model, fingerprint=fingerprint)
        self._text = text
        self._logprobs = logprobs

    def opening(self, index: int) -> bytes:
        """The role, once."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def delta(self, index: int, piece: Piece) -> bytes:
        """Text, with the tokens that became certain with it."""
        if not piece.text and not (self._logprobs and piece.entries):
            return b""
        logprobs = self._content(piece.entries) if self._logprobs and piece.entries else None
        return self._chunk(index, {"content": piece.text}, logprobs, None)

    def ending(self, index: int, finish_reason: str) -> bytes:
        """An empty delta and the reason."""
        return self._chunk(index, {}, None, finish_reason)

    def usage(self, tokens: Tokens) -> bytes:
        """No choices, only the bill."""
        return self._envelope.usage(tokens)

    def whole(self, choices: Sequence[Choice], tokens: Tokens) -> bytes:
        """A chat.completion object."""
        shown: list[Json] = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return self._envelope.whole(shown, tokens)

    def _choice(self, index: int, choice: Choice) -> JsonObject:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": self._content(choice.entries) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _chunk(self, index: int, delta: JsonObject, logprobs: JsonObject | None, finish_reason: str | None) -> bytes:
        return self._envelope.chunk(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        )

    def _content(self, entries: Sequence[Entry]) -> JsonObject:
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: Entry) -> Json:
        logprobs = entry.logprobs or TokenLogprobs(LOGPROB_MIN)
        top: list[Json] = [self._token(token, logprob) for token, logprob in logprobs.top]
        return {**self._token(entry.token, logprobs.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> JsonObject:
        piece = self._text.piece(token)
        return {"token": self._text.token_text(token), "logprob": finite(logprob), "bytes": list(piece)}


class CompletionWriter:
    """Implements `Writer` for /v1/completions.  `echoes` is what each choice's text begins with."""

    def __init__(
        self,
        text: ModelText,
        *,
        request_id: str,
        created: int,
        model: str,
        fingerprint: str,
        logprobs: bool,
        echoes: Sequence[str],
    ) -> None:
        self._envelope = _Envelope(
            "text_completion", request_id=request_id, created=created, model=model, fingerprint=fingerprint
        )
        self._text = text
        self._logprobs = logprobs
        self._echoes = echoes

    def opening(self, index: int) -> bytes:
        """The prompt, where it is to be repeated."""
        return self._chunk(index, self._echoes[index], None, None) if self._echoes[index] else b""

    def delta(self, index: int, piece: Piece) -> bytes:
        """Text, with the tokens that became certain with it."""
        if not piece.text and not (self._logprobs and piece.entries):
            return b""
        return self._chunk(index, piece.text, self._lists(piece.entries), None)

    def ending(self, index: int, finish_reason: str) -> bytes:
        """No more text, and the reason."""
        return self._chunk(index, "", None, finish_reason)

    def usage(self, tokens: Tokens) -> bytes:
        """No choices, only the bill."""
        return self._envelope.usage(tokens)

    def whole(self, choices: Sequence[Choice], tokens: Tokens) -> bytes:
        """A text_completion object."""
        shown: list[Json] = []
        for index, choice in enumerate(choices):
            text = self._echoes[index] + "".join(choice.text)
            shown.append(self._choice(index, text, self._lists(choice.entries), choice.finish_reason))
        return self._envelope.whole(shown, tokens)

    def _chunk(self, index: int, text: str, logprobs: JsonObject | None, finish_reason: str | None) -> bytes:
        return self._envelope.chunk(self._choice(index, text, logprobs, finish_reason))

    def _choice(self, index: int, text: str, logprobs: JsonObject | None, finish_reason: str | None) -> JsonObject:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _lists(self, entries: Sequence[Entry]) -> JsonObject | None:
        """The legacy format: parallel lists, and alternatives by text (of two that look alike, the likelier one)."""
        if not self._logprobs:
            return None
        known = [entry.logprobs or TokenLogprobs(LOGPROB_MIN) for entry in entries]
        return {
            "tokens": [self._text.token_text(entry.token) for entry in entries],
            "token_logprobs": [finite(one.logprob) for one in known],
            "top_logprobs": [
                {self._text.token_text(token): finite(logprob) for token, logprob in reversed(one.top)} for one in known
            ],
            "text_offset": [entry.offset for entry in entries],
        }


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(logprob, LOGPROB_MIN) if logprob == logprob else LOGPROB_MIN
