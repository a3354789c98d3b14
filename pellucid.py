"""
The command line.

It imports lazily: what is not needed to answer is not loaded.  litestar never is, and torch only by `quantize` at
work; they live in the processes that `serve` starts.  A user's mistake is one line on stderr and exit code 2.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

from bench.command import bench
from dashboards.command import dashboards
from diagnosis.command import doctor, why
from flight.command import flight
from launch.errors import UserError
from launch.flags import ENGINE_OPTIONS, flags, options_of
from launch.keys import keys
from launch.parse import nearest
from quant.command import quantize

VERSION = "0.1.0"
INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def cli() -> None:
    """Serve a language model, and see where every nanosecond and every KV slot went."""


@cli.command(epilog="Every option is also a variable, PELLUCID_MAX_QUEUE for --max-queue, and a key of the TOML file.")
@flags()
def serve(**given: str | bool | tuple[str, ...] | None) -> None:
    """Start the engine and the gateway, and keep them running."""
    options = options_of(given)
    from launch.serve import serve as run  # noqa: PLC0415 - lazily

    sys.exit(run(options, dict(os.environ), click.echo))


@cli.command()
@click.option(
    "--listen", required=True, metavar="tcp://HOST:PORT", help="Where gateways find it; port 0 takes a free one."
)
@flags(*ENGINE_OPTIONS)
def engine(listen: str, **given: str | bool | tuple[str, ...] | None) -> None:
    """Run an engine alone, for gateways on other machines that know the same secret."""
    options = options_of(given)
    from launch.engine import run_engine  # noqa: PLC0415 - lazily

    sys.exit(run_engine(options, listen, dict(os.environ), click.echo))


@cli.group()
def model() -> None:
    """The models on this machine."""


@model.command()
@click.argument("name", required=False)
@flags("data_dir")
def pull(name: str | None, **given: str | bool | tuple[str, ...] | None) -> None:
    """Fetch the model NAME, by default the one that `serve` takes; nothing happens if it is here."""
    options = options_of(given)
    from launch.store import Store, data_dir  # noqa: PLC0415 - lazily

    found = Store(data_dir(options.data_dir, dict(os.environ))).pull(name or options.model)
    click.echo(f"{found.name}: {found.path}")


@model.command("list")
@flags("data_dir")
def list_models(**given: str | bool | tuple[str, ...] | None) -> None:
    """Show the models that are here, and the known ones that could be."""
    options = options_of(given)
    from launch.known import KNOWN_MODELS  # noqa: PLC0415 - lazily
    from launch.sizes import format_bytes  # noqa: PLC0415 - lazily
    from launch.store import Store, data_dir  # noqa: PLC0415 - lazily

    found = Store(data_dir(options.data_dir, dict(os.environ))).installed()
    for item in found:
        click.echo(f"{item.name}  {format_bytes(item.size_bytes)}  {item.path}")
    for name, known in KNOWN_MODELS.items():
        if name not in {item.name for item in found}:
            click.echo(f"{name}  {format_bytes(known.size_bytes)}  not here: pellucid model pull {name}")


@cli.command()
def version() -> None:
    """Show the version."""
    click.echo(f"pellucid {VERSION}")


def _on_sigterm(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


cli.add_command(bench)
cli.add_command(dashboards)
cli.add_command(doctor)
cli.add_command(flight)
cli.add_command(keys)
cli.add_command(quantize)
cli.add_command(why)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script.  `arguments`: instead of those of the process."""
    # Before the supervisor has its own handlers: leave through the finally blocks, so that a pull cleans up.
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        code = cli.main(arguments, prog_name="pellucid", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        _complain("interrupted")
        code = INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        code = 2
    except click.NoSuchOption as error:
        known = [name for option in (error.ctx.command.params if error.ctx else []) for name in option.opts]
        _complain(f"unknown option {error.option_name}{nearest(error.option_name, known)}")
        code = 2
    except click.ClickException as error:
        _complain(error.format_message())
        code = 2
    except UserError as error:
        _complain(str(error))
        code = 2
    sys.exit(code)


def _complain(message: str) -> None:
    click.echo(f"pellucid: {' '.join(message.split())}", err=True)


if __name__ == "__main__":
    main()
