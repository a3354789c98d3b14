"""
`pellucid quantize`, as click sees it.

Nothing heavy is loaded here: `--help` answers without torch, and a mistake is found before a model is looked at.
"""

import os
import sys
from collections.abc import Callable
from typing import TypeVar

import click

from quant.settings import SETTINGS, Setting, read_settings

SPIN_COUNT = "10000"  # as for the engine: threads that spin at barriers starve each other where processors are shared
Command = TypeVar("Command", bound=Callable[..., None])


def _flag(setting: Setting) -> Callable[[Command], Command]:
    """A row of the table as a click option.  Values stay text: `read_settings` parses them."""
    text = f"{setting.help} [{setting.default}]" if setting.default else setting.help
    if not setting.metavar:
        names = f"{setting.flag}/{setting.opposite}" if setting.opposite else setting.flag
        return click.option(setting.name, names, default=None, is_flag=True, help=text)
    return click.option(
        setting.name, setting.flag, type=str, metavar=setting.metavar, multiple=setting.repeats, help=text
    )


def _flags(command: Command) -> Command:
    for setting in reversed(SETTINGS):
        command = _flag(setting)(command)
    return command


@click.command(
    epilog="Exit codes: 0, and DIR is there; 2, a mistake, in one line; 3, the result is below the gate: "
    "its report lies beside DIR as DIR.report.json, and there is no DIR."
)
@click.argument("model")
@_flags
def quantize(model: str, **given: str | bool | tuple[str, ...] | None) -> None:
    """
    Convert MODEL to a quantized checkpoint, and measure what it cost.

    MODEL is whatever `serve` takes.  The result is a directory that `serve`, and other tools of its format, can load.
    """
    settings = read_settings(model, given)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
    from quant.run import run  # noqa: PLC0415 - torch takes seconds to load

    sys.exit(run(settings, dict(os.environ)))
