"""Settings: four places, one order, and no unknown name anywhere."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.errors import UserError
from launch.options import BY_NAME, OPTIONS, Option, read_options
from launch.parse import DRAFTS_AUTO_MAX, DRAFTS_MAX, parse_amount, parse_speculative, parse_switch
from launch.sizes import KvMemory, available_bytes, format_bytes, parse_bytes, parse_kv_memory


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "pellucid.toml"
    file.write_text("port = 1\nmax-queue = 2\nmax_batch = 3\n")
    environ = {"PELLUCID_PORT": "11", "PELLUCID_MAX_QUEUE": "12", "PELLUCID_CONFIG": str(file)}
    options = read_options({"port": "21"}, environ)
    assert (options.port, options.max_queue, options.max_batch, options.max_step_tokens) == (21, 12, 3, 512)


def test_config_flag_beats_config_variable(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("port = 1")
    (tmp_path / "b.toml").write_text("port = 2")
    environ = {"PELLUCID_CONFIG": str(tmp_path / "a.toml")}
    assert read_options({}, environ, str(tmp_path / "b.toml")).port == 2


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_can_be_given_in_every_place(option: Option, tmp_path: Path) -> None:
    samples = {int: "17", float: "17.5", bool: "true", str: "info", tuple: "http://a,http://b", KvMemory: "32MiB"}
    special = {
        "prefix_cache": "false",
        "log_level": "debug",
        "dtype": "float32",
        "quantization": "int8",
        "kv_dtype": "fp8",
        "interconnect": "gloo",
        "routing": "round-robin",
        "log_format": "json",
        "otlp_endpoint": "http://x:4318",
        "trace_sample": "0.25",
        "flight_memory": "1MiB",
        "max_body": "1MiB",
        "redis_url": "redis://h:1",
        "engine": "tcp://a:1,tcp://b:2",
    }
    plain = getattr(read_options({}, {}), option.name)
    text = special.get(option.name, samples[type(plain)])
    expected = option.parse(text)
    assert expected != plain
    file = tmp_path / "c.toml"
    file.write_text(f"{option.name} = " + (text if option.switch or text.isdigit() else f'"{text}"'))
    places = [({option.name: text}, {}, None), ({}, {option.variable: text}, None), ({}, {}, str(file))]
    assert [getattr(read_options(*place), option.name) for place in places] == [expected] * 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("prot = 1", "unknown key 'prot'; did you mean 'port'?"),
        ("[serve]\nport = 1", "unknown key 'serve'"),
        ("port = true", "port: 'true' is not a whole number"),
        ("port = 70000", "port: 70000 is not in 0 .. 65535"),
        ("threads = 257", "threads: 257 is not in 0 .. 256"),
        ("port = [1]", "port: a plain value is expected, not a list"),
        ("model = {name = 1}", "model: a plain value is expected, not a dict"),
        ("port = ", "not a TOML file"),
        ("max-queue = 1\nmax_queue = 2", "stands there twice"),
        ("cors_origin = [1]", "cors_origin: a plain value is expected"),
    ],
)
def test_a_bad_file_is_named_with_what_is_bad(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(line)
    with pytest.raises(UserError, match="bad.toml") as caught:
        read_options({}, {}, str(file))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match="absent.toml: cannot read"):
        read_options({}, {}, "absent.toml")


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="PELLUCID_MAX_QUEU .*did you mean 'PELLUCID_MAX_QUEUE'"):
        read_options({}, {"PELLUCID_MAX_QUEU": "1", "UNRELATED": "x"})


def test_a_bad_value_names_the_place_it_came_from() -> None:
    with pytest.raises(UserError, match=r"^PELLUCID_PORT: 'abc' is not a whole number$"):
        read_options({}, {"PELLUCID_PORT": "abc"})
    with pytest.raises(UserError, match=r"^--port: 'abc' is not a whole number$"):
        read_options({"port": "abc"}, {"PELLUCID_PORT": "1"})


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "", "soon", "1e9"])
def test_seconds_refuse(text: str) -> None:
    with pytest.raises(UserError, match="--request-timeout"):
        read_options({"request_timeout": text}, {})


def test_lists_repeat_as_flags_and_are_separated_by_commas_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('cors_origin = ["http://a", "http://b"]')
    expected = ("http://a", "http://b")
    assert read_options({"cors_origin": expected}, {}).cors_origin == expected
    assert read_options({}, {"PELLUCID_CORS_ORIGIN": "http://a, http://b"}).cors_origin == expected
    assert read_options({}, {}, str(file)).cors_origin == expected


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_switch_on(text: str) -> None:
    assert parse_switch(text)
    assert not parse_switch({"1": "0", "true": "False", "YES": "no", "on": "off"}[text])


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("512MiB", 2**29), ("2GiB", 2**31), ("2g", 2**31), ("1.5 KiB", 1536), ("10MB", 10**7), ("77", 77), ("77b", 77)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 parsec", "0", "1e5", "99999TiB", "2GiB 3"])
def test_sizes_refuse(text: str) -> None:
    with pytest.raises(ValueError, match="size|range"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0%", "101%", "%", "1KiB", "x"])
def test_kv_memory_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="%|less than"):
        parse_kv_memory(text)


def test_speculation_is_a_word_or_a_number() -> None:
    found = {text: parse_speculative(text) for text in ("auto", "OFF", "0", "7", str(DRAFTS_MAX))}
    assert found == {"auto": DRAFTS_AUTO_MAX, "OFF": 0, "0": 0, "7": 7, str(DRAFTS_MAX): DRAFTS_MAX}


@pytest.mark.parametrize("text", ["", "on", "-1", "64", "1.5"])
def test_speculation_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"auto|0 \.\. 63"):
        parse_speculative(text)


def test_kv_memory_is_a_size_or_a_share() -> None:
    assert parse_kv_memory("25%").resolve_bytes(1000) == 250
    assert parse_kv_memory("2GiB").resolve_bytes(1000) == 2**31


@given(st.integers(min_value=1, max_value=2**49))
def test_a_formatted_size_can_be_read_again(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=1e-2)


def test_available_memory_is_what_the_kernel_or_the_container_leaves(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert available_bytes(tmp_path) == 4000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == 4000 * 1024
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("900000\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 300000\n")
    assert available_bytes(tmp_path) == 400000
    (group / "memory.current").write_text("9000000\n")
    assert available_bytes(tmp_path) == 0


def test_available_memory_is_known_here() -> None:
    found = available_bytes()
    assert found is not None and found > 0


def test_flags_and_variables_follow_from_the_name() -> None:
    assert (BY_NAME["max_queue"].flag, BY_NAME["max_queue"].variable) == ("--max-queue", "PELLUCID_MAX_QUEUE")


@pytest.mark.parametrize(
    ("text", "micros"), [("0", 0), ("0.15", 150_000), ("1e-6", 1), ("0.1", 100_000), ("1000000000", 10**15)]
)
def test_amounts_of_money_are_exact(text: str, micros: int) -> None:
    assert parse_amount(text) == micros


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "-1", "-0.1", "0.0000001", "1000000001", "1,5"])
def test_what_is_no_amount_of_money(text: str) -> None:
    with pytest.raises(ValueError, match=r"amount|in 0|decimals"):
        parse_amount(text)
