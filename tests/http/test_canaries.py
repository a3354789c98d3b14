"""
Canaries as keys, prompts, headers and passwords on every route, in success and in every kind of failure: nobody sings.

Real processes: the supervisor, a gateway that crashes on demand, Valkey with a password, a collector for spans.  Each
request has a canary of its own, so that another one's answer can be told from its own.
"""

import contextlib
import itertools
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from cache.accounts import Limits
from gateway import admin
from gateway.routes import routes
from tests.cache import servers
from tests.contract.telemetry.otlp_sink import Collector, http_collector
from tests.http.conftest import options_for
from tests.http.crashing_gateway import HEADER
from tests.http.fake_engine import FakeEngine, Job, greet_and_stop
from tests.http.guard import Guard, bearer, until
from tests.http.model_files import EOS_ID
from tests.http.test_error_table import ROWS

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "canarypassword4711"
ADMIN_KEY = "canaryadminkey4714"
HEADER_CANARY = "canaryheader4712"
PROMPT = re.compile(r"canary0[0-9]{4}0")
BODY_BYTES_MAX = 20_000
BODIES = {route.path for route in routes() if route.operation.body is not None}
HOLDERS = ("user-agent", "referer", "cookie", "x-forwarded-for", "openai-organization", "x-anything")


class Listener:
    """Every command that the server is sent, scripts' own ones too."""

    def __init__(self, server: servers.Server) -> None:
        assert isinstance(server.address, tuple)
        self.heard = bytearray()
        self._link = socket.create_connection(server.address)
        self._link.sendall(b"*1\r\n$7\r\nMONITOR\r\n")
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._link.recv(1 << 16):
                self.heard += data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()
        self._thread.join(5)


class Scene:
    """All processes, and what was said by whom."""

    def __init__(self, guard: Guard, engine: FakeEngine, sink: Collector, listener: Listener, options: Any) -> None:
        self.guard, self.engine, self.sink, self.listener = guard, engine, sink, listener
        self.trace_file = Path(options.export_trace)
        self.answers: list[tuple[str, str]] = []
        """The canary of a request, and all of its answer."""
        self.secrets = {PASSWORD, ADMIN_KEY, HEADER_CANARY, "sk-canary-of-nobody-4713"}
        self.statuses: set[tuple[int, str]] = set()
        self._numbers = itertools.count()
        limits = Limits(requests_per_minute=1)
        keys = {
            "good": guard.create(),
            "elsewhere": guard.create(models=("another",)),
            "poor": guard.create(limits=limits),
            "barred": guard.create(limits=Limits(requests_per_minute=0)),
        }
        self.keys = {name: issued.key for name, issued in keys.items()} | {"wrong": "sk-canary-of-nobody-4713"}
        self.secrets |= {issued.key.rpartition("-")[2] for issued in keys.values()}
        self.secrets.add(guard.pepper_file.read_text().strip())
        environ = dict(os.environ) | {"PYTHONPATH": str(ROOT), "PELLUCID_REDIS_URL": self._url()}
        environ["PELLUCID_ADMIN_KEY"] = ADMIN_KEY
        command = [sys.executable, str(Path(__file__).with_name("supervised_gateway.py"))]
        self.process = subprocess.Popen(
            [*command, msgspec.json.encode(options).decode()], env=environ, stderr=subprocess.PIPE, text=True
        )
        self.said: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{options.port}", timeout=20)
        self.admin = httpx.Client(base_url=f"http://127.0.0.1:{options.admin_port}", timeout=20)
        until(lambda: any("engine connected" in line for line in self.said), "the gateway does not start")

    def _url(self) -> str:
        assert isinstance(self.guard.server.address, tuple)
        assert (
            self.guard.server.ask("ACL", "SETUSER", "gateway", "on", f">{PASSWORD}", "~*", "&*", "+@all") == b"+OK\r\n"
        )
        host, port = self.guard.server.address
        return f"redis://gateway:{PASSWORD}@{host}:{port}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)

    # ---- asking

    def ask(self, method: str, path: str, key: str = "good", **more: Any) -> httpx.Response:
        """One request, with canaries wherever they fit."""
        canary = f"canary0{next(self._numbers):04}0"
        headers = dict.fromkeys(HOLDERS, HEADER_CANARY) | bearer(self.keys[key]) | more.pop("headers", {})
        if method == "POST" and "content" not in more and "json" not in more:
            more["json"] = body_for(path, canary)
        if isinstance(more.get("json"), dict):
            more["json"] = {name: _put(value, canary) for name, value in more["json"].items()}
        query = {"api_key": self.keys[key], "prompt": canary}
        client = self.admin if path.startswith("/admin/") else self.client
        if path == "/debug/live":
            return self.look(canary, headers, query)
        answer = client.request(method, path, headers=headers, params=query, **more)
        self.note(canary, answer)
        return answer

    def look(self, canary: str, headers: dict[str, str], query: dict[str, str]) -> httpx.Response:
        """The first event of a stream that does not end by itself."""
        with self.client.stream("GET", "/debug/live", headers=headers, params=query) as answer:
            if answer.status_code == 200:
                self.answers.append((canary, f"{answer.headers} {next(answer.iter_lines())}"))
            else:
                answer.read()
                self.note(canary, answer)
        return answer

    def note(self, canary: str, answer: httpx.Response) -> None:
        """Remember it."""
        self.answers.append((canary, f"{answer.headers} {answer.text}"))
        code = ""
        if answer.status_code >= 400 and answer.headers["content-type"] == "application/json":
            code = answer.json().get("error", {}).get("code", "")
        self.statuses.add((answer.status_code, code))

    # ---- looking

    def check(self, audit: str) -> None:
        """Nothing secret is anywhere."""
        args = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert "supervised_gateway.py" in args
        places = {
            "logs": "".join(self.said),
            "spans": "".join(str(span) for span in self.sink.spans),
            "trace file": self.trace_file.read_text(),
            "redis": self.listener.heard.decode(errors="replace"),
            "arguments": args,
            "audit": audit,
        }
        for place, text in places.items():
            assert len(text) > 300, f"there is nothing in the {place} to look at"
            for secret in self.secrets:
                assert secret not in text, (place, _around(text, secret))
            for found in PROMPT.findall(text):
                raise AssertionError((place, _around(text, found)))
        for canary, text in self.answers:
            for secret in self.secrets:
                assert secret not in text, _around(text, secret)
            assert set(PROMPT.findall(text)) <= {canary}


