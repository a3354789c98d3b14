"""The embedded server: reachable by us alone, durable, bounded."""

import importlib.util
import os
import stat
import subprocess
from pathlib import Path

import pytest

from cache import embedded
from cache.errors import Misconfigured
from tests.cache import servers


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "a place"  # with a space: the arguments are words, not a line


async def test_it_answers_on_its_socket_and_nowhere_else(home: Path) -> None:
    assert not await embedded.answers(home)
    with servers.embedded(home) as server:
        assert await embedded.answers(home)
        mode = stat.S_IMODE(home.stat().st_mode)
        assert (mode, b"\r\n0\r\n" in server.ask("CONFIG", "GET", "port")) == (0o700, True)
    assert not await embedded.answers(home)


async def test_it_is_bounded_and_evicts_nothing(home: Path) -> None:
    with servers.embedded(home) as server:
        said = server.ask("CONFIG", "GET", "maxmemory*").decode()
    assert "noeviction" in said and str(embedded.MEMORY_BYTES_MAX) in said


async def test_what_it_has_confirmed_survives_kill_9(home: Path) -> None:
    with servers.embedded(home) as server:
        for number in range(200):
            assert server.ask("SET", f"k{number}", "1") == b"+OK\r\n"
        server.kill()
        server.restart()
        assert server.ask("DBSIZE") == b":200\r\n"


async def test_a_frozen_server_does_not_answer(home: Path) -> None:
    with servers.embedded(home) as server:
        server.freeze()
        assert not await embedded.answers(home)
        server.thaw()
        assert await embedded.answers(home)


def test_the_directory_becomes_ours_alone(home: Path) -> None:
    home.mkdir(mode=0o755)
    embedded.prepare(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Misconfigured, match="--data-dir"):
        embedded.prepare(tmp_path / "file" / "below")


def test_a_path_that_is_too_long_is_said_before_the_server_says_it(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="107 bytes"):
        embedded.server_command(tmp_path / ("x" * 100))


def test_the_url_of_a_strange_path(tmp_path: Path) -> None:
    assert embedded.socket_url(Path("/d?a%20")) == "unix:///d%3Fa%2520/valkey.sock"


def test_without_the_wheel_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Misconfigured, match="--redis-url"):
        embedded.server_binary()


def test_the_binary_is_what_it_is_called() -> None:
    binary = embedded.server_binary()
    assert os.access(binary, os.X_OK)
    assert b"Valkey server v=" in subprocess.run([binary, "--version"], capture_output=True, check=True).stdout
