"""
Traces: which are kept, and where they go.

The hub hands over what has ended; here it is decided whether anybody will want to see it (`telemetry.tail` of requests,
`telemetry.step_traces` of steps), and it is made into spans and given to whoever takes them (`telemetry.deliver`).
"""

import asyncio
from collections.abc import Callable

from telemetry.deliver import SpanExport
from telemetry.live import LiveRequest
from telemetry.records import RequestRecord, StepRecord
from telemetry.spans import SpanData, request_spans, trace_of, wall_offset_ns
from telemetry.step_traces import StepTraces
from telemetry.tail import BAD, TailSampler
from telemetry.vocabulary import GENERATING_ROUTES, OBSERVING_ROUTES


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
        self._steps = StepTraces(share=ratio > 0)
        self._kept = kept

    def opened(self, live: LiveRequest) -> None:
        """A request has begun."""
        if live.route in GENERATING_ROUTES:
            self._steps.opened(live)

    def step(self, record: StepRecord) -> None:
        """An engine has made a step."""
        spans = self._steps.step(record, offset_ns=wall_offset_ns())
        if spans:
            self._submit(spans)

    def request(self, record: RequestRecord, live: LiveRequest | None) -> None:
        """A request has ended."""
        if record.route in OBSERVING_ROUTES:
            return
        offset_ns = wall_offset_ns()
        because = self._tail.because(record, trace_of(record, live))
        slowest, traces = self._steps.ended(record.request_id, trace=because in BAD, offset_ns=offset_ns)
        if not because:
            return
        for trace in traces:
            self._submit(trace)
        spans = request_spans(record, live, offset_ns=offset_ns, because=because, slowest=slowest)
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
