"""
`python -m gateway` as the supervisor starts and stops it.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway.__main__ import main
from gateway.config import GatewayOptions
from tests.http.asking import raw_request, read_until
from tests.http.fake_engine import FakeEngine, Job
from tests.http.harness import MODEL, WAIT_S
from tests.http.model_files import EOS_ID

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400}
URL = "/v1/chat/completions"
ROOT = Path(__file__).resolve().parents[2]


class GatewayProcess:
    """`python -m gateway`."""

    def __init__(
        self, model: Path, engine_path: str, *, environ: Mapping[str, str] | None = None, **options: object
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        raw = GatewayOptions(
            model=str(model), model_name=MODEL, engines=(f"unix:{engine_path}",), port=self.port, log_format="json"
        )
        text = msgspec.json.encode(msgspec.structs.replace(raw, **options)).decode()
        command = [sys.executable, "-m", "gateway", "--options", text]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **(environ or {})}, stderr=subprocess.PIPE, text=True
        )
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
            if job.request.request_id.startswith("short#"):
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
            read_until(short, b"assistant")
            read_until(endless, b"assistant")
            gateway.process.send_signal(signal.SIGTERM)
            refused = _until_refused(gateway.url)
            assert refused.json()["error"]["code"] == "draining"
            assert refused.headers["connection"] == "close"
            assert int(refused.headers["retry-after"]) > 0
            release.set()
            assert b"[DONE]" in read_until(short, b"[DONE]")
            last = read_until(endless, b'"error"')
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

    def test_a_second_signal_does_not_wait(self, model_dir: Path, engine: FakeEngine) -> None:
        async def endless(job: Job) -> None:
            await job.accept()
            await job.until_aborted()

        engine.behaviour = endless
        gateway = GatewayProcess(model_dir, engine.path, drain_s=60)
        gateway.wait_until_connected()
        with socket.create_connection(("127.0.0.1", gateway.port), WAIT_S) as raw:
            raw.sendall(raw_request({**CHAT, "stream": True}, "endless"))
            read_until(raw, b"assistant")
            gateway.process.send_signal(signal.SIGTERM)
            _until_refused(gateway.url)
            gateway.process.send_signal(signal.SIGTERM)
            assert b"draining" in read_until(raw, b'"error"')
        assert gateway.end()[0] == 0

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ('{"nonsense": 1}', "nonsense"),
            ("{", "bad options"),
            ('{"model": "m", "model_name": "m", "engines": []}', "at least one engine"),
            ('{"model": "m", "model_name": "m", "engines": ["nowhere"]}', "'nowhere' is neither"),
        ],
    )
    def test_bad_options_are_one_line(self, options: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
        assert main(["--options", options]) == 2
        said = capfd.readouterr().err
        assert said.count("\n") == 1
        assert words in said


def _until_refused(url: str) -> httpx.Response:
    """The signal is on its way: ask until it has arrived."""
    for _ in range(200):
        answer = httpx.post(url + URL, json={**CHAT, "max_tokens": 1, "stop": "F"}, timeout=WAIT_S)
        if answer.status_code == 503:
            return answer
    raise AssertionError("requests are still accepted")
