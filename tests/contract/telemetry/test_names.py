"""
The names of spans' attributes: a change of them is a change of the interface.
"""

import os
from pathlib import Path

import pytest

from telemetry import names

GOLDEN = Path(__file__).parent / "golden" / "names.txt"


def told() -> str:
    """Each constant with its value, tables line by line."""
    lines = []
    for constant, value in vars(names).items():
        if constant.isupper():
            pairs = value.items() if isinstance(value, dict) else [("", value)]
            lines += [f"{constant}{f'[{key}]' if key else ''} = {text}" for key, text in pairs]
    return "\n".join(lines) + "\n"


def test_names_are_as_they_were() -> None:
    """Golden: PELLUCID_WRITE_GOLDEN=1 writes the new ones."""
    if os.environ.get("PELLUCID_WRITE_GOLDEN"):
        GOLDEN.write_text(told())
        pytest.fail(f"{GOLDEN.name} was written: read the difference, then run again without the variable")
    assert told() == GOLDEN.read_text()


def test_what_is_ours_is_told_from_the_conventions() -> None:
    for line in told().splitlines():
        constant, _, name = line.partition(" = ")
        if "." in name and not constant.startswith(("SCHEMA", "GEN_AI_VERSION")):
            known = ("pellucid.", "gen_ai.", "http.", "url.", "service.", "error.")
            assert name.startswith(known), f"{constant}: {name}"
