"""Engines over TCP: both sides prove that they know the secret, and whoever looks after them learns why not."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from engine.handshake import ANSWER_BYTES, MAGIC, NONCE_BYTES
from gateway import connection
from gateway.__main__ import main
from telemetry.clock import now_ns
from telemetry.records import StepRecord
from tests.http.asking import chat, post
from tests.http.conftest import options_for
from tests.http.guard import until
from tests.http.harness import LiveGateway, ShellEngine

SECRET = b"s" * 32
HOURS_NS = 5 * 3600 * 1_000_000_000
Before = Callable[..., LiveGateway]


@pytest.fixture
def before(model_dir: Path) -> Iterator[Before]:
    """`before("tcp:...")`: a gateway before that engine."""
    started: list[LiveGateway] = []

    def start(address: str, *, secret: bytes = SECRET, ready: bool = True, name: str = "tiny") -> LiveGateway:
        options = options_for(model_dir, "")
        changed = msgspec.structs.replace(options, engines=(address,), engine_secret=secret, model_name=name)
        started.append(LiveGateway(changed))
        started[-1].start(ready=ready)
        return started[-1]

    yield start
    for gateway in started:
        gateway.stop()


@contextmanager
def serving(vocab_size: int, *, clock_off_ns: int = 0) -> Iterator[str]:
    """The address of the real engine shell on a network."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp:127.0.0.1:{free.getsockname()[1]}"
    engine = ShellEngine(address, vocab_size=vocab_size, secret=SECRET, clock_off_ns=clock_off_ns)
    engine.start()
    yield address
    engine.stop()


@pytest.fixture
def remote(vocab_size: int) -> Iterator[str]:
    """One that is there for the whole test."""
    with serving(vocab_size) as address:
        yield address


def reason(gateway: LiveGateway, wanted: str) -> None:
    """`/ready` says so."""
    until(lambda: wanted in (gateway.client.get("/ready").json()["reason"] or ""), wanted)
    assert gateway.client.get("/ready").status_code == 503


def test_an_engine_that_knows_the_secret_serves(before: Before, remote: str) -> None:
    gateway = before(remote)
    assert post(gateway, chat())["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("off_ns", [HOURS_NS, -HOURS_NS], ids=["ahead", "behind"])
def test_what_an_engine_with_another_clock_tells_is_told_by_ours(
    before: Before, monkeypatch: pytest.MonkeyPatch, vocab_size: int, off_ns: int
) -> None:
    told: list[StepRecord] = []
    with serving(vocab_size, clock_off_ns=off_ns) as address:
        gateway = before(address)
        hear = gateway.hub.step

        def listen(step: StepRecord) -> None:
            told.append(step)
            hear(step)

        monkeypatch.setattr(gateway.hub, "step", listen)
        began_ns = now_ns()
        request_id = str(post(gateway, chat())["id"])
        gateway.record(request_id)
        why = gateway.client.get(f"/debug/why/{request_id}").json()
    heard_ns = now_ns()
    assert why["steps_known"] > 0, "they are within the time that it looks at"
    served = [step for step in told if step.slices]
    ended = [record for step in told for record in step.finished]
    assert served and len(ended) == 1
    assert all(began_ns <= step.ended_ns <= heard_ns for step in served)
    assert began_ns <= ended[0].accepted_ns <= ended[0].finished_ns <= heard_ns and ended[0].imbalance() == 0


def test_a_gateway_with_another_secret_is_told_nothing_and_says_why(before: Before, remote: str) -> None:
    gateway = before(remote, secret=b"t" * 32, ready=False)
    reason(gateway, "engine 0 not connected: the engine refuses our secret")
    assert gateway.application.backend.hellos() == []


def test_an_engine_that_serves_something_else_gets_no_requests(before: Before, remote: str) -> None:
    gateway = before(remote, ready=False, name="huge")
    reason(gateway, "it serves 'tiny', and not 'huge'")


def test_nobody_is_there(before: Before) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gateway = before(f"tcp:127.0.0.1:{port}", ready=False)
    reason(gateway, "engine 0 not connected: Connection refused")
    assert str(port) not in gateway.client.get("/ready").text, "where engines are is nobody's business"


def test_a_host_that_does_not_exist(before: Before) -> None:
    reason(before("tcp:no.such.host.invalid:9000", ready=False), "engine 0 not connected: no such host")


def answer_with(say: Callable[[socket.socket], None]) -> tuple[socket.socket, threading.Thread]:
    """Something that listens, and is no engine."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.05)
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            try:
                line, _ = server.accept()
            except TimeoutError:
                continue
            with line:
                line.settimeout(5)
                say(line)

    thread = threading.Thread(target=run)
    thread.start()
    setattr(thread, "end", stop.set)  # noqa: B010 - a test's own
    return server, thread


def a_web_server(line: socket.socket) -> None:
    line.sendall(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")


def an_engine_that_only_repeats(line: socket.socket) -> None:
    line.sendall(MAGIC + bytes(NONCE_BYTES))
    said = b""
    while len(said) < ANSWER_BYTES and (data := line.recv(4096)):
        said += data
    line.sendall(said[NONCE_BYTES:])
    assert line.recv(4096) == b"", "it was told something"


def nobody(line: socket.socket) -> None:
    line.recv(4096)


@pytest.mark.parametrize(
    ("say", "words"),
    [
        (a_web_server, "what answers there is no engine of this version"),
        (an_engine_that_only_repeats, "the engine does not know the secret"),
        (nobody, "the handshake took longer than 0.2 s"),
        (lambda line: None, "it hung up: no engine, or one with too many gateways"),
    ],
    ids=["web", "mirror", "silence", "gone"],
)
def test_what_is_no_engine_of_ours_is_told_nothing(
    before: Before, monkeypatch: pytest.MonkeyPatch, say: Callable[[socket.socket], None], words: str
) -> None:
    if say is nobody:
        monkeypatch.setattr(connection, "HANDSHAKE_S", 0.2)
    server, thread = answer_with(say)
    try:
        gateway = before(f"tcp:127.0.0.1:{server.getsockname()[1]}", ready=False)
        reason(gateway, words)
    finally:
        getattr(thread, "end")()  # noqa: B009
        thread.join()
        server.close()


@pytest.mark.parametrize(("secret", "words"), [("", "need a secret: --engine-secret-file"), ("short", "at least 32")])
def test_without_a_good_secret_a_gateway_does_not_start(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], secret: str, words: str
) -> None:
    monkeypatch.setenv("PELLUCID_ENGINE_SECRET", secret)
    options = msgspec.structs.replace(options_for(model_dir, ""), engines=("tcp:10.0.0.1:9000",))
    assert main(["--options", msgspec.json.encode(options).decode()]) == 2
    assert words in capfd.readouterr().err
