"""The documents say what the code does: the table of options, the make targets, the import table."""

import re

import msgspec
import pytest

from bench.command import bench
from dashboards.command import dashboards
from flight.command import flight
from gateway.config import UpstreamOptions
from launch.keys import keys
from launch.options import BY_NAME, OPTIONS, ServeOptions, markdown_table
from pellucid import cli
from quant import settings as quantize
from tests.bench import bench_quantize
from tests.tidy.imports import ROOT, TABLE, tracked

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
UPSTREAMS = (ROOT / "docs/upstreams.md").read_text()
QUANTIZATION = (ROOT / "docs/quantization.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
QUANTIZE_FLAGS = {setting.flag for setting in quantize.SETTINGS} | {"--asym"}


def test_the_readme_has_the_table_of_options() -> None:
    assert markdown_table() in README, "python -c 'from launch.options import *; print(markdown_table())' makes it"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_the_changelog_knows_every_option(option: object) -> None:
    assert f"`{getattr(option, 'flag')}`" in CHANGELOG  # noqa: B009 - pytest hands it over as an object


def test_the_documents_name_no_option_that_does_not_exist() -> None:
    known = {option.flag for option in OPTIONS} | {
        "--config",
        "--help",
        "--strict",
        "--no-prefix-cache",
        "--randomly-seed",
        "--rm",  # docker's
    }
    known |= QUANTIZE_FLAGS
    commands = [
        *keys.commands.values(),
        *bench.commands.values(),
        *dashboards.commands.values(),
        *flight.commands.values(),
        *(cli.commands[name] for name in ("engine", "why", "doctor")),
    ]
    options = [option for command in commands for option in command.params]
    known |= {name for option in options for name in (*option.opts, *option.secondary_opts)}
    for text in (README, CHANGELOG, CONTRIBUTING, QUANTIZATION, UPSTREAMS):
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) - known == set()


def test_the_settings_of_quantize_are_documented() -> None:
    assert quantize.markdown_table() in QUANTIZATION, "its `markdown_table` makes it"
    assert {flag for flag in QUANTIZE_FLAGS if f"`{flag}`" in CHANGELOG} == QUANTIZE_FLAGS


def test_the_document_has_a_place_for_the_measured_table() -> None:
    assert bench_quantize.BEGIN in QUANTIZATION and bench_quantize.END in QUANTIZATION


def test_the_parsed_options_have_one_field_per_row() -> None:
    assert ServeOptions.__struct_fields__ == (*(option.name for option in OPTIONS), "upstreams")
    assert len(BY_NAME) == len(OPTIONS)


@pytest.mark.parametrize("field", msgspec.structs.fields(UpstreamOptions), ids=lambda field: field.name)
def test_the_keys_of_upstreams_are_documented_with_their_defaults(field: msgspec.structs.FieldInfo) -> None:
    default = f"`{field.default}`" if field.default not in ("", msgspec.NODEFAULT) else ""
    assert f"| `{field.name}` | {default} |".replace("|  |", "| |") in UPSTREAMS


def test_the_documents_name_only_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
    named = set(re.findall(r"`make ([a-z]+)", README + CONTRIBUTING + CHANGELOG + QUANTIZATION))
    assert {"serve", "test", "check", "install"} <= named <= targets


def test_the_first_screen_has_the_two_commands() -> None:
    screen = "\n".join(README.splitlines()[:40])
    assert "make serve" in screen and "curl http://127.0.0.1:8000/v1/chat/completions" in screen


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_contributing_has_each_row_of_the_import_table(row: object) -> None:
    modules = getattr(row, "modules")  # noqa: B009 - pytest hands it over as an object
    assert all(f"`{module}`" in CONTRIBUTING for module in modules)


def test_each_recipe_has_at_most_six_steps_and_ends_with_a_test() -> None:
    recipes = re.findall(r"^### (Add .*?)$(.*?)(?=^##|\Z)", CONTRIBUTING, re.MULTILINE | re.DOTALL)
    assert len(recipes) >= 4
    for title, body in recipes:
        steps = re.findall(r"^(\d)\. (.*?)(?=^\d\. |\Z)", body, re.MULTILINE | re.DOTALL)
        assert 1 <= len(steps) <= 6, title
        assert "tests/" in steps[-1][1], title


def test_ci_calls_the_commands_of_the_readme() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert "make test" in script and "make check" in script
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert {str(path) for path in tracked("LICENSE", "Makefile", "requirements.lock")} >= {"LICENSE", "Makefile"}
