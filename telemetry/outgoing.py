"""
All that leaves this process by itself: spans as requests end, and metrics every few seconds.

Nothing is opened before `start`, and nothing of it exists where nobody wants it.
"""

import logging
import os
from collections.abc import Awaitable, Callable

from telemetry.deliver import MetricsPush, SpanExport, open_exports, open_push
from telemetry.export import Exports
from telemetry.live import LiveRequest
from telemetry.numbers import Numbers
from telemetry.records import RequestRecord, StepRecord
from telemetry.resource import resource
from telemetry.spans import SpanData
from telemetry.tracing import Tracer

_logger = logging.getLogger("pellucid.telemetry")


class Outgoing:
    """The ways out, as `settings` say, and what takes them."""

    def __init__(
        self,
        settings: Exports,
        *,
        version: str,
        also_to: tuple[SpanExport, ...],
        kept: Callable[[RequestRecord, SpanData], None],
        look: Callable[[], Awaitable[Numbers]],
    ) -> None:
        """
        Args:
            settings: where spans and metrics go.
            version: ours.
            also_to: further takers of spans.
            kept: hears of each request whose trace somebody has taken, with the root of that.
            look: the numbers that are pushed.
        """
        self._settings = settings
        self._version = version
        self._resource = resource(version, os.environ)
        self._also_to = also_to
        self._kept = kept
        self.look = look
        self._tracer: Tracer | None = None
        self._push: MetricsPush | None = None

    def start(self) -> None:
        """Open all ways, on the running event loop."""
        if self._settings.has_traces or self._also_to:
            opened = open_exports(self._settings, resource=self._resource, version=self._version)
            self._tracer = Tracer(opened + self._also_to, ratio=self._settings.trace_sample, kept=self._kept)
        self._push = open_push(self._settings, self.look, resource=self._resource, version=self._version)
        if self._push is not None:
            self._push.start()
        for sentence in self._settings.sentences():
            _logger.info(sentence)

    async def stop(self, flush_s: float) -> None:
        """Deliver what can be delivered; each way has `flush_s`."""
        if self._tracer is not None:
            await self._tracer.stop(flush_s)
        if self._push is not None:  # Last, so that it tells of spans that were lost.
            await self._push.stop(flush_s)

    def opened(self, live: LiveRequest) -> None:
        """A request has begun."""
        if self._tracer is not None:
            self._tracer.opened(live)

    def request(self, record: RequestRecord, live: LiveRequest | None) -> None:
        """A request has ended."""
        if self._tracer is not None:
            self._tracer.request(record, live)

    def step(self, record: StepRecord) -> None:
        """An engine has made a step."""
        if self._tracer is not None:
            self._tracer.step(record)

    def drops(self) -> dict[str, int]:
        """Spans lost so far, by reason."""
        return self._tracer.drops() if self._tracer is not None else {}

    def pending_spans(self) -> int:
        """Spans that are neither delivered nor lost yet."""
        return self._tracer.pending_spans() if self._tracer is not None else 0
