"""An engine alone: its secret, its address, and that a gateway elsewhere finds it."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import engine
from launch.errors import UserError
from launch.options import read_options
from launch.parse import parse_engines
from launch.secret import engine_secret

SECRET = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("", ()),
        ("tcp://10.0.0.7:9000", ("tcp:10.0.0.7:9000",)),
        ("tcp://a:1, tcp://B:2", ("tcp:a:1", "tcp:b:2")),
        ("tcp://[::1]:9000", ("tcp:::1:9000",)),
    ],
)
def test_addresses(text: str, parsed: tuple[str, ...]) -> None:
    assert parse_engines(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "h:1",
        "tcp:h:1",
        "tcp://h",
        "tcp://:1",
        "tcp://h:x",
        "tcp://h:99999",
        "tcp://h:1/x",
        "tcp://h:1?x",
        "tcp://u@h:1",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no address such as|no user and no password"):
        parse_engines(text)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_mistake(text: str) -> None:
    try:
        parse_engines(text)
    except ValueError:
        pass


def test_the_secret_is_in_a_file_of_ones_own_or_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    named = read_options({"engine_secret_file": str(file)}, {})
    assert engine_secret(named, {}) == {"PELLUCID_ENGINE_SECRET": SECRET}
    assert engine_secret(named, {"PELLUCID_ENGINE_SECRET": "x" * 32}) == {"PELLUCID_ENGINE_SECRET": SECRET}
    plain = read_options({}, {})
    assert engine_secret(plain, {"PELLUCID_ENGINE_SECRET": "x" * 32}) == {"PELLUCID_ENGINE_SECRET": "x" * 32}
    with pytest.raises(UserError, match="engines on a network need a secret"):
        engine_secret(plain, {})
    file.chmod(0o640)
    with pytest.raises(UserError, match=r"others may read the secret of the engines \(mode 0640\): chmod 600"):
        engine_secret(named, {})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"short", "at least 32 bytes"),
        (b"", "engines on a network need a secret"),
        (b"x" * 40 + b"\0y", "one line"),
        (b"x" * 40 + b"\ny", "one line"),
    ],
)
def test_a_file_that_holds_no_secret(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(UserError, match=words) as caught:
        engine_secret(read_options({"engine_secret_file": str(file)}, {}), {})
    assert "xxx" not in str(caught.value) and "short" not in str(caught.value)


def test_any_bytes_are_a_secret(tmp_path: Path) -> None:
    """As long as an environment can hold them."""
    file = tmp_path / "secret"
    file.write_bytes(bytes(range(128, 200)))
    file.chmod(0o600)
    found = engine_secret(read_options({"engine_secret_file": str(file)}, {}), {})["PELLUCID_ENGINE_SECRET"]
    assert os.fsencode(found) == bytes(range(128, 200))


def test_the_banner_says_what_to_type_elsewhere() -> None:
    assert "pellucid serve --replicas 0 --engine tcp://10.0.0.7:9 " in engine.banner("m", "10.0.0.7", 9, 1.0)
    assert "--engine tcp://[fd00::7]:9 " in engine.banner("m", "fd00::7", 9, 1.0)
    assert "0.0.0.0" not in engine.banner("m", "0.0.0.0", 9, 1.0)
    assert "not encrypted" in engine.banner("m", "h", 9, 1.0)
