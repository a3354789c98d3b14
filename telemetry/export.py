"""
Where finished spans go: the settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

GRPC_PORT = 4317
OtlpProtocol = Literal["grpc", "http/protobuf"]


class ExportConfigError(ValueError):
    """The OTLP settings make no sense; the message is for the person who wrote them."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where spans go.  For HTTP the URL is complete, `/v1/traces` included."""

    protocol: OtlpProtocol
    url: str

    @property
    def shown(self) -> str:
        """The URL without user, password and query, fit for a log."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def target(option: str, environ: Mapping[str, str]) -> Target | None:
    """
    Where spans go, from `--otlp-endpoint` or else the OTEL_* variables; None: nowhere.

    Raises ExportConfigError.
    """
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    base = option or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    complete = "" if option else environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    url = complete or base
    if not url:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.hostname:
        raise ExportConfigError(f"the OTLP endpoint {url!r} is no URL like http://127.0.0.1:4318")
    protocol = _protocol(parts.scheme, parts.port, environ)
    if protocol == "grpc":
        scheme = "https" if parts.scheme in ("https", "grpcs") else "http"
        return Target("grpc", f"{scheme}://{parts.netloc}")
    return Target("http/protobuf", url if complete else url.rstrip("/") + "/v1/traces")


def _protocol(scheme: str, port: int | None, environ: Mapping[str, str]) -> OtlpProtocol:
    if scheme.startswith("grpc"):
        return "grpc"
    named = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or ""
    match named:
        case "grpc" | "http/protobuf":
            return named
        case "":
            return "grpc" if port == GRPC_PORT else "http/protobuf"
    raise ExportConfigError(f"the OTLP protocol {named!r} is not supported: grpc or http/protobuf")
