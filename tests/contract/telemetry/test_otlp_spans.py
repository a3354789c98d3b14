"""
What is handed to the SDK's encoder is encoded like the SDK's own spans: byte by byte.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from telemetry import names, otlp
from telemetry.spans import Link, SpanData

RESOURCE = {"service.name": "pellucid", "service.version": "0"}
SCOPE = InstrumentationScope(names.SCOPE, "0", names.SCHEMA_URL)
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
ids = st.integers(1, 2**64 - 1)


@st.composite
def spans(draw: st.DrawFn) -> SpanData:
    value = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text())
    started_ns = draw(st.integers(0, 2**63 - 1))
    return SpanData(
        name=draw(st.text(min_size=1)),
        trace_id=f"{draw(st.integers(1, 2**128 - 1)):032x}",
        span_id=f"{draw(ids):016x}",
        parent_id=draw(st.one_of(st.just(""), ids.map(lambda number: f"{number:016x}"))),
        parent_is_remote=draw(st.booleans()),
        is_server=draw(st.booleans()),
        started_ns=started_ns,
        ended_ns=draw(st.integers(started_ns, 2**63)),
        attributes=draw(st.dictionaries(st.text(min_size=1), st.one_of(value, st.tuples(st.text())), max_size=4)),
        failed=draw(st.booleans()),
        trace_state=draw(st.sampled_from(["", "a=b", "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"])),
        links=tuple(Link(f"{one:032x}", f"{one:016x}") for one in draw(st.lists(ids, max_size=3))),
    )


def readable(span: SpanData) -> ReadableSpan:
    """The oracle: as the SDK has it."""

    def context(span_id: str, *, remote: bool = False, state: TraceState | None = None) -> SpanContext:
        return SpanContext(int(span.trace_id, 16), int(span_id, 16), remote, SAMPLED, state)

    return ReadableSpan(
        name=span.name,
        context=context(span.span_id, state=TraceState.from_header([span.trace_state]) if span.trace_state else None),
        parent=context(span.parent_id, remote=span.parent_is_remote) if span.parent_id else None,
        resource=otlp.sdk_resource(RESOURCE),
        attributes=span.attributes,
        kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR if span.failed else StatusCode.UNSET),
        start_time=span.started_ns,
        end_time=span.ended_ns,
        instrumentation_scope=SCOPE,
        links=[
            SdkLink(SpanContext(int(to.trace_id, 16), int(to.span_id, 16), is_remote=False, trace_flags=SAMPLED))
            for to in span.links
        ],
    )


@settings(max_examples=60, deadline=None)
@given(tree=st.lists(spans(), min_size=1, max_size=4))
def test_our_spans_are_encoded_like_theirs(tree: list[SpanData]) -> None:
    resource = otlp._Resource(otlp.sdk_resource(RESOURCE))
    ours = [otlp._readable(span, resource, SCOPE) for span in tree]
    assert encode_spans(ours) == encode_spans([readable(span) for span in tree])
