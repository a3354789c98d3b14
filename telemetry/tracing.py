"""
Traces: which are kept, and where they go.

The hub hands over what has ended; here it is decided whether anybody will want to see it (`telemetry.tail`), made into
spans (`telemetry.spans`), and given to whoever takes them (`telemetry.deliver`).
"""

import asyncio
from collections.abc import Callable

from telemetry.deliver import SpanExport
from telemetry.live import LiveRequest
from telemetry.records import RequestRecord
from telemetry.spans import SpanData, request_spans, trace_of, wall_offset_ns
from telemetry.tail import TailSampler
from telemetry.vocabulary import OBSERVING_ROUTES


class Tracer:
    """Makes traces of records, for `exports`."""

    def __init__(
        self, exports: tuple[SpanExport, ...], *, ratio: float, kept: Callable[[RequestRecord, SpanData], None]
    ) -> None:
        """
        Args:
            exports: who takes them.
            ratio: of the requests that there is no reason to keep, how many are kept.
            kept: hears of each request whose trace somebody has taken, with the root of that.
        """
        self._exports = exports
        self._tail = TailSampler(ratio=ratio)
        self._kept = kept

    def request(self, record: RequestRecord, live: LiveRequest | None) -> None:
        """A request has ended."""
        if record.route in OBSERVING_ROUTES:
            return
        because = self._tail.because(record, trace_of(record, live))
        if not because:
            return
        spans = request_spans(record, live, offset_ns=wall_offset_ns(), because=because)
        if spans and self._submit(spans):
            self._kept(record, spans[0])

    def drops(self) -> dict[str, int]:
        """Spans lost so far, by reason."""
        return {reason: spans for export in self._exports for reason, spans in export.drops().items()}

    def pending_spans(self) -> int:
        """Spans that are neither delivered nor lost yet, of all ways."""
        return sum(export.pending_spans() for export in self._exports)

    async def stop(self, flush_s: float) -> None:
        """Deliver what can be delivered; each way has `flush_s`."""
        await asyncio.gather(*(export.stop(flush_s) for export in self._exports))

    def _submit(self, spans: list[SpanData]) -> bool:
        taken = [export.submit(spans) for export in self._exports]
        return any(taken)
