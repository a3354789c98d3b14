"""The check of dependencies: licences as packages write them, and an audit that says so where it cannot look."""

import json
import sys
from email.message import Message

import pytest

from tests.tidy.dependencies import LOCK, accepted, audit, audit_command, licence, licence_complaints, locked


def package(*fields: tuple[str, str]) -> Message:
    message = Message()
    for name, value in fields:
        message[name] = value
    return message


@pytest.mark.parametrize(
    ("fields", "expression"),
    [
        ([("License-Expression", "MIT OR Apache-2.0"), ("License", "GPL")], "MIT OR Apache-2.0"),
        ([("License", "Apache 2.0")], "Apache-2.0"),
        ([("License", "MIT License\n\nCopyright (c) somebody ...")], "MIT"),
        ([("Classifier", "License :: OSI Approved :: BSD License"), ("Classifier", "Topic :: X")], "BSD-3-Clause"),
        ([("Classifier", "License :: DFSG approved"), ("Classifier", "License :: OSI Approved :: MIT License")], "MIT"),
        ([("Classifier", "Topic :: Internet")], ""),
    ],
)
def test_what_a_package_says_of_its_licence(fields: list[tuple[str, str]], expression: str) -> None:
    assert licence(package(*fields)) == expression


@pytest.mark.parametrize(
    ("expression", "good"),
    [
        ("MIT", True),
        ("MIT AND Apache-2.0 WITH LLVM-exception", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False),
        ("AGPL-3.0-or-later", False),
        ("LGPL-2.1-only", False),
        ("(MIT OR ISC) AND MIT", False),
        ("Custom", False),
        ("", False),
    ],
)
def test_what_is_accepted(expression: str, good: bool) -> None:
    assert accepted(expression) is good


def test_all_that_is_locked_is_installed_and_has_a_licence_that_we_accept() -> None:
    names = locked(LOCK.read_text())
    assert len(names) > 50
    assert list(licence_complaints(names)) == []
    assert list(licence_complaints(["no-such-package-of-anybody"])) != []


def says(packages: object, code: int = 0) -> list[str]:
    """A command that says this, as pip-audit does."""
    return [sys.executable, "-c", f"import sys; print({json.dumps({'dependencies': packages})!r}); sys.exit({code})"]


def test_an_audit_tells_what_it_has_found_and_what_it_could_not_ask() -> None:
    hole = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.1"]}
    packages = [
        {"name": "good", "version": "1", "vulns": []},
        {"name": "bad", "version": "2", "vulns": [hole]},
        {"name": "strange", "skip_reason": "not found"},
    ]
    found, asked, left_out = audit(says(packages, code=1))
    assert found == ["bad 2: PYSEC-1, mended in: 2.1"]
    assert asked == 2 and "1 of 3" in left_out and "not found" in left_out
    assert audit(says(packages[:1])) == ([], 1, "")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("import sys; sys.exit('ConnectionError: no route')", "ConnectionError: no route"),
        ("pass", "it says nothing"),
        ("print('{}')", "it says nothing"),
    ],
)
def test_an_audit_that_cannot_look_ends_and_says_so(command: str, words: str) -> None:
    found, asked, left_out = audit([sys.executable, "-c", command], limit_s=1.0)
    assert (found, asked) == ([], 0) and words in left_out


def test_it_is_pip_audit_that_is_asked() -> None:
    pytest.importorskip("pip_audit", reason="pip-audit is not installed: make install")
    assert audit_command()[2] == "pip_audit"
