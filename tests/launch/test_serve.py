"""From settings to processes: what is passed on, how much memory is asked for, when it counts as ready."""

import asyncio
import fcntl
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineOptions
from gateway.config import GatewayOptions
from launch import address, fleet, probe, run_dir, serve
from launch.errors import UserError
from launch.options import OPTIONS, RANKS_MAX, ServeOptions, read_options
from launch.sizes import KvMemory
from launch.store import Model
from launch.supervise import python_command
from telemetry import vocabulary

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Model:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(bytes(4096))
    return Model(path, "tiny")


def told(options: ServeOptions, model: Model) -> tuple[EngineOptions, GatewayOptions]:
    alone = serve.engine_options(options, model, Path("/data"), 64 * MIB)
    engine = fleet.all_engines(alone, options, Path("/run"))[-1]
    with address.bound("127.0.0.1", 0, "--port") as listener:
        gateway = serve.gateway_options(options, model, listener, (engine.listen,), Path("/data"))
    gateway = msgspec.structs.replace(gateway, port=8001, listener=7)  # whatever they were
    return engine, fleet.all_workers(gateway, options, Path("/run"))[-1]


LAUNCHER_ONLY = {
    "insecure_open",
    "data_dir",
    "kv_memory",
    "model",
    "draft_model",
    "engine",
    "engine_secret_file",
    "admin_key_file",
    "port",
}  # used up before anything is started
GIVEN = {
    "redis_url": "redis://h:1",
    "pepper_file": "/p",
    "admin_port": "8002",
    "admin_host": "::1",
    "price_prompt": "0.15",
    "price_output": "2",
    "model_name": "n",
    "host": "::1",
    "dtype": "float32",
    "quantization": "int8",
    "kv_dtype": "fp8",
    "replicas": "2",
    "tensor_parallel": "2",
    "pipeline_parallel": "3",
    "rank_timeout_s": "0.5",
    "interconnect": "gloo",
    "workers": "2",
    "routing": "least-tokens",
    "threads": "3",
    "max_context": "77",
    "max_queue": "5",
    "max_batch": "6",
    "max_step_tokens": "7",
    "prefix_cache": "false",
    "speculative": "3",
    "max_body": "9B",
    "request_timeout": "11",
    "resume_deadline_s": "13",
    "drain": "12",
    "cors_origin": "http://a",
    "otlp_endpoint": "http://b",
    "otlp_metrics": "true",
    "export_trace": "/t/traces.jsonl",
    "trace_sample": "0.25",
    "flight_memory": "1MiB",
    "log_level": "debug",
    "log_format": "json",
}


@pytest.mark.parametrize("name", [option.name for option in OPTIONS if option.name not in LAUNCHER_ONLY])
def test_every_option_reaches_the_process_that_needs_it(name: str, model: Model) -> None:
    plain, given = read_options({}, {}), read_options({name: GIVEN[name]}, {})
    assert told(plain, model) != told(given, model)


def test_both_processes_know_the_same_model(model: Model) -> None:
    engine, gateway = told(read_options({}, {}), model)
    assert (engine.model, engine.model_name) == (gateway.model, gateway.model_name) == (str(model.path), "tiny")
    assert gateway.engines == (engine.listen,)
    assert engine.listen == "unix:/run/engine-0.sock"


