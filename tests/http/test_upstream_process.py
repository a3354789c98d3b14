"""The gateway's process in front of an upstream: what is in its arguments, logs, spans and metrics, and what is not."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from cache.errors import Misconfigured
from gateway.__main__ import main
from gateway.config import UpstreamOptions
from gateway.upstream_key import read_key
from tests.conftest import ROOT
from tests.contract.telemetry.otlp_sink import attributes, http_collector
from tests.http.conftest import relay_options
from tests.http.guard import until
from tests.http.harness import WAIT_S
from tests.http.scripted_upstream import ScriptedUpstream, Visit, well
from tests.http.test_upstream import CHAT_URL

KEY = "canary-of-the-upstream"


def table(**fields: object) -> UpstreamOptions:
    return msgspec.convert({"name": "up", "url": "http://h", "model": "m", **fields}, UpstreamOptions)


async def echoes(visit: Visit) -> None:
    """Tell the client all that it knows."""
    said = f"{visit.headers} {visit.raw_body.decode()}"
    await visit.answer({"error": {"message": said, "code": said, "param": said}}, 400, x_key=KEY, set_cookie=KEY)


async def echoes_in_the_middle(visit: Visit) -> None:
    await visit.begin()
    await visit.say("one")
    await visit.chunk(b'data: {"error":{"message":"' + KEY.encode() + b'","code":400}}\n\n')
    await visit.end()


async def echoes_in_the_status(visit: Visit) -> None:
    await visit.raw(f"HTTP/1.1 500 {KEY}\r\ncontent-length: 0\r\n{KEY}: {KEY}\r\n\r\n".encode())


async def no_http(visit: Visit) -> None:
    await visit.raw(f"{KEY}\r\n\r\n".encode())
    visit.writer.close()


def test_its_key_and_the_prompts_are_nowhere(upstream: ScriptedUpstream, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n")
    key_file.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with http_collector() as sink:
        options = msgspec.structs.replace(
            relay_options(upstream, api_key_file=str(key_file)),
            port=port,
            otlp_endpoint=sink.url,
            log_format="json",
            log_level="debug",
        )
        command = [sys.executable, "-m", "gateway", "--options", msgspec.json.encode(options).decode()]
        assert KEY not in "".join(command)
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        url = f"http://127.0.0.1:{port}"
        until(lambda: _ready(url), "it is ready")
        seen = []
        body: dict[str, Any] = {"model": "remote", "messages": [{"role": "user", "content": "canary-prompt"}]}
        for behaviour in (echoes, echoes_in_the_middle, echoes_in_the_status, no_http, well):
            upstream.behaviour = behaviour
            for stream in (False, True):
                answer = httpx.post(url + CHAT_URL, json={**body, "stream": stream}, timeout=WAIT_S)
                seen.append(f"{answer.headers}" + answer.text.replace("canary-prompt", ""))
        paths = ("/metrics", "/health", "/ready", "/debug/requests", "/v1/models")
        seen += [httpx.get(url + path, timeout=WAIT_S).text for path in paths]
        assert {visit.headers["authorization"] for visit in upstream.visits} == {f"Bearer {KEY}"}
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=WAIT_S)
        spans = "".join(map(str, sink.spans))
    assert process.returncode == 0 and '"upstream":"up0"' in said.replace(": ", ":")
    assert "pellucid.upstream" in spans
    for text in (*seen, said, spans):
        assert "canary" not in text
        shown = re.search(rf'[^"]:{upstream.port}\b', text)  # behind a quote it is some number of nanoseconds
        assert shown is None or text == said, "its address is for logs only"


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=1).status_code == 200
    except httpx.TransportError:
        return False


def test_a_span_for_the_time_that_the_upstream_had_it(upstream: ScriptedUpstream, relaying: Any) -> None:
    with http_collector() as sink:
        gateway = relaying(upstream, gateway={"otlp_endpoint": sink.url})
        body = {"model": "remote", "messages": [{"role": "user", "content": "x"}], "temperature": 0.5, "seed": 10**300}
        answer = gateway.client.post(CHAT_URL, json={**body, "weights_bits": 3, "stream": True})
        record = gateway.record(answer.headers["x-request-id"])
        spans = sink.wait_for(2 + len(record.states))
    chat = next(span for span in spans if span.name == "chat remote")
    [theirs] = [span for span in spans if span.name == "upstream"]
    assert theirs.parent_span_id == chat.span_id and chat.kind == Span.SPAN_KIND_INTERNAL
    assert theirs.end_time_unix_nano - theirs.start_time_unix_nano == record.states["upstream"]
    found = attributes(chat.attributes)
    assert found["pellucid.upstream"] == "up0" and found["gen_ai.usage.input_tokens"] == 21
    assert found["gen_ai.request.temperature"] == 0.5
    assert not [name for name in found if "quantization" in name or "kv" in name or name == "gen_ai.request.seed"]
    server = next(span for span in spans if span.kind == Span.SPAN_KIND_SERVER)
    [visit] = upstream.visits
    assert visit.headers["traceparent"] == f"00-{server.trace_id.hex()}-{server.span_id.hex()}-01"


class TestKeys:
    def test_from_the_environment_and_from_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "key"
        file.write_text("  secret\n")
        file.chmod(0o640)
        assert read_key(table(api_key_env="K"), {"K": "secret"}) == "secret"
        assert read_key(table(api_key_file=str(file)), {}) == "secret"
        assert read_key(table(), {"K": "secret"}) == ""

    @pytest.mark.parametrize(
        ("text", "mode", "words"),
        [
            ("", 0o600, "there is no key in it"),
            ("two words", 0o600, "that is no key"),
            ("two\nlines", 0o600, "that is no key"),
            ("k\u00e9y", 0o600, "that is no key"),
            ("k" * 5000, 0o600, "that is no key"),
            ("secret", 0o644, "everybody on this machine may read it"),
            (None, 0o600, "cannot read it: No such file"),
        ],
    )
    def test_a_bad_file_is_named_and_not_repeated(
        self, tmp_path: Path, text: str | None, mode: int, words: str
    ) -> None:
        file = tmp_path / "the-key"
        if text is not None:
            file.write_text(text)
            file.chmod(mode)
        with pytest.raises(Misconfigured, match="upstream 'up': api_key_file: .*the-key: ") as caught:
            read_key(table(api_key_file=str(file)), {})
        assert words in str(caught.value)
        assert not text or text not in str(caught.value)

    def test_a_variable_that_is_not_set_is_one_line(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("NOT_THERE", raising=False)
        options = msgspec.structs.replace(relay_options("http://127.0.0.1:1", api_key_env="NOT_THERE"), port=0)
        assert main(["--options", msgspec.json.encode(options).decode()]) == 2
        said = capfd.readouterr().err
        assert said == "gateway: upstream 'up0': api_key_env: NOT_THERE: there is no key in it\n"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "a b"}, "name: 1 to 64 letters"),
        ({"name": "a\n"}, "name: 1 to 64 letters"),
        ({"model": " "}, "model: a name is needed"),
        ({"model": "a\x1b[2J"}, "model: a name is needed"),
        ({"upstream_model": "a\n"}, "model: a name is needed"),
        ({"url": "ftp://h"}, "url: http://HOST:PORT/v1"),
        ({"url": "h:8000"}, "url: http://HOST:PORT/v1"),
        ({"url": "http://"}, "url: http://HOST:PORT/v1"),
        ({"url": "http://h:99999"}, "url: not a URL"),
        ({"url": "http://h:0"}, "url: http://HOST:PORT/v1"),
        ({"url": "http://user:secret@h"}, "url: a user or password does not belong"),
        ({"url": "http://h/v1?key=secret"}, "url: only scheme, host, port and path"),
        ({"url": "http://h/v1#secret"}, "url: only scheme, host, port and path"),
        ({"url": "http://h/ v1"}, "url: only scheme, host, port and path"),
        ({"url": "http://h\u00e9"}, "url: only scheme, host, port and path"),
        ({"url": "http://h\r\nx: y"}, "url: "),
        ({"api_key_env": "K", "api_key_file": "f"}, "one of them, not both"),
        ({"api_key_env": "sk-secret"}, "api_key_env: the name of an environment variable"),
        ({"requests_max": 0}, "requests_max"),
        ({"idle_timeout_s": 0}, "idle_timeout_s"),
        ({"idle_timeout_s": float("nan")}, "idle_timeout_s"),
    ],
)
def test_what_a_table_may_not_say(fields: dict[str, object], words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        table(**fields)
    assert words in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h", "http://h/v1"),
        ("http://h:80/", "http://h:80/v1"),
        ("http://h/v1", "http://h/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("https://[::1]:8/api/openai", "https://[::1]:8/api/openai"),
    ],
)
def test_what_paths_are_put_behind(url: str, base: str) -> None:
    assert table(url=url).base_url == base