def _around(text: str, what: str) -> str:
    where = text.index(what)
    return text[max(0, where - 500) : where + 200]


def _put(value: Any, canary: str) -> Any:
    return value.replace("CANARY", canary) if isinstance(value, str) else value


def body_for(path: str, canary: str) -> dict[str, Any]:
    """A good body, with the canary as the text."""
    if path == "/detokenize":
        return {"tokens": [40, 41]}
    more = {"user": canary, "metadata": {"k": canary}, "stop": [canary], "prompt_cache_key": canary, "max_tokens": 5}
    if path == "/v1/chat/completions":
        return {"model": "tiny", "messages": [{"role": "user", "content": canary}], **more}
    return {"model": "tiny", "prompt": canary, **more} if path == "/v1/completions" else {"prompt": canary}


@pytest.fixture
def scene(model_dir: Path, vocab_size: int, socket_path: str, tmp_path: Path) -> Iterator[Scene]:
    """Everything is up."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(servers.over_tcp(tmp_path))
        guard = Guard(server, tmp_path)
        engine = FakeEngine(socket_path, vocab_size=vocab_size, eos_id=EOS_ID)
        engine.start()
        stack.callback(engine.stop)
        sink = stack.enter_context(http_collector())
        listener = Listener(server)
        stack.callback(listener.close)
        options = msgspec.structs.replace(
            options_for(model_dir, socket_path),
            resume_deadline_s=0.0,
            port=servers.free_port(),
            admin_port=servers.free_port(),
            pepper_file=str(guard.pepper_file),
            redis_named=True,
            otlp_endpoint=sink.url,
            export_trace=str(tmp_path / "traces.jsonl"),
            log_level="debug",
            body_bytes_max=BODY_BYTES_MAX,
            body_timeout_s=0.5,
            first_frame_timeout_s=0.5,
            drain_s=0.0,
        )
        here = Scene(guard, engine, sink, listener, options)
        stack.callback(here.client.close)
        stack.callback(here.admin.close)
        yield here
        if here.process.poll() is None:
            here.process.terminate()
        here.process.wait(20)
        here.reader.join(5)
        assert here.process.stderr is not None
        here.process.stderr.close()


async def fail(job: Job) -> None:
    """As an engine whose words are none of the client's."""
    await job.finish("failed")


async def refuse(job: Job) -> None:
    """The queue is full."""
    await job.finish("overloaded")


async def vanish(job: Job) -> None:
    """The engine is gone in the middle."""
    await job.accept()
    job.hang_up()


async def be_silent(job: Job) -> None:
    """Until the gateway gives up."""
    await job.until_aborted()


def ask_all(scene: Scene) -> None:
    """Every route, with every kind of key, and every crash."""
    for route in routes():
        path = re.sub(r"\{\w+:\w+\}", "tiny", route.path)
        for key in ("good", "wrong", "elsewhere", "poor", "barred"):
            scene.ask(route.method, path, key)
        scene.ask(route.method, path, headers={HEADER: "handler"})
        scene.ask(route.method, path, headers={"traceparent": HEADER_CANARY, "authorization": f"Basic {HEADER_CANARY}"})
    for method, path in (("GET", "/nothing"), ("PUT", "/v1/models"), ("OPTIONS", "/v1/models")):
        scene.ask(method, path)


