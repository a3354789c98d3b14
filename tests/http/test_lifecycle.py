"""
Clients that leave, engines that die or say nothing, servers that stop: everything ends, once, and is booked.
"""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway.config import GatewayOptions
from telemetry.clock import now_ns
from tests.http.conftest import Custom
from tests.http.fake_engine import FakeEngine, Job
from tests.http.harness import MODEL, WAIT_S, LiveGateway
from tests.http.model_files import EOS_ID

Pair = tuple[LiveGateway, FakeEngine]
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400}
URL = "/v1/chat/completions"
ABORT_NS_MAX = 200_000_000
ROOT = Path(__file__).resolve().parents[2]


def raw_request(body: dict[str, Any], request_id: str, path: str = URL) -> bytes:
    """The bytes of a POST."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"x-request-id: {request_id}\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def silent(job: Job) -> None:
    """Accept, and compute for ever."""
    await job.accept()
    await job.until_aborted()


async def deaf(job: Job) -> None:
    """Not even accept."""
    await job.until_aborted()


async def talk(job: Job) -> None:
    """A little text, then nothing."""
    await job.accept()
    await job.emit([40, 41, 42])
    await job.until_aborted()


class TestDisconnect:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("behave", [silent, deaf, talk], ids=["computing", "queued", "talking"])
    @pytest.mark.parametrize("path", [URL, "/v1/completions"])
    def test_it_aborts_at_once(self, fake: Pair, stream: bool, behave: Any, path: str) -> None:
        gateway, engine = fake
        engine.behaviour = behave
        request_id = f"gone-{stream}-{behave.__name__}-{path.count('/')}"
        body = CHAT if path == URL else {"model": "tiny", "prompt": "Hello", "max_tokens": 400}
        before = len(engine.requests)
        with gateway.connect() as raw:
            raw.sendall(raw_request({**body, "stream": stream}, request_id, path))
            engine.wait_for_requests(before + 1)
            if stream and behave is talk:
                assert b"FGH" in _until(raw, b"FGH")
            left_ns = now_ns()
        assert engine.wait_for_abort(request_id) - left_ns < ABORT_NS_MAX
        record = gateway.record(request_id)
        assert (record.outcome, record.status) == ("client_gone", 499)
        if behave is talk:
            assert record.output_tokens == 3
            assert record.states["decode"] > 0

    def test_all_choices_are_aborted(self, fake: Pair) -> None:
        gateway, engine = fake
        engine.behaviour = silent
        before = len(engine.requests)
        with gateway.connect() as raw:
            raw.sendall(raw_request({**CHAT, "n": 3}, "gone-n"))
            engine.wait_for_requests(before + 3)
        for index in range(3):
            engine.wait_for_abort(f"gone-n-{index}")
        assert gateway.record("gone-n").outcome == "client_gone"

    def test_an_engine_that_never_confirms_the_abort_holds_the_record_for_a_bounded_time(self, custom: Custom) -> None:
        gateway, engine = custom(record_timeout_s=0.2)

        async def stubborn(job: Job) -> None:
            await job.accept()
            await asyncio.Event().wait()

        engine.behaviour = stubborn
        with gateway.connect() as raw:
            raw.sendall(raw_request({**CHAT, "stream": True}, "stubborn"))
            _until(raw, b"assistant")
        record = gateway.record("stubborn")
        assert record.outcome == "client_gone"
        assert record.states["deliver"] > 0

    def test_before_the_body_is_complete(self, fake: Pair) -> None:
        gateway, _ = fake
        with gateway.connect() as raw:
            raw.sendall(raw_request(CHAT, "half")[:-20])
        record = gateway.record("half")
        assert (record.outcome, record.status) == ("client_gone", 499)

    def test_closing_after_done_is_success(self, fake: Pair) -> None:
        gateway, engine = fake
        aborts = len(engine.aborts)
        for index in range(5):
            with gateway.connect() as raw:
                raw.sendall(raw_request({**CHAT, "stream": True}, f"done-{index}"))
                _until(raw, b"[DONE]")
            record = gateway.record(f"done-{index}")
            assert (record.outcome, record.status) == ("length", 200)
        assert len(engine.aborts) == aborts

    def test_the_real_engine_gets_its_kv_back(self, shell: LiveGateway) -> None:
        def held() -> int:
            slots = shell.client.get("/debug/kv").json()["slots"]
            return int(slots["filled"] + slots["tail"] + slots["lookahead"])

        for index in range(6):
            with shell.connect() as raw:
                body = {**CHAT, "ignore_eos": True, "stream": index % 2 == 0, "n": 2}
                raw.sendall(raw_request(body, f"kv-{index}"))
                if index % 2 == 0:
                    _until(raw, b"assistant")
            record = shell.record(f"kv-{index}")
            assert record.outcome in ("client_gone", "length")
        httpx.post(shell.url + URL, json={**CHAT, "max_tokens": 1})
        assert held() == 0


def _until(raw: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        more = raw.recv(65536)
        assert more, data
        data += more
    return data


def _until_end(raw: socket.socket) -> bytes:
    parts: list[bytes] = []
    while b"[DONE]" not in b"".join(parts[-2:]):
        parts.append(raw.recv(1 << 20))
        assert parts[-1]
    return b"".join(parts)


class TestSlowReader:
    def test_it_costs_no_memory_and_is_booked_as_blocked(self, fake: Pair) -> None:
        gateway, engine = fake
        released = threading.Event()
        count = 20_000

        async def flood(job: Job) -> None:
            await job.accept()
            for _ in range(count // 100):
                await job.emit([40] * 100)
            await job.finish("length")
            released.set()

        engine.behaviour = flood
        with gateway.connect() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            body = {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 5}
            raw.sendall(raw_request(body, "slow"))
            assert released.wait(WAIT_S), "the engine was held up by a client that does not read"
            transcript = _until_end(raw)
        assert transcript.count(b'"token":"F","logprob":-0.5,"bytes":[70],"top_logprobs"') == count
        record = gateway.record("slow")
        assert record.outcome == "length"
        assert record.states["send_blocked"] > 0

    def test_a_client_that_never_reads_is_gone_after_a_while(self, custom: Custom) -> None:
        gateway, engine = custom(send_timeout_s=0.3)

        async def flood(job: Job) -> None:
            await job.accept()
            while not job.aborted.is_set():
                await job.emit([40] * 1000)
                await asyncio.sleep(0)
            await job.finish("abort")

        engine.behaviour = flood
        with gateway.connect() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20}
            raw.sendall(raw_request(body, "never"))
            engine.wait_for_abort("never")
            assert gateway.record("never").outcome == "client_gone"


class TestEngineTrouble:
    def test_none_is_there(self, custom: Custom, socket_path: str) -> None:
        gateway, _ = custom(engines=(f"unix:{socket_path}.none",), ready=False)
        answer = gateway.client.post(URL, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_healthy_engine")
        assert answer.headers["retry-after"] == "1"
        record = gateway.record(answer.headers["x-request-id"])
        assert record.outcome == "no_healthy_engine"
        assert set(record.states) <= {"parse", "tokenize", "send", "finalize"}
        ready = gateway.client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
        assert "not connected" in ready.json()["reason"]
        assert gateway.client.get("/health").status_code == 200

    @pytest.mark.parametrize("stream", [False, True])
    def test_it_dies_with_the_request_and_comes_back(self, custom: Custom, stream: bool) -> None:
        gateway, engine = custom()
        started = threading.Event()

        async def die(job: Job) -> None:
            await job.accept()
            await job.emit([40, 41])
            if stream:
                await asyncio.to_thread(started.wait, WAIT_S)
            job.writer.close()
            await job.writer.wait_closed()

        engine.behaviour = die
        body = {**CHAT, "stream": stream}
        with gateway.client.stream("POST", URL, json=body, headers={"x-request-id": "died"}) as answer:
            texts = answer.iter_text()
            text = next(texts)
            started.set()
            text += "".join(texts)
        assert answer.status_code == (200 if stream else 502)
        assert "[DONE]" not in text
        last = text.split("\n\n")[-2].removeprefix("data: ") if stream else text
        assert json.loads(last)["error"]["code"] == "bad_gateway"
        record = gateway.record("died")
        assert record.outcome == "engine_lost"
        assert record.output_tokens == 2

        async def fine(job: Job) -> None:
            await job.accept()
            await job.finish("length", tokens=[40])

        engine.behaviour = fine
        asyncio.run_coroutine_threadsafe(gateway._until_ready(), gateway.loop).result(WAIT_S)
        assert gateway.client.post(URL, json=CHAT).status_code == 200

    def test_it_sends_garbage(self, custom: Custom) -> None:
        gateway, engine = custom()

        async def garbage(job: Job) -> None:
            job.writer.write(b"\x05\x00\x00\x00hello")

        engine.behaviour = garbage
        answer = gateway.client.post(URL, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_gateway")

    @pytest.mark.parametrize("behave", [silent, deaf], ids=["after accepting", "before accepting"])
    def test_it_is_silent(self, custom: Custom, behave: Any) -> None:
        gateway, engine = custom(first_frame_timeout_s=0.3)
        engine.behaviour = behave
        answer = gateway.client.post(URL, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")
        engine.wait_for_abort(answer.headers["x-request-id"])
        assert gateway.record(answer.headers["x-request-id"]).outcome == "timeout"

    def test_silence_with_work_is_not_ready(self, custom: Custom) -> None:
        gateway, engine = custom(first_frame_timeout_s=0.3)
        assert gateway.client.get("/ready").json() == {"status": "ready", "reason": None, "engines": {}}
        replica = gateway.application.backend.replicas[0]
        engine.behaviour = deaf
        with gateway.connect() as raw:
            raw.sendall(raw_request(CHAT, "wedged"))
            engine.wait_for_requests(1)
            [call] = replica.calls.values()
            later_ns = call.sent_ns + 400_000_000
            assert "silent" in replica.trouble(later_ns)
            assert replica.trouble(call.sent_ns + 1) == ""
        gateway.record("wedged")
        assert replica.trouble(now_ns()) == ""

    def test_it_ignores_the_deadline(self, custom: Custom, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gateway.backend.DEADLINE_GRACE_S", 0.0)
        gateway, engine = custom(request_timeout_s=0.3, first_frame_timeout_s=0.5)

        async def chatter(job: Job) -> None:
            await job.accept()
            while not job.aborted.is_set():
                await job.emit([40])
                await asyncio.sleep(0.01)
            await job.finish("abort")

        engine.behaviour = chatter
        answer = gateway.client.post(URL, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")

    def test_it_never_says_hello(self, custom: Custom, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gateway.backend.CONNECT_TIMEOUT_S", 0.2)
        gateway, _ = custom(greets=False, ready=False)
        assert gateway.client.post(URL, json=CHAT).status_code == 503

    def test_a_stop_string_ends_even_if_the_engine_does_not_confirm(self, custom: Custom) -> None:
        gateway, engine = custom(record_timeout_s=0.2)

        async def stubborn(job: Job) -> None:
            await job.accept()
            await job.emit([40, 41, 42])
            await asyncio.Event().wait()

        engine.behaviour = stubborn
        answer = gateway.client.post(URL, json={**CHAT, "stop": "G"}, headers={"x-request-id": "stop-stubborn"})
        assert answer.json()["choices"][0]["message"]["content"] == "F"
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert gateway.record("stop-stubborn").outcome == "stop"

    def test_the_less_busy_replica_is_chosen(self, custom: Custom, socket_path: str, vocab_size: int) -> None:
        other = FakeEngine(socket_path + "2", vocab_size=vocab_size, eos_id=EOS_ID)
        other.start()
        gateway, engine = custom(engines=(f"unix:{socket_path}", f"unix:{socket_path}2"), ready=False)
        try:
            asyncio.run_coroutine_threadsafe(_until_connected(gateway, 2), gateway.loop).result(WAIT_S)
            engine.behaviour = other.behaviour = silent
            with gateway.connect() as first, gateway.connect() as second:
                first.sendall(raw_request(CHAT, "one"))
                engine.wait_for_requests(1)
                second.sendall(raw_request(CHAT, "two"))
                other.wait_for_requests(1)
            assert gateway.record("one").outcome == gateway.record("two").outcome == "client_gone"
        finally:
            other.stop()


async def _until_connected(gateway: LiveGateway, count: int) -> None:
    while len(gateway.application.backend.hellos()) < count:
        await asyncio.sleep(0.005)


class TestBounds:
    def test_requests_in_flight(self, custom: Custom) -> None:
        gateway, engine = custom(requests_max=1)
        engine.behaviour = silent
        with gateway.connect() as raw:
            raw.sendall(raw_request(CHAT, "first"))
            engine.wait_for_requests(1)
            answer = gateway.client.post(URL, json=CHAT)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert "retry-after" in answer.headers
        gateway.record("first")
        engine.behaviour = talk_and_end
        assert gateway.client.post(URL, json=CHAT).status_code == 200

    def test_an_id_in_flight_is_not_given_twice(self, fake: Pair) -> None:
        gateway, engine = fake
        engine.behaviour = silent
        before = len(engine.requests)
        with gateway.connect() as raw:
            raw.sendall(raw_request({**CHAT, "n": 2}, "twice"))
            engine.wait_for_requests(before + 2)
            engine.behaviour = talk_and_end
            for taken in ("twice", "twice-1"):
                other = gateway.client.post(URL, json=CHAT, headers={"x-request-id": taken})
                assert other.status_code == 200
                assert other.json()["id"].startswith("chatcmpl-")
        gateway.record("twice")

    def test_nothing_is_left_behind(self, fake: Pair) -> None:
        gateway, engine = fake

        async def mixed(job: Job) -> None:
            await job.accept()
            await (talk_more(job) if job.request.sampling.seed % 2 else job.until_aborted())

        engine.behaviour = mixed
        before = len(engine.requests)
        for index in range(30):
            with gateway.connect() as raw:
                raw.sendall(raw_request({**CHAT, "stream": index % 3 == 0, "seed": index}, f"left-{index}"))
                engine.wait_for_requests(before + index + 1)
        for index in range(30):
            gateway.record(f"left-{index}")
        assert not gateway.application.backend.replicas[0].calls

        async def tasks() -> list[str]:
            return [task.get_name() for task in asyncio.all_tasks() if "left-" in task.get_name()]

        assert asyncio.run_coroutine_threadsafe(tasks(), gateway.loop).result(WAIT_S) == []


async def talk_and_end(job: Job) -> None:
    """A short answer."""
    await job.accept()
    await talk_more(job)


async def talk_more(job: Job) -> None:
    """The rest of a short answer."""
    await job.finish("length", tokens=[40])


class GatewayProcess:
    """`python -m gateway`."""

    def __init__(self, model: Path, engine_path: str, **options: object) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        raw = GatewayOptions(
            model=str(model), model_name=MODEL, engines=(f"unix:{engine_path}",), port=self.port, log_format="json"
        )
        text = msgspec.json.encode(msgspec.structs.replace(raw, **options)).decode()
        command = [sys.executable, "-m", "gateway", "--options", text]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{self.port}"

    def wait_until_connected(self) -> list[str]:
        """Until it says that its engine is there; what it said."""
        assert self.process.stderr is not None
        said: list[str] = []
        for line in self.process.stderr:
            said.append(line)
            if "engine connected" in line:
                return said
        raise AssertionError("".join(said))

    def end(self) -> tuple[int, str]:
        """The exit code and what it said last."""
        _, said = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, said


class TestProcess:
    @pytest.fixture
    def engine(self, socket_path: str, vocab_size: int) -> Any:
        engine = FakeEngine(socket_path, vocab_size=vocab_size, eos_id=EOS_ID)
        engine.start()
        yield engine
        engine.stop()

    def test_sigterm_drains(self, model_dir: Path, engine: FakeEngine) -> None:
        """New requests are refused, what runs goes on; what runs too long ends with an error event; exit code 0."""
        release = threading.Event()

        async def wait_for_test(job: Job) -> None:
            await job.accept()
            await job.emit(list(b"FG"))
            if job.request.request_id == "short":
                await asyncio.get_running_loop().run_in_executor(None, release.wait, WAIT_S)
                await job.finish("length", tokens=[40])
            else:
                await job.until_aborted()

        engine.behaviour = wait_for_test
        gateway = GatewayProcess(model_dir, engine.path, drain_s=1.5)
        gateway.wait_until_connected()
        with (
            socket.create_connection(("127.0.0.1", gateway.port), WAIT_S) as short,
            socket.create_connection(("127.0.0.1", gateway.port), WAIT_S) as endless,
        ):
            short.sendall(raw_request({**CHAT, "stream": True}, "short"))
            endless.sendall(raw_request({**CHAT, "stream": True}, "endless"))
            _until(short, b"assistant")
            _until(endless, b"assistant")
            gateway.process.send_signal(signal.SIGTERM)
            refused = _until_refused(gateway.url)
            assert refused.json()["error"]["code"] == "draining"
            assert refused.headers["connection"] == "close"
            assert int(refused.headers["retry-after"]) > 0
            release.set()
            assert b"[DONE]" in _until(short, b"[DONE]")
            last = _until(endless, b'"error"')
            assert b'"code":"draining"' in last
            assert b"[DONE]" not in last
        code, said = gateway.end()
        assert code == 0, said
        lines = [json.loads(line) for line in said.splitlines()]
        outcomes = {line["request_id"]: line["outcome"] for line in lines if line.get("event") == "request"}
        assert outcomes["short"] == "length"
        assert outcomes["endless"] == "draining"
        assert "Hello" not in said  # no prompt in any line

    def test_sigterm_without_work_is_immediate(self, model_dir: Path, engine: FakeEngine) -> None:
        gateway = GatewayProcess(model_dir, engine.path, drain_s=60)
        gateway.wait_until_connected()
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.end()[0] == 0

    def test_a_taken_port_is_one_line(self, model_dir: Path, engine: FakeEngine) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            gateway = GatewayProcess(model_dir, engine.path, port=port)
            code, said = gateway.end()
        assert (code, said) == (2, f"gateway: cannot listen on 127.0.0.1:{port}: Address already in use\n")

    def test_a_model_without_tokenizer_is_one_line(self, tmp_path: Path, engine: FakeEngine) -> None:
        code, said = GatewayProcess(tmp_path, engine.path).end()
        assert (code, said) == (2, f"gateway: {tmp_path.name} has no tokenizer.json.\n")

    def test_unknown_options_are_one_line(self) -> None:
        command = [sys.executable, "-m", "gateway", "--options", '{"nonsense": 1}']
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1


def _until_refused(url: str) -> httpx.Response:
    """The signal is on its way: ask until it has arrived."""
    for _ in range(200):
        answer = httpx.post(url + URL, json={**CHAT, "max_tokens": 1, "stop": "F"}, timeout=WAIT_S)
        if answer.status_code == 503:
            return answer
    raise AssertionError("requests are still accepted")
