"""
What tests of exporters have in common.
"""

import pytest

from telemetry import otlp


@pytest.fixture
def quick_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings or proxies of the machine, and a quick exporter."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL", "HEADERS", "INSECURE"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    monkeypatch.setattr(otlp, "BATCH_PERIOD_S", 0.02)