def test_the_draft_model_reaches_the_engine_and_is_counted(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    options = read_options({"kv_memory": "64MiB"}, {})
    engine = serve.engine_options(options, model, Path("/data"), 64 * MIB, model)
    assert engine.draft_model == str(model.path)
    assert serve.engine_options(options, model, Path("/data"), 64 * MIB).draft_model == ""
    monkeypatch.setattr(serve, "available_bytes", lambda: 64 * MIB + model.size_bytes)
    serve.check_memory(options, model)
    with pytest.raises(UserError, match="at least 8 KiB for the weights"):
        serve.check_memory(options, model, model)


def test_a_draft_model_that_may_not_guess_is_refused() -> None:
    with pytest.raises(UserError, match="--speculative off forbids it"):
        serve.check_draft_model(read_options({"draft_model": "m", "speculative": "off"}, {}))
    serve.check_draft_model(read_options({"draft_model": "m"}, {}))
    serve.check_draft_model(read_options({"speculative": "off"}, {}))


def test_options_travel_as_json_on_the_command_line(model: Model) -> None:
    engine, _ = told(read_options({"model_name": "a 'quoted' name"}, {}), model)
    command = python_command("engine", engine)
    assert command[:4] == (sys.executable, "-P", "-m", "engine")
    assert msgspec.json.decode(command[-1], type=EngineOptions) == engine


def test_children_find_our_packages_wherever_the_person_stands() -> None:
    paths = serve.child_environ({"PYTHONPATH": "/theirs"})["PYTHONPATH"].split(":")
    assert (Path(paths[0]) / "engine/api.py").is_file() and paths[1:] == ["/theirs"]


@pytest.mark.parametrize(
    ("kv_memory", "available", "kv_bytes"),
    [("64MiB", 100 * MIB, 64 * MIB), ("25%", 100 * MIB, 25 * MIB), ("64MiB", None, 64 * MIB)],
)
def test_memory_that_can_be_had(
    kv_memory: str, available: int | None, kv_bytes: int, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "available_bytes", lambda: available)
    assert serve.check_memory(read_options({"kv_memory": kv_memory}, {}), model) == kv_bytes


@pytest.mark.parametrize(
    ("kv_memory", "available", "words"),
    [
        ("100MiB", 100 * MIB, "too little memory: 100 MiB for keys and values and at least 4 KiB for the weights"),
        ("100%", 100 * MIB, "100 MiB are available; lower --kv-memory"),
        ("25%", None, "give a size, not a share"),
    ],
)
def test_memory_that_cannot_be_had(
    kv_memory: str, available: int | None, words: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "available_bytes", lambda: available)
    with pytest.raises(UserError, match=words):
        serve.check_memory(read_options({"kv_memory": kv_memory}, {}), model)


def test_replicas_share_memory_and_have_their_own_names_and_sockets(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "usable_cpus", lambda: tuple(range(7)))
    options = read_options({"replicas": "3", "kv_memory": "64MiB"}, {})
    engines = fleet.all_engines(serve.engine_options(options, model, Path("/data"), 64 * MIB), options, Path("/run"))
    assert [engine.replica for engine in engines] == [0, 1, 2]
    assert [engine.listen for engine in engines] == [f"unix:/run/engine-{replica}.sock" for replica in range(3)]
    assert {engine.kv_memory_bytes for engine in engines} == {64 * MIB // 3}
    assert [(engine.threads, engine.rank_cpus) for engine in engines] == [
        (2, ((0, 1),)),
        (2, ((2, 3),)),
        (2, ((4, 5),)),
    ]
    assert [child.name for child in fleet.engine_children(engines)] == ["engine-0", "engine-1", "engine-2"]
    assert [child.name for child in fleet.engine_children(engines[:1])] == ["engine"]


def test_ranks_have_processors_of_their_own_within_their_replicas(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "usable_cpus", lambda: tuple(range(4)))
    options = read_options({"replicas": "2", "tensor_parallel": "2", "kv_memory": "64MiB"}, {})
    engines = fleet.all_engines(serve.engine_options(options, model, Path("/data"), 64 * MIB), options, Path("/run"))
    assert [engine.rank_cpus for engine in engines] == [((0,), (1,)), ((2,), (3,))]
    assert [engine.threads for engine in engines] == [1, 1]
    assert {(engine.kv_memory_bytes, engine.tensor_parallel) for engine in engines} == {(32 * MIB, 2)}
    assert [child.name for child in fleet.engine_children(engines)] == ["engine-0", "engine-1"]


def test_ranks_share_the_weights_of_their_replica(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "available_bytes", lambda: 64 * MIB + model.size_bytes)
    options = read_options({"tensor_parallel": "8", "kv_memory": "64MiB"}, {})
    assert serve.check_memory(options, model) == 64 * MIB


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"replicas": "0", "tensor_parallel": "2"}, "--tensor-parallel 2: --replicas 0 starts no engine here; say it"),
        ({"replicas": "0", "pipeline_parallel": "3"}, "--pipeline-parallel 3: --replicas 0 starts no engine here"),
        (
            {"tensor_parallel": "13", "pipeline_parallel": "5"},
            "--tensor-parallel 13 and --pipeline-parallel 5 are 65 ranks: more than 64 are not supported",
        ),
    ],
)
def test_ranks_that_cannot_be(given: dict[str, str | bool | tuple[str, ...] | None], words: str) -> None:
    with pytest.raises(UserError, match=words):
        serve.check_ranks(read_options(given, {}))


