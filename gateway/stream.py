"""
The OpenAI JSON of answers: whole ones, and streams of server-sent events.

A writer knows one request's constants (id, time, model) and turns what became certain into ready bytes.  In a stream
the same id and time are in every chunk and the role comes once, because clients concatenate.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET

from engine.api import TokenLogprobs
from gateway.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChosenLogprob,
    Completion,
    CompletionChunk,
    FinishReason,
    Metrics,
    PromptDetails,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    Usage,
)
from gateway.text import Entry, Piece
from gateway.tokens import ModelText

DONE = b"data: [DONE]\n\n"
LOGPROB_MIN = -9999.0  # -inf is not JSON

_encode = msgspec.json.Encoder().encode


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """What a request cost."""

    prompt: int
    cached: int
    output: int

    def usage(self) -> Usage:
        """As the client sees it."""
        return Usage(self.prompt, self.output, self.prompt + self.output, PromptDetails(self.cached))


class Choice:
    """One choice of a whole answer, as it grows."""

    __slots__ = ("entries", "finish_reason", "text")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.entries: list[Entry] = []
        self.finish_reason: FinishReason = "stop"

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

    def ending(self, index: int, finish_reason: FinishReason) -> bytes:
        """The last event of a choice."""

    def usage(self, tokens: Tokens, metrics: Metrics = UNSET) -> bytes:
        """The event with the bill, and with the metrics where those are asked for."""

    def whole(self, choices: Sequence[Choice], tokens: Tokens, metrics: Metrics = UNSET) -> bytes:
        """The answer that is not a stream."""


class _Chunks:
    """
    The chunks of one stream: what they have in common is encoded once.

    `empty` has neither choices nor usage, so that its JSON ends where the first choice would begin.
    """

    def __init__(self, empty: ChatChunk | CompletionChunk) -> None:
        self._empty = empty
        self._start = b"data: " + _encode(empty).removesuffix(b"]}")

    def chunk(self, choice: ChatChunkChoice | TextChoice) -> bytes:
        return self._start + _encode(choice) + b"]}\n\n"

    def usage(self, tokens: Tokens, metrics: Metrics = UNSET) -> bytes:
        return event(_encode(msgspec.structs.replace(self._empty, usage=tokens.usage(), metrics=metrics)))


class ChatWriter:
    """Implements `Writer` for /v1/chat/completions."""

    def __init__(
        self, text: ModelText, *, request_id: str, created: int, model: str, fingerprint: str, logprobs: bool
    ) -> None:
        self._head = ChatChunk(id=request_id, created=created, model=model, system_fingerprint=fingerprint, choices=[])
        self._chunks = _Chunks(self._head)
        self._text = text
        self._logprobs = logprobs

    def opening(self, index: int) -> bytes:
        """The role, once."""
        return self._chunk(index, ChatDelta("assistant", ""))

    def delta(self, index: int, piece: Piece) -> bytes:
        """Text, with the tokens that became certain with it."""
        if not piece.text and not (self._logprobs and piece.entries):
            return b""
        logprobs = self._content(piece.entries) if self._logprobs and piece.entries else None
        return self._chunk(index, ChatDelta(content=piece.text), logprobs)

    def ending(self, index: int, finish_reason: FinishReason) -> bytes:
        """An empty delta and the reason."""
        return self._chunk(index, ChatDelta(), None, finish_reason)

    def usage(self, tokens: Tokens, metrics: Metrics = UNSET) -> bytes:
        """No choices, only the bill."""
        return self._chunks.usage(tokens, metrics)

    def whole(self, choices: Sequence[Choice], tokens: Tokens, metrics: Metrics = UNSET) -> bytes:
        """A chat.completion object."""
        head = self._head
        return _encode(
            ChatCompletion(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
                usage=tokens.usage(),
                metrics=metrics,
            )
        )

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        message = AssistantMessage(content="".join(choice.text))
        logprobs = self._content(choice.entries) if self._logprobs else None
        return ChatChoice(index, message, logprobs, choice.finish_reason)

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        finish_reason: FinishReason | None = None,
    ) -> bytes:
        return self._chunks.chunk(ChatChunkChoice(index, delta, logprobs, finish_reason))

    def _content(self, entries: Sequence[Entry]) -> ChatLogprobs:
        return ChatLogprobs([self._entry(entry) for entry in entries])

    def _entry(self, entry: Entry) -> ChosenLogprob:
        logprobs = entry.logprobs or TokenLogprobs(LOGPROB_MIN)
        top = [TokenLogprob(*self._token(token, logprob)) for token, logprob in logprobs.top]
        return ChosenLogprob(*self._token(entry.token, logprobs.logprob), top)

    def _token(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        return self._text.token_text(token), finite(logprob), list(self._text.piece(token))


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
        self._head = CompletionChunk(
            id=request_id, created=created, model=model, system_fingerprint=fingerprint, choices=[]
        )
        self._chunks = _Chunks(self._head)
        self._text = text
        self._logprobs = logprobs
        self._echoes = echoes

    def opening(self, index: int) -> bytes:
        """The prompt, where it is to be repeated."""
        return self._chunks.chunk(TextChoice(index, self._echoes[index], None, None)) if self._echoes[index] else b""

    def delta(self, index: int, piece: Piece) -> bytes:
        """Text, with the tokens that became certain with it."""
        if not piece.text and not (self._logprobs and piece.entries):
            return b""
        return self._chunks.chunk(TextChoice(index, piece.text, self._lists(piece.entries), None))

    def ending(self, index: int, finish_reason: FinishReason) -> bytes:
        """No more text, and the reason."""
        return self._chunks.chunk(TextChoice(index, "", None, finish_reason))

    def usage(self, tokens: Tokens, metrics: Metrics = UNSET) -> bytes:
        """No choices, only the bill."""
        return self._chunks.usage(tokens, metrics)

    def whole(self, choices: Sequence[Choice], tokens: Tokens, metrics: Metrics = UNSET) -> bytes:
        """A text_completion object."""
        head = self._head
        return _encode(
            Completion(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
                usage=tokens.usage(),
                metrics=metrics,
            )
        )

    def _choice(self, index: int, choice: Choice) -> TextChoice:
        text = self._echoes[index] + "".join(choice.text)
        return TextChoice(index, text, self._lists(choice.entries), choice.finish_reason)

    def _lists(self, entries: Sequence[Entry]) -> TextLogprobs | None:
        """The legacy format: parallel lists, and alternatives by text (of two that look alike, the likelier one)."""
        if not self._logprobs:
            return None
        known = [entry.logprobs or TokenLogprobs(LOGPROB_MIN) for entry in entries]
        return TextLogprobs(
            tokens=[self._text.token_text(entry.token) for entry in entries],
            token_logprobs=[finite(one.logprob) for one in known],
            top_logprobs=[
                {self._text.token_text(token): finite(logprob) for token, logprob in reversed(one.top)} for one in known
            ],
            text_offset=[entry.offset for entry in entries],
        )


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(logprob, LOGPROB_MIN) if logprob == logprob else LOGPROB_MIN
