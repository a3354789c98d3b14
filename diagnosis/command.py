"""
`pellucid why` and `pellucid doctor`, as click sees them.  What reads records is loaded when there is something to read.
"""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from launch.errors import UserError
from launch.flags import flags

URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "PELLUCID_API_KEY"
FOUND = 1
Given = str | bool | tuple[str, ...] | None

_SECONDS_A_MINUTE = 60.0


def _sources(command: Callable[..., None]) -> Callable[..., None]:
    """Where to look: the options that both commands have."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="For programs."),
        click.option(
            "--flight", "recording", metavar="RECORDING", help="A flight recording of a gateway, by name or directory."
        ),
        click.option("--url", metavar="URL", default=URL, show_default=True, help="A running system."),
    ):
        command = option(command)
    return command


@click.command(epilog=f"With API keys: {KEY_VARIABLE}, in the environment.")
@click.argument("request_id")
@_sources
@click.option("--trace", metavar="FILE", help="A file of traces that --export-trace has written.")
@click.option("--jaeger", metavar="URL", help="Jaeger 2, where REQUEST_ID may be the id of a trace.")
@flags("data_dir")
def why(
    request_id: str,
    url: str,
    recording: str | None,
    trace: str | None,
    jaeger: str | None,
    as_json: bool,
    **given: Given,
) -> None:
    """
    Say why a request took as long as it did.

    REQUEST_ID is the `id` of an answer, or its x-request-id; `/debug/requests` lists them.
    """
    from diagnosis.sources import asked  # noqa: PLC0415 - lazily
    from diagnosis.words import why_lines  # noqa: PLC0415 - lazily

    if sum(one is not None for one in (recording, trace, jaeger)) > 1:
        raise UserError("--flight, --trace and --jaeger: one of them")
    if trace is not None or jaeger is not None:
        answer = asked.why_traced(request_id, trace=trace, jaeger=jaeger)
    elif recording is not None:
        answer = asked.why_recorded(request_id, _recording(recording, given))
    else:
        answer = asked.why_live(request_id, url, os.environ.get(KEY_VARIABLE, ""))
    _show(answer, why_lines(answer), as_json=as_json)


@click.command(epilog=f"Exit code {FOUND}: something was found.  With API keys: {KEY_VARIABLE}, in the environment.")
@_sources
@click.option("--scrape", metavar="FILE|URL", help="What /metrics says, or said: means of everything since the start.")
@click.option("--minutes", type=click.FloatRange(1 / 60, 60), default=5, show_default=True, help="How far back.")
@flags("data_dir")
def doctor(url: str, recording: str | None, scrape: str | None, minutes: float, as_json: bool, **given: Given) -> None:
    """Say what makes requests slow, and what to change; nothing, where all is well."""
    from diagnosis.sources import asked  # noqa: PLC0415 - lazily
    from diagnosis.words import report_lines  # noqa: PLC0415 - lazily

    if recording is not None and scrape is not None:
        raise UserError("--flight and --scrape: one of them")
    if not math.isfinite(minutes):
        raise UserError("--minutes must be a number from 1/60 to 60")
    seconds = minutes * _SECONDS_A_MINUTE
    key = os.environ.get(KEY_VARIABLE, "")
    if scrape is not None:
        report = asked.report_scraped(scrape, key)
    elif recording is not None:
        report = asked.report_recorded(_recording(recording, given), seconds)
    else:
        report = asked.report_live(url, seconds, key)
    _show(report, report_lines(report), as_json=as_json)
    sys.exit(FOUND if report.findings else 0)


def _recording(name: str, given: dict[str, Given]) -> Path:
    from flight.choose import chosen  # noqa: PLC0415 - lazily
    from flight.command import folder_of  # noqa: PLC0415 - lazily
    from telemetry.flight import together  # noqa: PLC0415 - lazily

    path = chosen(folder_of(given), name, kind="records")
    if (several := together(path)) is not None:
        click.echo(f"Taken together: {several.said()}", err=True)  # What is asked for stands alone, for programs.
    return path


def _show(answer: msgspec.Struct, lines: list[str], *, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2))
        return
    for line in lines:
        click.echo(line)
