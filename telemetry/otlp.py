"""
Spans to an OpenTelemetry collector, over HTTP or gRPC, in a thread of the SDK's.

A request's tree is handed over whole or not at all: half a tree would tell a wrong story.  What is lost is counted by
reason; a collector that fails is logged when it begins to fail and when it is back, not in between.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from telemetry import names
from telemetry.aside import done_within
from telemetry.complaints import Outage
from telemetry.export import Target
from telemetry.live import Attribute
from telemetry.spans import Link, SpanData

_logger = logging.getLogger("pellucid.telemetry")

QUEUE_SPANS_MAX = 2048
BATCH_SPANS_MAX = 512
BATCH_PERIOD_S = 1.0
_OK = Status(StatusCode.UNSET)
_FAILED = Status(StatusCode.ERROR)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _Processor(Protocol):
    """What we need of the SDK's processor, which has no types of its own."""

    def on_end(self, span: ReadableSpan) -> None: ...

    def shutdown(self) -> None: ...


class OtlpExport:
    """A `telemetry.export.SpanExport` through the SDK's batch processor."""

    def __init__(
        self, to: Target, *, resource: Mapping[str, str], version: str, exporter: SpanExporter | None = None
    ) -> None:
        """`exporter` takes the place of the one that `to` asks for."""
        quote_sdk()
        self._resource = _Resource(sdk_resource(resource))
        self._scope = InstrumentationScope(names.SCOPE, version, names.SCHEMA_URL)
        self._counted = _Counted(exporter or _exporter(to), to.shown)
        self._processor: _Processor = BatchSpanProcessor(
            self._counted,
            max_queue_size=QUEUE_SPANS_MAX,
            max_export_batch_size=BATCH_SPANS_MAX,
            schedule_delay_millis=BATCH_PERIOD_S * 1000,
        )
        self._submitted = 0
        self._dropped = 0
        self._stopped = False

    def submit(self, spans: Sequence[SpanData]) -> bool:
        """Hand over one tree, whole or not at all.  Whether it was taken."""
        queued = self._submitted - self._counted.taken
        if self._stopped or queued + len(spans) > QUEUE_SPANS_MAX:
            self._dropped += len(spans)
            return False
        self._submitted += len(spans)
        for span in spans:
            self._processor.on_end(_readable(span, self._resource, self._scope))
        return True

    def drops(self) -> dict[str, int]:
        """Spans lost so far, by reason."""
        return {"spans_queue_full": self._dropped, "spans_export_failed": self._counted.failed}

    def pending_spans(self) -> int:
        """Spans that are neither delivered nor lost yet."""
        return self._submitted - self._counted.delivered - self._counted.failed

    async def stop(self, flush_s: float) -> None:
        """Deliver what can be delivered within `flush_s`; the rest is lost and counted."""
        self._stopped = True
        # `shutdown` joins the SDK's thread, which sends all that is queued.
        if not await done_within(flush_s, self._processor.shutdown):
            self._counted.give_up()
            _logger.warning("%d spans were not delivered within %g s", self.pending_spans(), flush_s)


class _Context(msgspec.Struct, frozen=True, gc=False):
    """What is read of an SDK's SpanContext."""

    trace_id: int
    span_id: int
    is_remote: bool = False
    trace_state: TraceState | None = None
    trace_flags: TraceFlags = _SAMPLED


class _Resource:
    """What is read of an SDK's Resource, which encodes itself as JSON whenever it is looked up: for every span."""

    def __init__(self, resource: Resource) -> None:
        self.attributes = resource.attributes
        self.schema_url = resource.schema_url


class _Span(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """
    What is read of an SDK's ReadableSpan.

    That one copies all attributes behind a lock, and checks ids that are ours: it takes seven times as long, and is one
    more thing for the garbage collector to walk through.
    """

    name: str
    context: _Context
    parent: _Context | None
    resource: _Resource
    attributes: Mapping[str, Attribute]
    kind: SpanKind
    status: Status
    start_time: int
    end_time: int
    instrumentation_scope: InstrumentationScope
    links: Sequence[SdkLink] = ()
    events: tuple[()] = ()
    dropped_attributes: int = 0
    dropped_events: int = 0
    dropped_links: int = 0

    def get_span_context(self) -> _Context:
        """As theirs."""
        return self.context


def _readable(span: SpanData, resource: _Resource, scope: InstrumentationScope) -> ReadableSpan:
    """As the SDK's encoder reads it."""
    trace_id = int(span.trace_id, 16)
    state = TraceState.from_header([span.trace_state]) if span.trace_state else None
    readable = _Span(
        name=span.name,
        context=_Context(trace_id, int(span.span_id, 16), trace_state=state),
        parent=_Context(trace_id, int(span.parent_id, 16), span.parent_is_remote) if span.parent_id else None,
        resource=resource,
        attributes=span.attributes,
        kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
        status=_FAILED if span.failed else _OK,
        start_time=span.started_ns,
        end_time=span.ended_ns,
        instrumentation_scope=scope,
        links=[_link(link) for link in span.links] if span.links else (),
    )
    return cast(ReadableSpan, readable)


def _link(to: Link) -> SdkLink:
    return SdkLink(SpanContext(int(to.trace_id, 16), int(to.span_id, 16), is_remote=False, trace_flags=_SAMPLED))


class _LastWords(logging.Handler):
    """Keeps what the SDK last said: it complains of every batch, `_Counted` quotes it once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Remember the first line."""
        self.text = record.getMessage().partition("\n")[0][:300]


SDK_WORDS = _LastWords()


def quote_sdk() -> None:
    """The SDK's complaints are kept for us to quote, and said by nobody else."""
    sdk_logger = logging.getLogger("opentelemetry")
    sdk_logger.addHandler(SDK_WORDS)  # The same handler again changes nothing.
    sdk_logger.propagate = False


class _Counted(SpanExporter):
    """Counts what the real exporter delivers and loses, and says when that changes.  Called in the SDK's thread."""

    def __init__(self, inner: SpanExporter, where: str) -> None:
        self._inner = inner
        self._outage = Outage(_logger, "spans", where)
        self.taken = 0
        self.delivered = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send one batch."""
        self.taken += len(spans)
        SDK_WORDS.text = reason = ""
        try:
            result = self._inner.export(spans)
        except Exception as error:  # noqa: BLE001  whatever a transport raises is a loss of spans, and no more.
            result, reason = SpanExportResult.FAILURE, type(error).__name__
        if result is SpanExportResult.SUCCESS:
            self.delivered += len(spans)
        else:
            self.failed += len(spans)
            reason = reason or SDK_WORDS.text or "refused"
        self._outage.tell(reason, lost=self.failed)
        return result

    def give_up(self) -> None:
        """End what is under way, retries included."""
        self._inner.shutdown()

    def shutdown(self) -> None:
        """Close the connection."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept here."""
        return True


def _exporter(to: Target) -> SpanExporter:
    if to.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc  # noqa: PLC0415  gRPC is big

        return Grpc(endpoint=to.url)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http  # noqa: PLC0415

    return Http(endpoint=to.url)


def sdk_resource(attributes: Mapping[str, str]) -> Resource:
    """Ours, with what the SDK says of itself."""
    return Resource({**Resource.create({}).attributes, **attributes}, names.SCHEMA_URL)
