"""
Spans into a file, one tree a line, by a thread of its own.

Several processes may write to one file: each line is appended whole, under a lock.  What a full disk has room for only
in part is taken back, so that there is never half a line.  What cannot be written is lost, and counted.
"""

import fcntl
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from telemetry.aside import done_within
from telemetry.complaints import Outage
from telemetry.export import open_append
from telemetry.otlp_json import otlp_line
from telemetry.spans import SpanData

_logger = logging.getLogger("pellucid.telemetry")

QUEUE_SPANS_MAX = 16_384
FILE_BYTES_MAX = 4 * 1024**3
"""Then no more is written: nobody looks through so much, and the disk has other uses."""


class TraceFile:
    """A `telemetry.deliver.SpanExport` into a file."""

    def __init__(self, path: str, *, resource: Mapping[str, str], version: str) -> None:
        """Raises ExportConfigError."""
        self._descriptor = open_append(path)
        self._resource = resource
        self._version = version
        self._outage = Outage(_logger, "spans", path)
        self._trees: SimpleQueue[Sequence[SpanData] | None] = SimpleQueue()
        self._submitted = 0
        self._written = 0
        self._failed = 0
        self._dropped = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._write_for_ever, name="trace file", daemon=True)
        self._thread.start()

    def submit(self, spans: Sequence[SpanData]) -> bool:
        """Hand over one tree, whole or not at all."""
        if self._stopped or self.pending_spans() + len(spans) > QUEUE_SPANS_MAX:
            self._dropped += len(spans)
            return False
        self._submitted += len(spans)
        self._trees.put(spans)
        return True

    def drops(self) -> dict[str, int]:
        """Spans lost so far, by reason."""
        return {"spans_file_queue_full": self._dropped, "spans_file_failed": self._failed}

    def pending_spans(self) -> int:
        """Spans that are neither written nor lost yet."""
        return self._submitted - self._written - self._failed

    async def stop(self, flush_s: float) -> None:
        """Write what can be written within `flush_s`."""
        self._stopped = True
        self._trees.put(None)
        if not await done_within(flush_s, self._thread.join):
            _logger.warning("%d spans were not written within %g s", self.pending_spans(), flush_s)

    def _write_for_ever(self) -> None:
        while (spans := self._trees.get()) is not None:
            reason = self._append(otlp_line(spans, resource=self._resource, version=self._version))
            if reason:
                self._failed += len(spans)
            else:
                self._written += len(spans)
            self._outage.tell(reason, lost=self._failed)
        os.close(self._descriptor)

    def _append(self, line: bytes) -> str:
        """Append one line, or nothing.  Why not; empty: it is there."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                end = os.fstat(self._descriptor).st_size
                if end + len(line) > FILE_BYTES_MAX:
                    return f"it has {FILE_BYTES_MAX} bytes"
                return self._write(line, end)
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        except OSError as error:
            return error.strerror or type(error).__name__

    def _write(self, line: bytes, end: int) -> str:
        try:
            written = os.write(self._descriptor, line)
            if written == len(line):
                return ""
            reason = "no space left"
        except OSError as error:
            reason = error.strerror or type(error).__name__
        os.ftruncate(self._descriptor, end)
        return reason