def ask_badly(scene: Scene, path: str) -> None:
    """All that a body can do wrong."""
    bad: tuple[dict[str, Any], ...] = (
        {"json": {"model": "CANARY", "messages": "CANARY", "prompt": 5, "tokens": "CANARY"}},
        {"json": {"CANARY": 1, "model": "tiny"}},
        {"json": {**body_for(path, "CANARY"), "model": "CANARY"}},
        {"json": {}},
        {"content": b'{"model": "canary0', "headers": {"content-type": "application/json"}},
        {"content": b"x", "headers": {"content-type": HEADER_CANARY}},
        {"json": {"prompt": "CANARY" + "x" * BODY_BYTES_MAX}},
        {"headers": {"x-long": HEADER_CANARY * 5000}},
    )
    for more in bad:
        scene.ask("POST", path, **{"json": None, **more} if "content" in more else more)
    for crash in ("body", "task", "thread"):
        scene.ask("POST", path, headers={HEADER: crash}, json=body_for(path, "CANARY"))


def ask_the_admin(scene: Scene) -> None:
    """With the admin key, with others, and with bodies that are none; a crash is one too."""
    for handler in admin.HANDLERS:
        path = next(iter(handler.paths)).replace("{key_id:str}", "0" * 16).replace("{name:str}", "blue")
        method = next(iter(handler.http_methods))
        good = {"authorization": f"Bearer {ADMIN_KEY}"}
        scene.ask(method, path, "wrong", json={"label": "CANARY"})
        scene.ask(method, path, json={"CANARY": 1}, headers={"x-api-key": ADMIN_KEY, "authorization": "Basic x"})
        scene.ask(method, path, json={"CANARY": "CANARY", "label": 5}, headers=good)
        scene.ask(method, path, json={"CANARY": 1}, headers=good | {HEADER: "body"})


def ask_slowly(scene: Scene) -> None:
    """A body that never comes."""

    def pieces() -> Iterator[bytes]:
        yield b'{"model": "canary0'
        threading.Event().wait(1.0)
        yield b"x"

    with contextlib.suppress(httpx.TransportError):
        scene.ask("POST", "/tokenize", content=pieces(), headers={"content-type": "application/json"})


def ask_the_engine(scene: Scene, path: str) -> None:
    """With an engine that does well, and in all ways badly; streams and whole answers, and a crash in the middle."""
    for behaviour in (greet_and_stop, fail, refuse, vanish, be_silent):
        scene.engine.behaviour = behaviour
        for more in ({}, {"stream": True}, {"max_tokens": 10_000}):
            until(lambda: scene.client.get("/ready").status_code == 200, "the engine does not come back")
            scene.ask("POST", path, json={**body_for(path, "CANARY"), **more})
    scene.engine.behaviour = greet_and_stop
    until(lambda: scene.client.get("/ready").status_code == 200, "the engine does not come back")
    for stream in (False, True):
        body = {**body_for(path, "CANARY"), "stream": stream}
        scene.ask("POST", path, json=body, headers={"x-request-id": f"crash-{stream}-{path[4:8]}"})


def test_nobody_sings(scene: Scene) -> None:
    ask_all(scene)
    for path in sorted(BODIES):
        ask_badly(scene, path)
    ask_slowly(scene)
    ask_the_admin(scene)
    for path in ("/v1/chat/completions", "/v1/completions"):
        ask_the_engine(scene, path)
    scene.guard.server.freeze()
    ask_all(scene)
    scene.guard.server.thaw()
    audit = repr(scene.guard.audit())
    scene.guard.server.kill()
    ask_all(scene)
    ask_the_admin(scene)
    scene.check(audit)
    missing = {pair for pair in ROWS if pair not in scene.statuses} - UNSEEN
    assert missing == set()


UNSEEN = {
    (400, "request_refused"),
    (500, "degenerate_output"),
    (503, "draining"),
    (503, "limits_unavailable"),
    (503, "no_healthy_engine"),
}
"""Those that need more than is set up here, and whose words hold nothing of a request's."""


def test_the_last_words_of_a_process_hold_nothing(scene: Scene) -> None:
    for path in sorted(BODIES):
        scene.ask("POST", path)
    scene.sink.wait_for(len(BODIES))
    with contextlib.suppress(httpx.TransportError):
        scene.ask("POST", "/tokenize", headers={HEADER: "process"})
    until(lambda: any("gateway was killed" in line for line in scene.said), "it does not die")
    assert any("KeyboardInterrupt" in line for line in scene.said)
    scene.check(repr(scene.guard.audit()))
