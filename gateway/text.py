"""
Token by token to text: whole characters only, stop strings cut exactly, logprobs beside their text.

    tokens --bytes--> characters --hold back what may begin a stop string--> released text

The text released in pieces is equal to the text of all tokens decoded at once, whatever the pieces.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.api import TokenLogprobs
from gateway.tokens import ModelText


@dataclass(frozen=True, slots=True)
class Entry:
    """One token whose text is released: where it begins in the text, and its probabilities if they were asked for."""

    token: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class Piece:
    """What became certain: text, and the tokens that it is made of."""

    text: str = ""
    entries: list[Entry] = field(default_factory=list)


class TextStream:
    """The text of one sequence."""

    def __init__(
        self, model: ModelText, *, stops: Sequence[str] = (), tokens_min: int = 0, entries: bool = True
    ) -> None:
        """Without `entries` pieces are text alone, which is cheaper."""
        self._model = model
        self._entries = entries
        self._stops = tuple(stops)
        self._tokens_min = tokens_min
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # decoded, not released: it may be the beginning of a stop string
        self._released = 0  # characters
        self._waiting: deque[tuple[Entry, int]] = deque()  # with the offset where its text ends
        self._strip_space = model.decoder == "spaces"
        self.tokens = 0
        """Tokens taken, up to and including the one that completed a stop string."""
        self.stopped = False
        """A stop string is complete: nothing more is taken."""

    def feed(self, token: int, logprobs: TokenLogprobs | None = None) -> Piece:
        """Take one token.  Nothing may be fed after `stopped`."""
        assert not self.stopped, "fed after the stop string"
        self.tokens += 1
        offset = self._released + len(self._held)
        if not self._model.is_special(token):
            self._held += self._decode(self._model.piece(token))
        if self._entries:
            pending = bool(self._utf8.getstate()[0])
            end = self._released + len(self._held) + pending  # a half character will be at least one more
            self._waiting.append((Entry(token, offset, logprobs), end))
        return self._advance()

    def finish(self) -> Piece:
        """No more tokens: release what was held back, half characters as U+FFFD."""
        if self.stopped:
            return Piece()
        self._held += self._utf8.decode(b"", final=True)
        cut = self._find_stop()
        if cut is not None:
            return self._stop(cut)
        return self._release(len(self._held), everything=True)

    def _decode(self, piece: bytes) -> str:
        text = self._utf8.decode(piece)
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        return text

    def _advance(self) -> Piece:
        if not self._stops:
            return self._release(len(self._held))
        if self.tokens <= self._tokens_min:
            return self._release(len(self._held))  # Too early to stop, so nothing is worth holding back.
        cut = self._find_stop()
        if cut is not None:
            return self._stop(cut)
        return self._release(len(self._held) - self._begun())

    def _find_stop(self) -> int | None:
        """Where the stop string that completes first begins; of those that complete together, the longest."""
        found: list[tuple[int, int]] = []
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found)[1] if found else None

    def _begun(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max(len(stop) for stop in self._stops)
        for count in range(min(len(self._held), longest - 1), 0, -1):
            tail = self._held[-count:]
            if any(stop.startswith(tail) for stop in self._stops):
                return count
        return 0

    def _stop(self, cut: int) -> Piece:
        self.stopped = True
        piece = self._release(cut)
        # A token that holds both text and the beginning of the stop string belongs to the text.
        while self._waiting and self._waiting[0][0].offset < self._released:
            piece.entries.append(self._waiting.popleft()[0])
        self._waiting.clear()
        self._held = ""
        return piece

    def _release(self, count: int, *, everything: bool = False) -> Piece:
        piece = Piece(self._held[:count])
        self._held = self._held[count:]
        self._released += count
        while self._waiting and (everything or self._waiting[0][1] <= self._released):
            piece.entries.append(self._waiting.popleft()[0])
        return piece
