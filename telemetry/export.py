"""
Where finished spans and metrics go: the settings.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

GRPC_PORT = 4317
OtlpProtocol = Literal["grpc", "http/protobuf"]
Signal = Literal["traces", "metrics"]


class ExportConfigError(ValueError):
    """The OTLP settings make no sense; the message is for the person who wrote them."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where spans or metrics go.  For HTTP the URL is complete, `/v1/traces` included."""

    protocol: OtlpProtocol
    url: str

    @property
    def shown(self) -> str:
        """The URL without user, password and query, fit for a log."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exports:
    """All ways out of one process, and what takes them."""

    traces: Target | None = None
    metrics: Target | None = None
    trace_file: str = ""
    trace_sample: float = 1.0
    """The share of requests whose trace is kept without another reason."""

    @property
    def has_traces(self) -> bool:
        """Whether anybody wants spans."""
        return self.traces is not None or bool(self.trace_file)

    def sentences(self) -> list[str]:
        """What goes where, for the log."""
        targets = {"spans": self.traces, "metrics": self.metrics}
        said = [f"{what} go to {to.shown} ({to.protocol})" for what, to in targets.items() if to is not None]
        return [*said, f"spans are written to {self.trace_file}"] if self.trace_file else said


def exports(
    *, endpoint: str, metrics: bool, trace_file: str, trace_sample: float, environ: Mapping[str, str]
) -> Exports:
    """
    What the options say, or else the OTEL_* variables.

    Raises ExportConfigError.

    Args:
        endpoint: of `--otlp-endpoint`.
        metrics: whether metrics go there, too; OTEL_METRICS_EXPORTER may say so as well.
        trace_file: of `--export-trace`; it can be written.
        trace_sample: of `--trace-sample`.
        environ: the environment.
    """
    wanted = metrics or environ.get("OTEL_METRICS_EXPORTER") == "otlp"
    where = target(endpoint, environ, signal="metrics") if wanted else None
    if metrics and where is None and environ.get("OTEL_SDK_DISABLED", "").lower() != "true":
        raise ExportConfigError("--otlp-metrics needs to know where: --otlp-endpoint")
    if trace_file:
        check_trace_file(trace_file)
    return Exports(traces=target(endpoint, environ), metrics=where, trace_file=trace_file, trace_sample=trace_sample)


def open_append(path: str) -> int:
    """A descriptor that appends to a regular file, which is made where there is none.  Raises ExportConfigError."""
    try:
        # Without O_NONBLOCK a pipe that nobody reads would hold us here.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise ExportConfigError(f"the trace file {path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ExportConfigError(f"the trace file {path} is no regular file")
    return descriptor


def check_trace_file(path: str) -> None:
    """Raises ExportConfigError where nothing can be appended."""
    os.close(open_append(path))


def target(option: str, environ: Mapping[str, str], *, signal: Signal = "traces") -> Target | None:
    """
    Where spans or metrics go, from `--otlp-endpoint` or else the OTEL_* variables; None: nowhere.

    Raises ExportConfigError.
    """
    of_signal = signal.upper()
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get(f"OTEL_{of_signal}_EXPORTER") == "none":
        return None
    base = option or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    complete = "" if option else environ.get(f"OTEL_EXPORTER_OTLP_{of_signal}_ENDPOINT", "")
    url = complete or base
    if not url:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.hostname:
        raise ExportConfigError(f"the OTLP endpoint {url!r} is no URL like http://127.0.0.1:4318")
    named = environ.get(f"OTEL_EXPORTER_OTLP_{of_signal}_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = _protocol(parts.scheme, parts.port, named or "")
    if protocol == "grpc":
        scheme = "https" if parts.scheme in ("https", "grpcs") else "http"
        return Target("grpc", f"{scheme}://{parts.netloc}")
    return Target("http/protobuf", url if complete else f"{url.rstrip('/')}/v1/{signal}")


def _protocol(scheme: str, port: int | None, named: str) -> OtlpProtocol:
    if scheme.startswith("grpc"):
        return "grpc"
    match named:
        case "grpc" | "http/protobuf":
            return named
        case "":
            return "grpc" if port == GRPC_PORT else "http/protobuf"
    raise ExportConfigError(f"the OTLP protocol {named!r} is not supported: grpc or http/protobuf")
