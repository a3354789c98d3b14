"""
`pellucid dashboards`, as click sees it.  What renders is loaded when there is something to render.
"""

import re
from pathlib import Path

import click

from launch.errors import UserError

_TARGET = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")


@click.group()
def dashboards() -> None:
    """Grafana dashboards and Prometheus alerts for this version."""


@dashboards.command()
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--target",
    "targets",
    multiple=True,
    default=("127.0.0.1:8000",),
    show_default=True,
    metavar="HOST:PORT",
    help="A gateway, as Prometheus reaches it; may be repeated.",
)
@click.option(
    "--prometheus-url",
    default="http://127.0.0.1:9090",
    show_default=True,
    metavar="URL",
    help="Prometheus, as Grafana reaches it.",
)
def render(directory: Path, targets: tuple[str, ...], prometheus_url: str) -> None:
    """
    Write dashboards, alerts, recording rules and the configuration of Prometheus and Grafana into DIR.

    They are rendered from the metric catalogue; files of an older version are replaced.
    """
    for target in targets:
        if not _TARGET.fullmatch(target):
            raise UserError(f"--target: {target!r} is no address such as 127.0.0.1:8000")
    if not prometheus_url.startswith(("http://", "https://")):
        raise UserError(f"--prometheus-url: {prometheus_url!r} is no URL such as http://127.0.0.1:9090")
    from dashboards.files import render as rendered  # noqa: PLC0415 - lazily
    from dashboards.files import write  # noqa: PLC0415 - lazily

    place = directory.absolute()
    texts = rendered(place, targets=targets, prometheus_url=prometheus_url)
    try:
        write(place, texts)
    except OSError as error:
        raise UserError(f"{place}: cannot write the dashboards: {error.strerror or error}") from error
    click.echo(f"{len(texts)} files in {place}")