def test_as_many_ranks_as_telemetry_knows_are_accepted() -> None:
    assert RANKS_MAX == vocabulary.RANKS_MAX
    serve.check_ranks(read_options({"tensor_parallel": "8", "pipeline_parallel": "8", "draft_model": "m"}, {}))
    serve.check_ranks(read_options({"replicas": "0"}, {}))


def test_workers_share_a_socket_and_know_each_other(model: Model) -> None:
    _, one = told(read_options({}, {}), model)
    assert (one.workers, one.worker, one.requests_here_max, one.start) == (1, 0, one.requests_max, "")
    workers = fleet.all_workers(one, read_options({"workers": "3"}, {}), Path("/run"))
    assert [worker.worker for worker in workers] == [0, 1, 2]
    assert {worker.start for worker in workers} == {"run"}
    assert {worker.worker_sockets for worker in workers} == {tuple(f"/run/gateway-{n}.sock" for n in range(3))}
    children = fleet.worker_children(workers)
    assert [child.name for child in children] == ["gateway-0", "gateway-1", "gateway-2"]
    assert {child.descriptors for child in children} == {(one.listener,)}
    assert one.requests_max <= 3 * workers[0].requests_here_max < one.requests_max + 3


def test_memory_is_counted_for_all_replicas(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    options = read_options({"kv_memory": "64MiB"}, {})
    monkeypatch.setattr(serve, "available_bytes", lambda: 64 * MIB + 4 * model.size_bytes)
    assert serve.check_memory(options, model, replicas=4) == 64 * MIB
    monkeypatch.setattr(serve, "available_bytes", lambda: 64 * MIB + 4 * model.size_bytes - 1)
    with pytest.raises(UserError, match="16 KiB for the weights of 4 replicas, .* lower --kv-memory or --replicas"):
        serve.check_memory(options, model, replicas=4)
    with pytest.raises(UserError, match="--kv-memory: 3 MiB for 4 replicas is less than 1 MiB for each"):
        serve.check_memory(read_options({"kv_memory": "3MiB"}, {}), model, replicas=4)
    serve.check_memory(read_options({"kv_memory": "900TiB"}, {}), model, replicas=0)  # nothing is computed here


def test_the_banner_says_how_many_serve() -> None:
    assert serve.missing(2, 2) == "" and "by 1 of 2 engine replicas" in serve.missing(1, 2)
    assert serve.missing(1, 2) in serve.banner("m", "h", 1, 0.5, "", serve.missing(1, 2))


def test_the_default_pool_is_what_the_engine_has_by_itself() -> None:
    assert read_options({}, {}).kv_memory == KvMemory(size_bytes=1 << 30)
    assert EngineOptions(model="", model_name="", listen="").kv_memory_bytes == 1 << 30


@pytest.mark.parametrize(
    ("host", "reachable"),
    [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("127.0.0.1", "127.0.0.1"), ("10.1.2.3", "10.1.2.3")],
)
def test_where_this_machine_reaches_it(host: str, reachable: str) -> None:
    assert address.reachable(host) == reachable


def test_a_run_directory_is_never_taken_for_one_that_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def another_starts_just_now(file: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            for left in (tmp_path / "run").iterdir():
                run_dir._remove_if_left(left)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", another_starts_just_now)
    with run_dir.run_dir(tmp_path) as folder:
        assert folder.is_dir()
        run_dir._remove_if_left(folder)
        assert folder.is_dir()
    assert not folder.exists()


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[int]:
    """A server that gives each connection the next answer, the last one again and again; b"" is silence."""
    left = list(answers)
    open_forever = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        answer = left.pop(0) if len(left) > 1 else left[0]
        if not answer:
            await open_forever.wait()
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        open_forever.set()
        server.close()
        await server.wait_closed()


def http(status: str, body: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


async def test_ready_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "POLL_S", 0.001)
    monkeypatch.setattr(probe, "NEWS_S", 0.0)
    said: list[str] = []
    async with answering(http("503 Service Unavailable", "loading"), b"no http", http("200 OK")) as port:
        await asyncio.wait_for(probe.until_ready("127.0.0.1", port, said.append), 20)
    assert [line.partition("says: ")[2] for line in said] == ["503 loading", "no answer: the answer is no HTTP"]


async def test_the_engine_listens_when_its_socket_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "POLL_S", 0.001)
    monkeypatch.setattr(probe, "NEWS_S", 0.0)
    socket = tmp_path / "engine.sock"
    news = asyncio.Event()
    waiting = asyncio.create_task(probe.until_any_exists([tmp_path / "other", socket], lambda _message: news.set()))
    await asyncio.wait_for(news.wait(), 20)
    assert not waiting.done()
    socket.touch()
    await asyncio.wait_for(waiting, 20)


async def test_a_silent_server_does_not_hold_us_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ANSWER_S", 0.05)
    async with answering(b"") as port:
        assert await probe.ask("127.0.0.1", port, "/ready") == (0, "no answer within 0.05 s")


async def test_a_closed_port_is_no_answer() -> None:
    async with answering(http("200 OK")) as port:
        pass
    status, answer = await probe.ask("127.0.0.1", port, "/ready")
    assert status == 0 and answer.startswith("no answer: ")


HEALTH = {"engines": [{"details": {"first_token_s": "1.25", "kernels": "native avx2"}}, {}]}


@pytest.mark.parametrize(
    ("body", "serving", "words"),
    [
        (json.dumps(HEALTH), 2, "1.25 s from the engine's cold start to its first token, on native avx2"),
        ('{"engines": []}', 1, ""),
        ('{"engines": [{"details": {}}]}', 1, ""),
        ("[1]", 1, ""),
        ("nothing", 1, ""),
    ],
)
async def test_the_cold_start_is_told_if_the_engine_tells_it(body: str, serving: int, words: str) -> None:
    async with answering(http("200 OK", body)) as port:
        assert await probe.first_look("127.0.0.1", port) == (serving, words, False)


async def test_that_a_key_is_needed_is_seen() -> None:
    async with answering(http("401 Unauthorized")) as port:
        assert await probe.first_look("127.0.0.1", port) == (1, "", True)


@pytest.mark.parametrize(("log_format", "line"), [("console", "pellucid: hello"), ("json", '"event": "hello"')])
def test_the_launcher_speaks_the_language_of_the_logs(
    log_format: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker: Callable[[str], Callable[[str], None]] = serve.speaker
    speaker(log_format)("hello")
    captured = capsys.readouterr()
    assert line in captured.err and captured.out == ""


def test_a_named_server_is_taken_and_none_is_started(tmp_path: Path) -> None:
    options = read_options({"redis_url": "redis://:secret@h:1"}, {})
    assert serve.key_server(options, tmp_path, tmp_path) == ("redis://:secret@h:1", [])
    assert list(tmp_path.iterdir()) == []


def test_a_bad_url_is_refused_without_a_word_of_it() -> None:
    with pytest.raises(UserError, match="--redis-url: it begins with one of") as caught:
        read_options({"redis_url": "redis//:secret@h:1"}, {})
    assert "secret" not in str(caught.value)


def test_the_password_of_the_server_is_not_among_the_arguments(model: Model) -> None:
    _, gateway = told(read_options({"redis_url": "redis://:hunter2@h:1"}, {}), model)
    assert all("hunter2" not in word for word in python_command("gateway", gateway))
