"""The admin interface as `pellucid serve` prepares it: off unless asked for, and with a key of its own."""

import socket
from pathlib import Path

import pytest

from launch.admin import FILE, admin_banner, admin_file, admin_key, admin_listener
from launch.errors import UserError
from launch.options import ServeOptions, read_options

KEY = "0123456789abcdef" * 2


def options(**given: str) -> ServeOptions:
    return read_options({"admin_port": "8001", **given}, {})


def test_by_default_there_is_none(tmp_path: Path) -> None:
    plain = read_options({}, {})
    assert plain.admin_port == 0 and plain.admin_host == "127.0.0.1"
    assert admin_key(plain, tmp_path, {"PELLUCID_ADMIN_KEY": "x"}) == {}
    with admin_listener(plain, 8000) as listener:
        assert listener is None
    assert list(tmp_path.iterdir()) == []


def test_the_key_is_made_once_and_for_us_alone(tmp_path: Path) -> None:
    made = admin_key(options(), tmp_path, {})
    (file,) = tmp_path.iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == (FILE, 0o600)
    assert made == {"PELLUCID_ADMIN_KEY": file.read_text().strip()} and len(made["PELLUCID_ADMIN_KEY"]) == 64
    assert admin_key(options(), tmp_path, {}) == made
    assert list(tmp_path.iterdir()) == [file]


def test_a_key_of_the_person_s_own(tmp_path: Path) -> None:
    own = tmp_path / "own"
    named = options(admin_key_file=str(own))
    with pytest.raises(UserError, match=r"--admin-key-file: .*own: no such file; .* makes one"):
        admin_key(named, tmp_path, {})
    own.touch(mode=0o600)
    own.write_text(KEY + "\n")
    assert admin_key(named, tmp_path, {"PELLUCID_ADMIN_KEY": "y" * 32}) == {"PELLUCID_ADMIN_KEY": KEY}
    assert admin_key(options(), tmp_path, {"PELLUCID_ADMIN_KEY": KEY}) == {"PELLUCID_ADMIN_KEY": KEY}
    assert list(tmp_path.iterdir()) == [own]


@pytest.mark.parametrize("key", ["short", "with a space in it", "umlaut-" + "\u00fc" * 16, "x" * 257, "a" * 16 + "\nb"])
def test_a_key_that_cannot_be_used(tmp_path: Path, key: str) -> None:
    own = tmp_path / "own"
    own.touch(mode=0o600)
    own.write_text(key)
    with pytest.raises(UserError, match="own: ") as caught:
        admin_key(options(admin_key_file=str(own)), tmp_path, {})
    with pytest.raises(UserError, match=r"PELLUCID_ADMIN_KEY: an admin key is 16 to 256 .*openssl") as other:
        admin_key(options(), tmp_path, {"PELLUCID_ADMIN_KEY": key})
    assert key not in str(caught.value) and key not in str(other.value)


def test_a_key_that_others_may_read(tmp_path: Path) -> None:
    admin_key(options(), tmp_path, {})
    (tmp_path / FILE).chmod(0o640)
    with pytest.raises(UserError, match=r"others may read the admin key \(mode 0640\): chmod 600"):
        admin_key(options(), tmp_path, {})


def test_where_the_key_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write the admin key"):
        admin_key(options(), tmp_path / "file", {})


def test_it_is_said_where_it_is(tmp_path: Path) -> None:
    on_all = options(admin_host="::")
    said = admin_banner(on_all, admin_file(on_all, tmp_path, {}))
    assert "http://[::1]:8001/admin/v1/keys" in said and str(tmp_path / FILE) in said
    assert admin_banner(options(), admin_file(options(), tmp_path, {"PELLUCID_ADMIN_KEY": KEY})) == (
        "API keys, tenants and limits: http://127.0.0.1:8001/admin/v1/keys, with the key in PELLUCID_ADMIN_KEY\n"
    )


def test_ports_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with (
            pytest.raises(UserError, match=rf"port {port} on 127.0.0.1 is in use; choose another with --admin-port"),
            admin_listener(options(admin_port=port), 8000),
        ):
            pass
    with (
        pytest.raises(UserError, match="--admin-port 8001 is the port of the applications"),
        admin_listener(options(), 8001),
    ):
        pass
    with (
        pytest.raises(UserError, match=r"cannot listen on no-such-host.invalid: no such address"),
        admin_listener(options(admin_host="no-such-host.invalid"), 8000),
    ):
        pass
