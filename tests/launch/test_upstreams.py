"""`[[upstream]]` in the configuration file: what is read, and what is refused by its name."""

import socket
from pathlib import Path

import pytest

from gateway.config import UPSTREAMS_MAX, UpstreamOptions
from launch import serve
from launch.errors import UserError
from launch.options import read_options
from launch.store import Model

ONE = '[[upstream]]\nname = "a"\nurl = "http://h:8000"\nmodel = "m"\n'


def read(text: str, tmp_path: Path, **environ: str) -> tuple[UpstreamOptions, ...]:
    file = tmp_path / "pellucid.toml"
    file.write_text(text)
    return read_options({}, environ, str(file)).upstreams


def test_tables_stand_beside_settings(tmp_path: Path) -> None:
    text = f"""
        port = 1
        {ONE}
        [[upstream]]
        name = "b"
        url = "https://host.example/v1"
        model = "m"
        upstream-model = "org/model"
        api_key_env = "THEIR_KEY"
        connect_timeout_s = 1
        first_byte_timeout_s = 2.5
        idle_timeout_s = 3
        probe_interval_s = 4
        requests_max = 5
    """
    first, second = read(text, tmp_path)
    assert first == UpstreamOptions(name="a", url="http://h:8000", model="m")
    assert second == UpstreamOptions(
        name="b",
        url="https://host.example/v1",
        model="m",
        upstream_model="org/model",
        api_key_env="THEIR_KEY",
        connect_timeout_s=1.0,
        first_byte_timeout_s=2.5,
        idle_timeout_s=3.0,
        probe_interval_s=4.0,
        requests_max=5,
    )
    assert read_options({}, {}).upstreams == ()


def test_a_variable_that_a_table_names_is_no_mistake(tmp_path: Path) -> None:
    name = "PELLUCID_" + "THEIR_KEY"
    assert read(ONE + f'api_key_env = "{name}"', tmp_path, **{name: "x"})
    with pytest.raises(UserError, match=f"unknown variable {name}"):
        read(ONE, tmp_path, **{name: "x"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("upstream = 1", "upstream: tables are expected, each below a line [[upstream]]"),
        ("[upstream]\nname = 'a'", "upstream: tables are expected, each below a line [[upstream]]"),
        ("[[upstreams]]\nname = 'a'", "unknown key 'upstreams'; did you mean 'upstream'?"),
        ("[[upstream]]\nname = 'a'\nmodel = 'm'", "upstream 1 ('a'): url is missing"),
        (ONE + "idle_timeout = 3", "upstream 1 ('a'): unknown key 'idle_timeout'; did you mean 'idle_timeout_s'?"),
        (ONE + "api_key = 'secret'", "upstream 1 ('a'): unknown key 'api_key'; did you mean 'api_key_"),
        (ONE + "idle_timeout_s = 'x'", "upstream 1 ('a'): idle_timeout_s: expected `float`, got `str`"),
        (ONE + "requests_max = 0", "upstream 1 ('a'): requests_max: expected `int` >= 1"),
        (ONE + "requests-max = 1\nrequests_max = 1", "upstream 1: 'requests_max' stands there twice"),
        (ONE + ONE, "upstream: 2 upstreams are named 'a': each needs a name of its own"),
        (ONE + ONE.replace('"a"', "3"), "upstream 2: name: expected `str`, got `int`"),
        (ONE.replace("http://h:8000", "http://u:secret@h"), "upstream 1 ('a'): url: a user or password"),
        (
            "".join(ONE.replace('"a"', f'"a{number}"') for number in range(UPSTREAMS_MAX + 1)),
            f"{UPSTREAMS_MAX + 1} upstreams, and {UPSTREAMS_MAX} are the most",
        ),
    ],
)
def test_a_bad_table_is_named_with_what_is_bad(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pellucid.toml: ") as caught:
        read(text, tmp_path)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_key_that_is_not_there_is_seen_before_a_model_is_fetched(tmp_path: Path) -> None:
    file = tmp_path / "pellucid.toml"
    file.write_text(ONE + 'api_key_env = "THEIR_KEY"')
    options = read_options({}, {}, str(file))
    with pytest.raises(UserError, match="upstream 'a': api_key_env: THEIR_KEY: there is no key in it"):
        serve.check_upstream_keys(options, {})
    serve.check_upstream_keys(options, {"THEIR_KEY": "x"})


def test_a_key_may_be_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").write_text("x\n")
    (tmp_path / "key").chmod(0o640)
    file = tmp_path / "pellucid.toml"
    file.write_text(ONE + 'api_key_file = "~/key"')
    options = read_options({}, {}, str(file))
    serve.check_upstream_keys(options, {})
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(UserError, match="everybody on this machine may read it"):
        serve.check_upstream_keys(options, {})


def test_they_reach_the_gateway(tmp_path: Path) -> None:
    file = tmp_path / "pellucid.toml"
    file.write_text(ONE)
    options = read_options({}, {}, str(file))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        beside = serve.gateway_options(options, Model(tmp_path, "tiny"), listener, ("unix:/e",), tmp_path)
        alone = serve.gateway_options(options, None, listener, (), tmp_path)
    assert beside.upstreams == alone.upstreams == options.upstreams
    assert (beside.model_name, alone.model_name, alone.model) == ("tiny", "", "")


def test_they_are_enough_without_an_engine(tmp_path: Path) -> None:
    file = tmp_path / "pellucid.toml"
    file.write_text("replicas = 0\n" + ONE)
    assert serve.check_engines(read_options({}, {}, str(file)), {}) == {}
    file.write_text("replicas = 0\n")
    with pytest.raises(UserError, match=r"--replicas 0 leaves no engine: .* or put \[\[upstream\]\] tables"):
        serve.check_engines(read_options({}, {}, str(file)), {})
