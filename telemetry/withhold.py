"""
The last words of processes that handle people's texts and keys: what failed and where, not what was said of it.

Nobody knows what a library puts into the text of an exception: a KeyError is the key that was looked for, a decoder
quotes what it could not read.  So of exceptions only the kinds and the places in the code are told, and the words where
they are known to be harmless: those of the operating system, and of our own packages that never see a text.
"""

import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterator, MutableMapping
from types import TracebackType
from typing import Any  # structlog's processors are typed with it.

WITHHELD = "[withheld]"
FRAMES_MAX = 40
CHAIN_MAX = 8
OUR_WORDS = ("cache", "engine", "telemetry")
"""Packages whose exceptions hold neither texts nor keys."""

_TRACEBACK = "Traceback (most recent call last)"
_PLACE = re.compile(r'[ |]+File "[^"]*", line \d+, in [\w<>]+')


def withhold(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The structlog processor: exceptions as text that is fit to be written down."""
    del logger, method
    for name, value in event.items():
        if isinstance(value, BaseException):
            event[name] = kind_and_words(value)
    error = _error_of(event.pop("exc_info", None))
    if error is not None:
        event["exception"] = "\n".join(told(error))
    text = event.get("event")
    if isinstance(text, str) and "\n" in text:
        event["event"] = _first_line_and_places(text)
    return event


def _first_line_and_places(text: str) -> str:
    """Of a message that is a traceback, as litestar's and uvicorn's, or has the repr of a task, as asyncio's."""
    first, _, rest = text.partition("\n")
    if _TRACEBACK in text:  # its first line may be that of the exception which it began with
        first, rest = f"{_TRACEBACK}:", text
    return "\n".join([first, *(line for line in rest.split("\n") if _PLACE.fullmatch(line))])


def told(error: BaseException, depth: int = 0) -> Iterator[str]:
    """The lines of a traceback."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and depth < CHAIN_MAX:
        yield from told(cause, depth + 1)
        yield "and from that came"
    yield "Traceback (most recent call last):"
    for frame in traceback.extract_tb(error.__traceback__, -FRAMES_MAX):
        yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
        if frame.line:
            yield f"    {frame.line}"
    yield kind_and_words(error)
    if isinstance(error, BaseExceptionGroup) and depth < CHAIN_MAX:
        for part in error.exceptions[:CHAIN_MAX]:
            yield "of which one is"
            yield from told(part, depth + 1)


def kind_and_words(error: BaseException) -> str:
    """`KeyError: [withheld]`, `ConnectionRefusedError: Connection refused`."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    words = WITHHELD
    if isinstance(error, OSError):
        words = error.strerror or ""
    elif kind.__module__.partition(".")[0] in OUR_WORDS:
        words = str(error)
    return f"{name}: {words}".removesuffix(": ")


def install() -> None:
    """Exceptions that nobody catches are logged like all others, not printed whole by the interpreter."""
    log = logging.getLogger("pellucid.uncaught")

    def uncaught(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        log.critical("the process fails", exc_info=(kind, error, error.__traceback__))

    def in_a_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.exc_type is not SystemExit:
            log.error("a thread failed", exc_info=args.exc_value)

    def unraisable(args: "sys.UnraisableHookArgs") -> None:
        if args.exc_value is not None:
            log.error("an exception that nobody could be told of", exc_info=args.exc_value)

    sys.excepthook, threading.excepthook, sys.unraisablehook = uncaught, in_a_thread, unraisable


def _error_of(info: object) -> BaseException | None:
    match info:
        case None | False:
            return None
        case BaseException():
            return info
        case (_, BaseException() as error, _):
            return error
    return sys.exc_info()[1]
