"""
`pellucid flight`, as click sees it.  What reads and replays is loaded when there is something to read.
"""

import os
import sys
from pathlib import Path

import click

from launch.flags import flags, options_of

Given = str | bool | tuple[str, ...] | None


@click.group()
def flight() -> None:
    """What the processes of `pellucid serve` did last, also of those that are dead."""


@flight.command("list")
@flags("data_dir")
def list_recordings(**given: Given) -> None:
    """Show the recordings in the data directory, the oldest first."""
    from flight.show import table  # noqa: PLC0415 - lazily

    for line in table(folder_of(given)):
        click.echo(line)


@flight.command()
@click.argument("recording", required=False)
@click.option("--journal", is_flag=True, help="Without RECORDING: of an engine, what its scheduler heard and decided.")
@flags("data_dir")
def dump(recording: str | None, journal: bool, **given: Given) -> None:
    """
    Print a recording as JSON lines: its head, then every step and request, or every entry of a journal.

    RECORDING is a name that `list` shows or the beginning of one, such as gateway-0, or a directory; without it, the
    newest of a gateway is taken; of several workers that of the first one, which has the steps.
    """
    from flight.show import lines  # noqa: PLC0415 - lazily

    for line in lines(folder_of(given), recording, journal=journal):
        click.echo(line)


@flight.command()
@click.argument("recording", required=False)
@flags("data_dir")
def replay(recording: str | None, **given: Given) -> None:
    """
    Run an engine's journal through the scheduler of this version, and compare every plan.

    RECORDING is as for `dump`; without it, the newest of an engine is taken.  Exit code 1: a plan differs.
    """
    from flight.replay import replayed  # noqa: PLC0415 - lazily

    words, same = replayed(folder_of(given), recording)
    click.echo(words)
    sys.exit(0 if same else 1)


def folder_of(given: dict[str, Given]) -> Path:
    """Where the recordings are, by the options that say where data is."""
    from launch.store import FLIGHT, data_dir  # noqa: PLC0415 - lazily

    return data_dir(options_of(given).data_dir, dict(os.environ)) / FLIGHT
