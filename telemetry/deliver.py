"""
The door to the exporter of spans.

Nothing of OpenTelemetry is imported before an endpoint is configured: `telemetry.otlp` is opened from here alone.
"""

from collections.abc import Sequence
from typing import Protocol

from telemetry.export import Target
from telemetry.spans import SpanData


class SpanExport(Protocol):
    """Takes finished trees and brings them to a collector, or counts them as lost.  Never waits, never raises."""

    def submit(self, spans: Sequence[SpanData]) -> None:
        """Hand over one tree, whole or not at all."""

    def drops(self) -> dict[str, int]:
        """Spans lost so far, by reason."""

    def pending_spans(self) -> int:
        """Spans that are neither delivered nor lost yet."""

    async def stop(self, flush_s: float) -> None:
        """Deliver what can be delivered within `flush_s`; the rest is lost and counted."""


def open_export(to: Target, *, version: str) -> SpanExport:
    """The way to `to`.  Only here is OpenTelemetry imported, which takes a good part of a second."""
    from telemetry.otlp import OtlpExport  # noqa: PLC0415  see the module docstring

    return OtlpExport(to, version=version)
