"""
Metrics to an OpenTelemetry collector: what `/metrics` says, every PERIOD_S.

    numbers of all workers (on the event loop) --> a thread: into OTLP, and to the collector

One worker pushes for all, because each of them has heard of the same engine steps: a collector would add them up.  All
is cumulative, so a push that fails loses nothing that the next one does not bring.  There is never more than one.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from queue import SimpleQueue

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from telemetry import names
from telemetry.aside import done_within
from telemetry.complaints import Outage
from telemetry.export import Target
from telemetry.numbers import Numbers
from telemetry.otlp import SDK_WORDS, quote_sdk, sdk_resource
from telemetry.otlp_metrics import metrics_data

_logger = logging.getLogger("pellucid.telemetry")

PERIOD_S = 10.0
Look = Callable[[], Awaitable[Numbers]]


class OtlpMetrics:
    """Pushes what `look` sees."""

    def __init__(
        self,
        to: Target,
        look: Look,
        *,
        resource: Mapping[str, str],
        version: str,
        exporter: MetricExporter | None = None,
    ) -> None:
        """`exporter` takes the place of the one that `to` asks for."""
        quote_sdk()
        self._look = look
        self._resource = sdk_resource(resource)
        self._scope = InstrumentationScope(names.SCOPE, version, names.SCHEMA_URL)
        self._exporter = exporter or _exporter(to)
        self._outage = Outage(_logger, "metrics", to.shown)
        self._started_ns = time.time_ns()
        self._failed = 0
        self._numbers: SimpleQueue[Numbers | None] = SimpleQueue()
        self._pushing = False
        self._thread = threading.Thread(target=self._push_for_ever, name="metrics push", daemon=True)
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        assert self._looking is None, "started twice"
        self._thread.start()
        self._looking = asyncio.create_task(self._look_for_ever(), name="metrics push")

    async def stop(self, flush_s: float) -> None:
        """Push once more, within `flush_s`."""
        assert self._looking is not None
        self._looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._looking
        await self._look_once()
        self._numbers.put(None)
        if not await done_within(flush_s, self._thread.join):
            _logger.warning("the last metrics were not delivered within %g s", flush_s)
        # Ends a retry that is under way, in a thread because it may wait for it.
        threading.Thread(target=self._exporter.shutdown, name="metrics end", daemon=True).start()

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self._look_once()

    async def _look_once(self) -> None:
        if self._pushing:
            return  # The collector is slow: it gets all at the next time.
        numbers = await self._look()
        self._pushing = True
        self._numbers.put(numbers)

    def _push_for_ever(self) -> None:
        while (numbers := self._numbers.get()) is not None:
            reason = self._push(numbers)
            self._failed += bool(reason)
            self._outage.tell(reason, lost=self._failed)
            self._pushing = False

    def _push(self, numbers: Numbers) -> str:
        """Why it did not go; empty: it went."""
        SDK_WORDS.text = ""
        at_ns = (self._started_ns, time.time_ns())
        try:
            result = self._exporter.export(metrics_data(numbers, self._resource, self._scope, at_ns=at_ns))
        except Exception as error:  # noqa: BLE001  whatever a transport raises is a push that failed, and no more.
            return type(error).__name__
        return "" if result is MetricExportResult.SUCCESS else SDK_WORDS.text or "refused"


def _exporter(to: Target) -> MetricExporter:
    if to.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc  # noqa: PLC0415  gRPC is big

        return Grpc(endpoint=to.url)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as Http  # noqa: PLC0415

    return Http(endpoint=to.url)
