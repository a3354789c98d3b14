"""
The rows of the table of settings as options of click.
"""

import os
from collections.abc import Callable
from typing import TypeVar

import click

from launch.options import OPTIONS, Option, ServeOptions, read_options

Command = TypeVar("Command", bound=Callable[..., None])
ENGINE_OPTIONS = (
    "model",
    "model_name",
    "data_dir",
    "engine_secret_file",
    "dtype",
    "quantization",
    "kv_dtype",
    "tensor_parallel",
    "pipeline_parallel",
    "rank_timeout_s",
    "interconnect",
    "threads",
    "max_context",
    "kv_memory",
    "max_queue",
    "max_batch",
    "max_step_tokens",
    "prefix_cache",
    "speculative",
    "draft_model",
    "flight_memory",
    "log_level",
    "log_format",
)
"""Those of `pellucid serve` that mean something for an engine."""
Given = dict[str, str | bool | tuple[str, ...] | None]


def _flag(option: Option) -> Callable[[Command], Command]:
    """A row of the table as a click option.  Values stay text: `read_options` parses all four places alike."""
    if option.switch:
        names = f"{option.flag}/--no-{option.flag.removeprefix('--')}"
        return click.option(option.name, names, default=None, help=_help(option))
    if option.repeats:
        return click.option(option.name, option.flag, multiple=True, metavar=option.metavar, help=_help(option))
    return click.option(option.name, option.flag, type=str, metavar=option.metavar, help=_help(option))


def _help(option: Option) -> str:
    return f"{option.help} [{option.default}]" if option.default else option.help


def flags(*names: str) -> Callable[[Command], Command]:
    """The options of these names, or all of them, and --config."""

    def decorate(command: Command) -> Command:
        chosen = [option for option in OPTIONS if option.name in names or not names]
        config = click.option("config", "--config", metavar="FILE.toml", help="The same settings in a file.")
        command = config(command)
        for option in reversed(chosen):
            command = _flag(option)(command)
        return command

    return decorate


def options_of(given: Given) -> ServeOptions:
    """What was given on the command line, in the environment and in the file.  Raises UserError."""
    config = given.pop("config")
    assert config is None or isinstance(config, str)
    return read_options(given, os.environ, config)
