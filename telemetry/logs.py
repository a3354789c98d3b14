"""
Structured logs to stderr, ours and those of the libraries through the same renderer.

Each line has what structlog's context variables hold (the request's ids) and passes `telemetry.redact`.  Who has
stopped reading stderr never stops a request: lines wait in a bounded queue for a thread, and a full queue drops.
"""

import atexit
import logging
import sys
import threading
from collections import deque
from typing import Literal, TextIO, cast

import structlog
from structlog.typing import Processor

from telemetry.records import RequestRecord
from telemetry.redact import redact
from telemetry.vocabulary import OBSERVING_ROUTES
from telemetry.withhold import withhold

LEVELS = ("debug", "info", "warning", "error", "critical")
LINES_MAX = 4096
FLUSH_S = 2.0
Format = Literal["console", "json"]
_LIBRARIES = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "litestar")


def configure(
    level: str = "info", format: str = "console", *, stream: TextIO | None = None, withheld: bool = False
) -> None:
    """
    Send all logs of this process to `stream` (stderr), from `level` up.  May be called again; the last call holds.

    With `withheld` the process handles texts and keys: exceptions are told without their words (telemetry.withhold).

    Raises ValueError for a level or format that does not exist.
    """
    if level.lower() not in LEVELS:
        raise ValueError(f"log level {level!r}: one of {', '.join(LEVELS)}")
    if format not in ("console", "json"):
        raise ValueError(f"log format {format!r}: console or json")
    global _handler  # noqa: PLW0603  logging is one for the whole process, and so is this.
    out = stream if stream is not None else sys.stderr
    handler = _LineHandler(out)
    handler.setFormatter(_formatter(cast(Format, format), colors=out.isatty(), withheld=withheld))
    root = logging.getLogger()
    if _handler is not None:
        root.removeHandler(_handler)
        _handler.close()
    _handler = handler
    root.addHandler(handler)
    root.setLevel(level.upper())
    _adopt_libraries()
    structlog.configure(
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # Module-level loggers must follow when this is called again.
    )


def reset() -> None:
    """Undo `configure`: write what is left, and leave logging as the standard library has it."""
    global _handler  # noqa: PLW0603  as above.
    if _handler is not None:
        logging.getLogger().removeHandler(_handler)
        _handler.close()
        _handler = None
    logging.getLogger().setLevel(logging.WARNING)
    structlog.reset_defaults()


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger that takes an event and named values: `log.info("request", status=200)`."""
    return cast(structlog.stdlib.BoundLogger, structlog.get_logger(name))


def log_request(record: RequestRecord) -> None:
    """One line for one ended request, once logs are configured; of those who only look, at level debug."""
    if _handler is None:
        return
    level = logging.INFO
    if record.route in OBSERVING_ROUTES:
        level = logging.DEBUG
    elif record.status >= 500:
        level = logging.ERROR
    _request_logger.log(
        level,
        "request",
        request_id=record.request_id,
        trace_id=record.trace_id,
        tenant=record.tenant,
        model=record.model,
        route=record.route,
        status=record.status,
        outcome=record.outcome,
        duration_ms=round((record.finished_ns - record.accepted_ns) / 1e6, 3),
        first_token_ms=round(record.first_token_ns / 1e6, 3),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        **({"upstream": record.upstream} if record.upstream else {"preemptions": record.preemptions}),
    )


def dropped_lines() -> int:
    """Lines lost because nobody read them."""
    return _handler.dropped if _handler is not None else 0


def flush(timeout_s: float = FLUSH_S) -> bool:
    """Wait until all lines are written, for at most `timeout_s`.  Whether they are."""
    return _handler.drain(timeout_s) if _handler is not None else True


_request_logger = get_logger("pellucid.request")


class _LineHandler(logging.Handler):
    """Formats in the caller's thread and writes in its own."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.dropped = 0
        self._stream = stream
        self._lines: deque[str] = deque()
        self._change = threading.Condition()
        self._writing = False
        self._closed = False
        self._thread = threading.Thread(target=self._write_for_ever, name="log writer", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one line."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  a bad log call must not become the failure of who made it.
            self.handleError(record)
            return
        with self._change:
            if self._closed or len(self._lines) >= LINES_MAX:
                self.dropped += 1
                return
            self._lines.append(line)
            if len(self._lines) == 1:  # With more, the writer has been told, and will find them all.
                self._change.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until the queue is empty and the last line written."""
        with self._change:
            return self._change.wait_for(lambda: not self._lines and not self._writing, timeout_s)

    def close(self) -> None:
        """Write what is left, within FLUSH_S, and end the thread."""
        if not self._closed:
            self.drain(FLUSH_S)
        with self._change:
            self._closed = True
            self._change.notify_all()
        super().close()

    def _write_for_ever(self) -> None:
        while True:
            with self._change:
                self._writing = False
                self._change.notify_all()
                self._change.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                text = "".join(line + "\n" for line in self._lines)
                self._lines.clear()
                self._writing = True
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):  # The reader is gone, or the stream closed under us.
                with self._change:
                    self.dropped += text.count("\n")


_handler: _LineHandler | None = None
atexit.register(flush)


def _shared() -> list[Processor]:
    """What every line passes, whether it comes from structlog or from the standard library."""
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _formatter(format: Format, *, colors: bool, withheld: bool) -> logging.Formatter:
    # Exceptions become text before they are redacted, and never with the frames' variables: those hold prompts.
    renderer: Processor = structlog.processors.JSONRenderer()
    if format == "console":
        plain = structlog.dev.plain_traceback
        renderer = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared(),
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *([withhold] if withheld else []),
            structlog.processors.format_exc_info,
            redact,
            renderer,
        ],
    )


def _adopt_libraries() -> None:
    for name in _LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # Its lines hold raw URLs, queries included, and the hub writes one of its own for each request.
    logging.getLogger("uvicorn.access").setLevel(logging.CRITICAL)
