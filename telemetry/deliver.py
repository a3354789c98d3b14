"""
The doors to where spans and metrics go.

Nothing of OpenTelemetry is imported before an endpoint is configured: what needs it is opened from here alone.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from telemetry.export import Exports
from telemetry.numbers import Numbers
from telemetry.spans import SpanData
from telemetry.trace_file import TraceFile


class SpanExport(Protocol):
    """Takes finished trees and brings them somewhere, or counts them as lost.  Never waits, never raises."""

    def submit(self, spans: Sequence[SpanData]) -> bool:
        """Hand over one tree, whole or not at all.  Whether it was taken."""

    def drops(self) -> dict[str, int]:
        """Spans lost so far, by reason."""

    def pending_spans(self) -> int:
        """Spans that are neither delivered nor lost yet."""

    async def stop(self, flush_s: float) -> None:
        """Deliver what can be delivered within `flush_s`; the rest is lost and counted."""


class MetricsPush(Protocol):
    """Brings metrics somewhere, now and then, until it is stopped.  Holds up nobody."""

    def start(self) -> None:
        """Begin, on the running event loop."""

    async def stop(self, flush_s: float) -> None:
        """Push once more, within `flush_s`."""


def open_exports(exports: Exports, *, resource: Mapping[str, str], version: str) -> tuple[SpanExport, ...]:
    """
    The ways of spans.  Only here is OpenTelemetry imported, which takes a good part of a second.

    Raises ExportConfigError.
    """
    opened: list[SpanExport] = []
    if exports.trace_file:
        opened.append(TraceFile(exports.trace_file, resource=resource, version=version))
    if exports.traces is not None:
        from telemetry.otlp import OtlpExport  # noqa: PLC0415  see the module docstring

        opened.append(OtlpExport(exports.traces, resource=resource, version=version))
    return tuple(opened)


def open_push(
    exports: Exports, look: Callable[[], Awaitable[Numbers]], *, resource: Mapping[str, str], version: str
) -> MetricsPush | None:
    """The way of metrics, which are what `look` sees; None: there is none."""
    if exports.metrics is None:
        return None
    from telemetry.push import OtlpMetrics  # noqa: PLC0415  see the module docstring

    return OtlpMetrics(exports.metrics, look, resource=resource, version=version)
