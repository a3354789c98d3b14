"""`pellucid keys` on real servers, and several servers with one data directory."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache import embedded
from cache.errors import Misconfigured
from cache.pepper import make_pepper, read_pepper
from launch.valkey import DIRECTORY, embedded_valkey, log_file
from tests.cache import servers
from tests.launch.test_cli import pellucid

WAIT_S = 30.0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def run(data: Path, *arguments: str, **environ: str) -> str:
    done = pellucid(data.parent, "keys", *arguments, "--data-dir", str(data), **environ)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_limits_of_tenants_and_organisations(data: Path, tmp_path: Path) -> None:
    with servers.embedded(tmp_path / "v") as server:
        of = {"PELLUCID_REDIS_URL": server.url}
        said = run(data, "tenant", "search", "--organisation", "acme", "--rpm", "600", "--spend-per-day", "1.5", **of)
        assert said == "tenant search of acme  rpm=600,spend-per-day=1.5  local\n"
        assert run(data, "organisation", "acme", "--concurrent", "3", "--tpm", "9", **of) == (
            "organisation acme  tpm=9,concurrent=3\n"
        )
        run(data, "tenant", "search", "--policy", "closed", **of)  # the rest stays
        assert run(data, "organisation", "acme", **of) == "organisation acme  tpm=9,concurrent=3\n"
        assert run(data, "tenants", **of).splitlines() == [
            "organisation acme  tpm=9,concurrent=3",
            "tenant search of acme  rpm=600,spend-per-day=1.5  closed",
        ]
        run(data, "tenant", "search", "--rpm", "5", **of)  # in place of all limits
        shown = json.loads(run(data, "tenants", "--json", **of))
        assert shown["tenants"] == [
            {"name": "search", "organisation": "acme", "limits": {"requests_per_minute": 5}, "policy": "closed"}
        ]
        assert run(data, "tenant", "search", "--unlimited", **of) == "tenant search of acme  unlimited  closed\n"
        assert run(data, "organisation", "acme", "--unlimited", **of) == "organisation acme  unlimited\n"
    assert not data.exists()


def test_a_life_of_a_key(data: Path) -> None:
    """Four commands, each with a Valkey for as long as it takes: what one writes, the next one finds."""
    flags = ("--tenant", "blue", "--rpm", "5", "--tpm", "900", "--concurrent", "2", "--spend-per-day", "1.5")
    more = ("--allow-model", "m", "--priority", "high", "--weight", "3", "--expires-in", "30d", "--label", "hi there")
    issued = json.loads(run(data, "create", *flags, *more, "--json"))
    assert set(issued) == {"key_id", "key"} and issued["key_id"] in issued["key"]
    (key,) = json.loads(run(data, "list", "--json"))
    assert key["expires_s"] - key["created_s"] in (2_592_000, 2_592_001)
    assert key["limits"] == {
        "requests_per_minute": 5,
        "tokens_per_minute": 900,
        "concurrent": 2,
        "spend_micros_per_day": 1_500_000,
    }
    shown = {name: key[name] for name in ("id", "tenant", "models", "priority", "weight", "label", "state")}
    assert shown == {
        "id": issued["key_id"],
        "tenant": "blue",
        "models": ["m"],
        "priority": "high",
        "weight": 3,
        "label": "hi there",
        "state": "active",
    }
    rotated = json.loads(run(data, "rotate", issued["key_id"], "--grace", "90s", "--json"))
    assert rotated["key_id"] == issued["key_id"] and rotated["key"] != issued["key"]
    assert run(data, "revoke", rotated["key"]) == f"{issued['key_id']} is revoked.\n"  # pasted whole: it is understood
    assert run(data, "list").startswith(f"{issued['key_id']}  revoked   blue  rpm=5,tpm=900,concurrent=2")
    assert (mode(data / "pepper"), mode(data / DIRECTORY)) == (0o600, 0o700)
    assert list((data / "run").iterdir()) == []
    kept = b"".join(path.read_bytes() for path in data.rglob("*") if path.is_file())
    assert issued["key"].encode() not in kept and issued["key"].rpartition("-")[2].encode() not in kept


@pytest.mark.parametrize("command", ["list", "tenants"])
def test_listing_nothing_starts_nothing(data: Path, command: str) -> None:
    assert run(data, command) == ""
    assert not data.exists()


def test_what_is_not_there_cannot_be_revoked(data: Path) -> None:
    done = pellucid(data.parent, "keys", "revoke", "0123456789abcdef", "--data-dir", str(data))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "pellucid: there is no such key\n")


def test_a_server_of_its_own_by_url(data: Path, tmp_path: Path) -> None:
    with servers.embedded(tmp_path / "v") as server:
        run(data, "create", "--redis-url", server.url, PELLUCID_PEPPER="a pepper of its own")
        assert server.ask("HLEN", "pellucid:{keys}:keys") == b":1\r\n"
    assert not data.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        ("--tenant", "a b"),
        ("--tenant", "acme\n"),
        ("--label", "\x1b[2J"),
        ("--allow-model", "m\n"),
        ("--expires-in", "0s"),
        ("--rpm", "-1"),
        ("--spend-per-day", "nan"),
    ],
)
def test_what_no_key_may_have_is_said_before_anything_is_made(data: Path, wrong: tuple[str, str]) -> None:
    done = pellucid(data.parent, "keys", "create", *wrong, "--data-dir", str(data))
    assert (done.returncode, done.stdout) == (2, "")
    assert wrong[0] in done.stderr and "Traceback" not in done.stderr
    assert not data.exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("tenant", "a b"), "'NAME'"),
        (("organisation", "acme\n"), "'NAME'"),
        (("tenant", "a", "--organisation", "{}"), "'--organisation'"),
        (("tenant", "a", "--rpm", "x"), "'--rpm'"),
        (("tenant", "a", "--unlimited", "--rpm", "1"), "--unlimited takes all limits away"),
    ],
)
def test_what_no_tenant_may_have_is_said_before_anything_is_made(data: Path, wrong: tuple[str, ...], said: str) -> None:
    done = pellucid(data.parent, "keys", *wrong, "--data-dir", str(data))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not data.exists()


def test_a_key_for_a_server_whose_pepper_is_elsewhere(data: Path, tmp_path: Path) -> None:
    """A key made with another pepper opens nothing, and one that is rotated with it no more."""
    with servers.embedded(tmp_path / "v") as server:
        made = json.loads(run(data, "create", "--json", "--redis-url", server.url))
        elsewhere = tmp_path / "elsewhere"
        for arguments in (("create",), ("rotate", made["key_id"])):
            done = pellucid(tmp_path, "keys", *arguments, "--redis-url", server.url, "--data-dir", str(elsewhere))
            assert done.returncode == 2 and "pepper" in done.stderr and "PELLUCID_PEPPER" in done.stderr
        assert not elsewhere.exists()
        (elsewhere).mkdir()
        (data / "pepper").rename(elsewhere / "pepper")
        run(elsewhere, "rotate", made["key_id"], "--redis-url", server.url)


def test_a_data_directory_with_a_long_path(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    run(long, "create")
    assert len(run(long, "list").splitlines()) == 1


def test_a_valkey_that_cannot_start_says_why(data: Path) -> None:
    run(data, "create")
    next((data / DIRECTORY / "appendonlydir").glob("*.manifest")).write_text("nonsense")
    done = pellucid(data.parent, "keys", "create", "--data-dir", str(data))
    assert done.returncode == 2
    assert done.stderr.startswith("pellucid: the embedded Valkey does not start: ") and done.stderr.count("\n") == 1


@contextlib.contextmanager
def standing_by(data: Path, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The child of one `pellucid serve`."""
    folder.mkdir()
    _, spec = embedded_valkey(data, folder)
    process = subprocess.Popen(spec.command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def is_server(process: "subprocess.Popen[bytes]") -> bool:
    """Whether it has become Valkey, and does not wait to become it."""
    program, _, _ = Path(f"/proc/{process.pid}/cmdline").read_bytes().partition(b"\0")
    return b"valkey-server" in program


def until_answers(directory: Path) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not asyncio.run(embedded.answers(directory)):
        assert time.monotonic() < deadline_s, "nobody answers"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_next_server_takes_over_when_the_first_is_killed(data: Path, tmp_path: Path) -> None:
    with standing_by(data, tmp_path / "one") as first, standing_by(data, tmp_path / "two") as second:
        until_answers(data / DIRECTORY)
        made = json.loads(run(data, "create", "--json"))  # asks the one that runs
        holder, other = (first, second) if is_server(first) else (second, first)
        assert is_server(holder) and not is_server(other)
        holder.kill()
        holder.wait()
        until_answers(tmp_path / "two" / DIRECTORY)
        assert made["key_id"] in run(data, "list")
        assert other.poll() is None
    assert log_file(data).exists()


def test_a_pepper_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pepper"
    assert read_pepper(file, {}) is None and read_pepper(None, {}) is None
    made = make_pepper(file, {})
    assert make_pepper(file, {}) == read_pepper(file, {}) == made
    assert [path.name for path in tmp_path.iterdir()] == ["pepper"]
    file.chmod(0o640)
    with pytest.raises(Misconfigured, match="mode 0640"):
        read_pepper(file, {})


def test_a_short_pepper_is_refused_without_a_word_of_it(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="PELLUCID_PEPPER: .* at least 16 bytes") as caught:
        read_pepper(tmp_path / "p", {"PELLUCID_PEPPER": "short"})
    assert "short" not in str(caught.value)


def test_keys_open_the_door_to_other_addresses(data: Path, tmp_path: Path) -> None:
    """The refusal of other addresses goes once there is a key; the next complaint is about the model."""
    arguments = ("serve", "--host", "0.0.0.0", "--port", "0", "--model", "absent.gguf", "--data-dir", str(data))
    assert "there are no API keys yet" in pellucid(tmp_path, *arguments).stderr
    run(data, "create")
    assert "no such model file" in pellucid(tmp_path, *arguments).stderr
