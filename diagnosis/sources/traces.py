"""
Traces: a file as `--export-trace` writes it, or Jaeger.  The states of a request are the phases of its trace.
"""

import heapq
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from diagnosis.sources.live import fetch
from launch.errors import UserError
from telemetry import names
from telemetry.recent import REQUESTS_MAX
from telemetry.records import RequestRecord

JAEGER_DAYS = 7
"""How far back a request is looked for there."""
LINE_BYTES_MAX = 64 * 1024**2
"""More than a trace can take of a file."""
Scalar = str | int | float | bool | None


class _Value(msgspec.Struct, rename="camel"):
    """OTLP/JSON: integers are strings."""

    string_value: str | None = None
    int_value: str | int | None = None
    double_value: float | None = None
    bool_value: bool | None = None

    def plain(self) -> Scalar:
        """As it was meant."""
        if self.int_value is not None:
            return int(self.int_value)
        found = (self.string_value, self.double_value, self.bool_value)
        return next((value for value in found if value is not None), None)


class _Attribute(msgspec.Struct):
    key: str
    value: _Value


class _Span(msgspec.Struct, rename="camel"):
    span_id: str
    start_time_unix_nano: str | int
    end_time_unix_nano: str | int
    parent_span_id: str = ""
    attributes: list[_Attribute] = []

    def named(self) -> dict[str, Scalar]:
        """Its attributes."""
        return {one.key: one.value.plain() for one in self.attributes}


class _Scope(msgspec.Struct):
    spans: list[_Span] = []


class _Resource(msgspec.Struct, rename="camel"):
    scope_spans: list[_Scope] = []


class _Document(msgspec.Struct, rename="camel"):
    resource_spans: list[_Resource] = []
    result: "_Document | None" = None

    def spans(self) -> Iterator[_Span]:
        """All of them; Jaeger puts one document into another."""
        for resource in (self.result or self).resource_spans:
            for scope in resource.scope_spans:
                yield from scope.spans


def of_trace_file(file: Path, request_id: str) -> list[RequestRecord]:
    """
    The newest requests in a file of OTLP/JSON lines, newest first: as many as a running system remembers, and the one
    of that id, however old it is.  Raises UserError.
    """
    newest: list[tuple[int, int, RequestRecord]] = []
    wanted: tuple[int, int, RequestRecord] | None = None
    try:
        for number, record in enumerate(_one_by_one(file)):
            place = (record.finished_ns, number, record)
            if record.request_id == request_id:
                wanted = place if wanted is None else max(wanted, place)
            (heapq.heappush if len(newest) < REQUESTS_MAX else heapq.heappushpop)(newest, place)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    if not newest:
        raise UserError(f"{file} does not hold traces as OTLP/JSON lines, as --export-trace writes them")
    if wanted is not None and wanted not in newest:
        newest.append(wanted)
    return [record for _, _, record in sorted(newest, reverse=True)]


def _one_by_one(file: Path) -> Iterator[RequestRecord]:
    """
    Each request, in the order of the file.  A line is a whole trace; one that is torn, as the last one of who died may
    be, is passed over.  Raises OSError.
    """
    with file.open("rb") as lines:
        while line := lines.readline(LINE_BYTES_MAX):
            with suppress(ValueError, msgspec.MsgspecError):
                yield from _requests(line)


def is_trace_id(name: str) -> bool:
    """Whether it looks like the id of a trace."""
    return len(name) == 32 and all(digit in "0123456789abcdef" for digit in name)


def of_jaeger(url: str, name: str) -> list[RequestRecord]:
    """The requests of the trace of that id, or that of that request id, by Jaeger's stable API.  Raises UserError."""
    where = url.rstrip("/") + "/api/v3/traces"
    if is_trace_id(name):
        where += f"/{name}"
    else:
        now = datetime.now(UTC)
        query = {
            "query.service_name": os.environ.get("OTEL_SERVICE_NAME", names.SERVICE),
            "query.attributes": msgspec.json.encode({names.REQUEST_ID: name}).decode(),
            "query.start_time_min": (now - timedelta(days=JAEGER_DAYS)).isoformat(),
            "query.start_time_max": (now + timedelta(days=1)).isoformat(),
            "query.search_depth": "20",
        }
        where += "?" + urlencode(query)
    data = fetch(where, server="Jaeger")
    try:
        return sorted(_requests(data), key=lambda record: record.finished_ns, reverse=True)
    except (ValueError, msgspec.MsgspecError):
        raise UserError(f"{url} does not answer as Jaeger 2 does (/api/v3/traces)") from None


def _requests(lines: bytes) -> list[RequestRecord]:
    """A record of each request whose spans are there.  Raises ValueError or MsgspecError."""
    documents = [msgspec.json.decode(line, type=_Document) for line in lines.splitlines() if line.strip()]
    spans = [span for document in documents for span in document.spans()]
    children: dict[str, list[_Span]] = {}
    for span in spans:
        children.setdefault(span.parent_span_id, []).append(span)
    return [_record(span, children) for span in spans if names.REQUEST_ID in span.named()]


def _below(root: _Span, children: dict[str, list[_Span]]) -> Iterable[_Span]:
    for child in children.get(root.span_id, ()):
        yield child
        yield from _below(child, children)


def _record(root: _Span, children: dict[str, list[_Span]]) -> RequestRecord:
    states: dict[str, int] = {}
    known = root.named()
    for span in _below(root, children):
        its = span.named()
        if names.PHASE in its:
            states[str(its[names.PHASE])] = _number(its, names.PHASE_NS)
        else:
            known |= its
    return RequestRecord(
        request_id=str(known[names.REQUEST_ID]),
        outcome=str(known.get(names.OUTCOME, "")),
        accepted_ns=int(root.start_time_unix_nano),
        finished_ns=int(root.end_time_unix_nano),
        states=states,
        route=str(known.get(names.HTTP_ROUTE, "")),
        prompt_tokens=_number(known, names.GEN_AI_USAGE_INPUT_TOKENS),
        cached_tokens=_number(known, names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS),
        computed_tokens=_number(known, names.COMPUTED_TOKENS),
        output_tokens=_number(known, names.GEN_AI_USAGE_OUTPUT_TOKENS),
        repeated_tokens=_number(known, names.REPEATED_TOKENS),
        unread_ns=_number(known, names.UNREAD_NS),
        gc_pause_ns=_number(known, names.GC_PAUSE_NS),
        loop_lag_ns=_number(known, names.LOOP_LAG_NS),
        starved_ns=_number(known, names.STARVED_NS),
        status=_number(known, names.HTTP_RESPONSE_STATUS_CODE),
    )


def _number(known: dict[str, Scalar], name: str) -> int:
    value = known.get(name)
    return value if isinstance(value, int) else 0
