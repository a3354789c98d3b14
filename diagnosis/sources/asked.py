"""
The questions of the command line, answered from wherever the records are.
"""

from pathlib import Path

from diagnosis.doctor import Report, examine
from diagnosis.sources.live import fetch, live_report, live_why
from diagnosis.sources.recording import recorded
from diagnosis.sources.scrape import of_scrape
from diagnosis.sources.traces import is_trace_id, of_jaeger, of_trace_file
from diagnosis.why import Why, why
from launch.errors import UserError
from telemetry.evidence import Evidence
from telemetry.flight import together
from telemetry.records import RequestRecord

why_live, report_live = live_why, live_report


def why_recorded(request_id: str, directory: Path) -> Why:
    """From a flight recording.  Raises UserError."""
    evidence = recorded(directory, None)
    several = together(directory)
    return _why(request_id, evidence, several.said() if several is not None else str(directory))


def why_traced(request_id: str, *, trace: str | None, jaeger: str | None) -> Why:
    """From a file of traces, or from Jaeger.  Raises UserError."""
    if trace is not None:
        return _why(request_id, Evidence(requests=of_trace_file(Path(trace).expanduser(), request_id)), trace)
    assert jaeger is not None
    found = of_jaeger(jaeger, request_id)
    named = found[0].request_id if found and is_trace_id(request_id) else request_id
    return _why(named, Evidence(requests=found), jaeger)


def report_recorded(directory: Path, seconds: float) -> Report:
    """From the end of a flight recording.  Raises UserError."""
    return examine(recorded(directory, seconds))


def report_scraped(where: str, key: str) -> Report:
    """From `/metrics`, or a file that holds what it said.  Raises UserError."""
    if where.startswith(("http://", "https://")):
        return examine(of_scrape(fetch(where, key).decode(errors="replace")))
    try:
        return examine(of_scrape(Path(where).expanduser().read_text(errors="replace")))
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}") from None


def _why(request_id: str, evidence: Evidence, where: str) -> Why:
    record: RequestRecord | None = next((one for one in evidence.requests if one.request_id == request_id), None)
    if record is None:
        raise UserError(f"there is no request {request_id!r} in {where}")
    return why(record, evidence)
