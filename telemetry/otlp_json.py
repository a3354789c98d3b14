"""
Spans as text: one ExportTraceServiceRequest of OTLP/JSON a line.

That encoding is protobuf's JSON with three differences (OTLP 1.11, JSON Protobuf Encoding): ids are hexadecimal, enums
are numbers, and names are in lowerCamelCase only.  Integers of 64 bits are strings.  Jaeger's page takes such a file.
"""

from collections.abc import Mapping, Sequence

import msgspec

from telemetry import names
from telemetry.live import Attribute
from telemetry.spans import Link, SpanData

Part = dict[str, object]
_INTERNAL, _SERVER = 1, 2
_ERROR = 2
_SAMPLED = 0x001
_REMOTE_KNOWN, _REMOTE = 0x100, 0x200
"""Of the flags of a span: whether its parent is in another process."""


def otlp_line(spans: Sequence[SpanData], *, resource: Mapping[str, str], version: str) -> bytes:
    """These spans, with their resource and a line feed."""
    scope_spans = {
        "scope": {"name": names.SCOPE, "version": version},
        "spans": [_span(span) for span in spans],
        "schemaUrl": names.SCHEMA_URL,
    }
    of_resource = {
        "resource": {"attributes": _attributes(resource)},
        "scopeSpans": [scope_spans],
        "schemaUrl": names.SCHEMA_URL,
    }
    return msgspec.json.encode({"resourceSpans": [of_resource]}) + b"\n"


def _span(span: SpanData) -> Part:
    remote = _REMOTE if span.parent_id and span.parent_is_remote else 0
    part: Part = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": _SERVER if span.is_server else _INTERNAL,
        "startTimeUnixNano": str(span.started_ns),
        "endTimeUnixNano": str(span.ended_ns),
        "attributes": _attributes(span.attributes),
        "status": {"code": _ERROR} if span.failed else {},
        "flags": _SAMPLED | _REMOTE_KNOWN | remote,
    }
    if span.parent_id:
        part["parentSpanId"] = span.parent_id
    if span.trace_state:
        part["traceState"] = span.trace_state
    if span.links:
        part["links"] = [_link(link) for link in span.links]
    return part


def _link(link: Link) -> Part:
    return {"traceId": link.trace_id, "spanId": link.span_id, "flags": _SAMPLED | _REMOTE_KNOWN}


def _attributes(attributes: Mapping[str, Attribute] | Mapping[str, str]) -> list[Part]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Attribute) -> Part:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
    return {"arrayValue": {"values": [{"stringValue": one} for one in value]}}
