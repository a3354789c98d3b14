"""
Server-sent events, out of bytes that come in any pieces: cut inside a character, inside `data:`, inside `\\r\\n`.

Only what an OpenAI stream is made of counts: `data:` and comments.  Names, ids and retry times of events are skipped.
"""

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class TooLarge(ValueError):
    """An event, or a line, is over the limit."""


class EventReader:
    """Holds the beginning of at most one event."""

    def __init__(self, *, event_bytes_max: int) -> None:
        self._event_bytes_max = event_bytes_max
        self._line: list[bytes] = []  # pieces of a line that has no end yet
        self._line_bytes = 0
        self._data: list[bytes] = []  # lines of an event that has no end yet
        self._data_bytes = 0  # with one for each line's end: empty lines cost memory too
        self._skip_newline = False  # The last piece ended with the first half of a `\r\n`.
        self._at_start = True

    def feed(self, piece: bytes) -> list[bytes | None]:
        """The data of each event that ends in `piece`, None for a comment or an empty one.  Raises TooLarge."""
        if self._skip_newline and piece:
            self._skip_newline = False
            piece = piece.removeprefix(b"\n")
        self._line.append(piece)
        self._line_bytes += len(piece)
        found: list[bytes | None] = []
        if b"\n" in piece or b"\r" in piece:
            for line in self._whole_lines(returns=b"\r" in piece):
                self._take(line, found)
        if self._line_bytes + self._data_bytes > self._event_bytes_max:
            raise TooLarge(f"an event is over {self._event_bytes_max} bytes")
        return found

    def _whole_lines(self, *, returns: bool) -> list[bytes]:
        """All lines that have an end; what follows the last one is kept."""
        text = b"".join(self._line)
        if self._at_start:
            text, self._at_start = text.removeprefix(_BOM), False
        lines = _LINE_END.split(text) if returns else text.split(b"\n")
        self._skip_newline = text.endswith(b"\r")
        self._line = [lines.pop()]
        self._line_bytes = len(self._line[0])
        return lines

    def _take(self, line: bytes, found: list[bytes | None]) -> None:
        if line.startswith(b"data:") or line == b"data":
            data = line[6:] if line.startswith(b"data: ") else line[5:]
            self._data.append(data)
            self._data_bytes += len(data) + 1
        elif line.startswith(b":"):
            found.append(None)
        elif not line and self._data:
            found.append(b"\n".join(self._data) or None)  # without data it is no event, says the standard
            self._data.clear()
            self._data_bytes = 0
