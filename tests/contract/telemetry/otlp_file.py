"""
A trace file, read as the specification wants it: by opentelemetry-proto, after ids have become base64.
"""

import base64
import json
from pathlib import Path

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.contract.telemetry.otlp_sink import Collector

_IDS = ("traceId", "spanId", "parentSpanId")


def read_trace_file(path: Path) -> Collector:
    """What a strict collector would have got: each line is a whole request, and nothing else stands there."""
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    collector = Collector()
    for line in data.splitlines():
        document = json.loads(line)
        _into_base64(document)
        # Strict: unknown fields, and strings where numbers belong, are errors.
        collector.take(json_format.ParseDict(document, ExportTraceServiceRequest()))
    assert not collector.faults, collector.faults
    return collector


def _into_base64(part: object) -> None:
    if isinstance(part, list):
        for one in part:
            _into_base64(one)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key in _IDS:
                assert value == value.lower(), "hexadecimal, in lower case"
                part[key] = base64.b64encode(bytes.fromhex(value)).decode()
            else:
                _into_base64(value)
