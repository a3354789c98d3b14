"""
Every way to be refused: the status, the OpenAI error, the headers, and one record each.
"""

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.api import Fault, FinishReason
from gateway.wire import Json
from tests.http.conftest import Custom, options_for
from tests.http.fake_engine import FakeEngine, Job
from tests.http.golden import check_golden
from tests.http.harness import WAIT_S, LiveGateway, ShellEngine

Pair = tuple[LiveGateway, FakeEngine]
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
URL = "/v1/chat/completions"


def error_of(answer: httpx.Response, status: int, kind: str, code: str | None, param: str | None = None) -> str:
    """The message of an error response whose shape has been checked."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert re.fullmatch(r"[A-Za-z0-9._:-]+", answer.headers["x-request-id"])
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == (kind, code, param)
    assert "Traceback" not in error["message"]
    assert "Error(" not in error["message"]
    return str(error["message"])


class TestBodies:
    @pytest.mark.parametrize("stream", [False, True])
    def test_an_invalid_request_is_a_400_before_any_header(self, shell: LiveGateway, stream: bool) -> None:
        answer = shell.client.post(URL, json={**CHAT, "stream": stream, "temperature": 9})
        error_of(answer, 400, "invalid_request_error", "invalid_value", "temperature")
        record = shell.record(answer.headers["x-request-id"])
        assert (record.outcome, record.status) == ("invalid", 400)
        assert set(record.states) <= {"auth", "parse", "send", "finalize"}

    @pytest.mark.parametrize("path", [URL, "/v1/completions", "/tokenize", "/detokenize"])
    @pytest.mark.parametrize("body", [b"{", b"\xff", b'"\\ud800"', b"[" * 70_000, b"", b'{"a": NaN}', b"[1]"])
    def test_malformed_json(self, shell: LiveGateway, path: str, body: bytes) -> None:
        answer = shell.client.post(path, content=body, headers={"content-type": "application/json"})
        error_of(answer, 400, "invalid_request_error", "invalid_value")

    @pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
    def test_other_content_types(self, shell: LiveGateway, kind: str) -> None:
        answer = shell.client.post(URL, content=b"{}", headers={"content-type": kind})
        error_of(answer, 415, "invalid_request_error", "unsupported_media_type")

    def test_json_by_another_name(self, shell: LiveGateway) -> None:
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        assert shell.client.post(URL, content=json.dumps(CHAT).encode(), headers=headers).status_code == 200

    @pytest.mark.parametrize("chunked", [False, True])
    def test_a_body_over_the_limit(self, custom: Custom, chunked: bool) -> None:
        gateway, _ = custom(body_bytes_max=10_000)
        big = json.dumps({**CHAT, "user": "x" * 20_000}).encode()
        content = iter([big[:9_000], big[9_000:]]) if chunked else big
        answer = gateway.client.post(URL, content=content, headers={"content-type": "application/json"})
        assert "10000" in error_of(answer, 413, "invalid_request_error", "request_too_large")
        assert gateway.client.post(URL, json=CHAT).status_code == 200

    def test_a_body_that_comes_too_slowly(self, custom: Custom) -> None:
        gateway, _ = custom(body_timeout_s=0.2)
        with gateway.connect() as raw:
            head = f"POST {URL} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{{"
            raw.sendall(head.encode())
            answer = raw.makefile("rb").read()  # to the end: the server closes
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer
        assert b'"type":"timeout_error"' in answer

    def test_headers_over_the_limit(self, custom: Custom) -> None:
        gateway, _ = custom(header_bytes_max=2_000)
        assert gateway.client.get("/health", headers={"x-long": "y" * 3_000}).status_code == 431

    def test_too_many_messages(self, custom: Custom) -> None:
        gateway, _ = custom(messages_max=3)
        answer = gateway.client.post(URL, json={**CHAT, "messages": CHAT["messages"] * 4})
        error_of(answer, 400, "invalid_request_error", "invalid_value", "messages")

    def test_a_large_valid_body_is_served(self, fake: Pair) -> None:
        gateway, _ = fake
        body = {**CHAT, "messages": [{"role": "user", "content": "x"}], "metadata": {"k": "v" * 200_000}}
        assert gateway.client.post(URL, json=body).status_code == 200


class TestModel:
    @pytest.mark.parametrize("path", [URL, "/v1/completions"])
    def test_unknown(self, shell: LiveGateway, path: str) -> None:
        body = {**CHAT, "model": "gpt-9"} if path == URL else {"model": "gpt-9", "prompt": "a"}
        answer = shell.client.post(path, json=body)
        error_of(answer, 404, "invalid_request_error", "model_not_found", "model")
        assert shell.record(answer.headers["x-request-id"]).outcome == "not_found"

    def test_models(self, shell: LiveGateway) -> None:
        listed = shell.client.get("/v1/models").json()
        assert [model["id"] for model in listed["data"]] == ["tiny"]
        assert shell.client.get("/v1/models/tiny").json() == listed["data"][0]
        error_of(shell.client.get("/v1/models/a/b"), 404, "invalid_request_error", "model_not_found", "model")

    def test_a_name_with_a_slash(self, custom: Custom) -> None:
        gateway, _ = custom(model_name="org/tiny-1B", ready=False)
        assert gateway.client.get("/v1/models/org/tiny-1B").json()["id"] == "org/tiny-1B"


class TestUrls:
    @pytest.mark.parametrize(
        "path",
        ["/page/no.js", "/page/x/y", "/v1", "/v1/no", "/v1/chat/completions/x", "/%00", "/debug/requests/no/such"],
    )
    def test_unknown(self, shell: LiveGateway, path: str) -> None:
        error_of(shell.client.get(path), 404, "invalid_request_error", "not_found")

    @pytest.mark.parametrize(("method", "path"), [("GET", URL), ("DELETE", "/v1/models"), ("PUT", "/health")])
    def test_wrong_methods(self, shell: LiveGateway, method: str, path: str) -> None:
        answer = shell.client.request(method, path)
        error_of(answer, 405, "invalid_request_error", "method_not_allowed")

    def test_a_crash_is_an_error_like_any_other(self, custom: Custom, monkeypatch: pytest.MonkeyPatch) -> None:
        gateway, _ = custom()

        def crash() -> Json:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(gateway.application.gateway, "health", crash)
        answer = gateway.client.get("/health", headers={"origin": "http://app"})
        message = error_of(answer, 500, "server_error", "internal_error")
        assert "secret" not in message
        assert answer.headers["access-control-allow-origin"] == "*"
        assert gateway.record(answer.headers["x-request-id"]).outcome == "error"


class TestContext:
    @pytest.mark.parametrize("stream", [False, True])
    def test_prompt_and_output_do_not_fit(self, shell: LiveGateway, stream: bool) -> None:
        answer = shell.client.post(URL, json={**CHAT, "max_tokens": 600, "stream": stream})
        message = error_of(answer, 400, "invalid_request_error", "context_length_exceeded", "messages")
        assert message == (
            "This model's maximum context length is 512 tokens. However, you requested 612 tokens "
            "(12 in the prompt, 600 for the output)."
        )
        assert shell.record(answer.headers["x-request-id"]).outcome == "invalid"

    def test_the_prompt_alone_does_not_fit(self, shell: LiveGateway) -> None:
        body = {"model": "tiny", "prompt": [40] * 512}
        error_of(
            shell.client.post("/v1/completions", json=body),
            400,
            "invalid_request_error",
            "context_length_exceeded",
            "prompt",
        )
        body = {"model": "tiny", "prompt": [40] * 511}
        assert shell.client.post("/v1/completions", json=body).status_code == 200

    def test_a_very_long_prompt(self, shell: LiveGateway) -> None:
        answer = shell.client.post(URL, json={**CHAT, "messages": [{"role": "user", "content": "word " * 100_000}]})
        error_of(answer, 400, "invalid_request_error", "context_length_exceeded", "messages")


class TestPrompts:
    @pytest.mark.parametrize(
        ("given", "param"),
        [
            ("", "prompt"),
            ([""], "prompt[0]"),
            ([[]], "prompt[0]"),
            (["a", ""], "prompt[1]"),
            ([400], "prompt[0]"),
            ([[1], [400]], "prompt[1][0]"),
        ],
    )
    def test_empty_and_foreign(self, shell: LiveGateway, given: object, param: str) -> None:
        answer = shell.client.post("/v1/completions", json={"model": "tiny", "prompt": given})
        error_of(answer, 400, "invalid_request_error", "invalid_value", param)

    def test_too_many_sequences(self, shell: LiveGateway) -> None:
        answer = shell.client.post("/v1/completions", json={"model": "tiny", "prompt": ["a"] * 33, "n": 4})
        error_of(answer, 400, "invalid_request_error", "invalid_value", "n")

    def test_what_the_template_refuses(self, shell: LiveGateway) -> None:
        body = {**CHAT, "messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}
        message = error_of(shell.client.post(URL, json=body), 400, "invalid_request_error", "invalid_value", "messages")
        assert "a tool speaks first" in message

    def test_template_arguments_that_are_ours(self, shell: LiveGateway) -> None:
        answer = shell.client.post(URL, json={**CHAT, "chat_template_kwargs": {"messages": []}})
        error_of(answer, 400, "invalid_request_error", "invalid_value", "chat_template_kwargs.messages")

    @pytest.mark.parametrize("key", ["400", "x"])
    def test_a_bias_beyond_the_vocabulary_hurts_nobody_else(self, shell: LiveGateway, key: str) -> None:
        body = {**CHAT, "max_tokens": 200, "ignore_eos": True, "seed": 4}
        expected = shell.client.post(URL, json=body).json()["choices"][0]["message"]["content"]
        with shell.client.stream("POST", URL, json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            refused = httpx.post(shell.url + URL, json={**CHAT, "logit_bias": {key: 1}})
            error_of(refused, 400, "invalid_request_error", "invalid_value", f"logit_bias.{key}")
            events = [first, *lines]
        chunks = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected


class TestEngineSaysNo:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("reason", "fault", "status", "kind", "code", "param", "outcome"),
        [
            ("overloaded", Fault("overloaded", "Full."), 503, "server_error", "overloaded", None, "overloaded"),
            (
                "refused",
                Fault("context_length_exceeded", "Too long.", "max_tokens"),
                400,
                "invalid_request_error",
                "context_length_exceeded",
                "max_tokens",
                "refused",
            ),
            ("deadline", Fault("engine_timeout", "Late."), 504, "server_error", "engine_timeout", None, "deadline"),
            (
                "failed",
                Fault("internal_error", "NaN in layer 3"),
                500,
                "server_error",
                "internal_error",
                None,
                "failed",
            ),
            (
                "failed",
                Fault("degenerate_output", "The model's numbers are none."),
                500,
                "server_error",
                "degenerate_output",
                None,
                "failed",
            ),
            ("shutdown", None, 503, "server_error", "no_healthy_engine", None, "no_healthy_engine"),
        ],
    )
    def test_before_the_first_byte(
        self,
        fake: Pair,
        stream: bool,
        reason: FinishReason,
        fault: Fault | None,
        status: int,
        kind: str,
        code: str,
        param: str | None,
        outcome: str,
    ) -> None:
        gateway, engine = fake

        async def refuse(job: Job) -> None:
            await job.finish(reason, fault=fault)

        engine.behaviour = refuse
        answer = gateway.client.post(URL, json={**CHAT, "stream": stream})
        message = error_of(answer, status, kind, code, param)
        assert "layer" not in message
        if status == 503:
            assert int(answer.headers["retry-after"]) >= 1
            assert int(answer.headers["retry-after-ms"]) >= 1000
        record = gateway.record(answer.headers["x-request-id"])
        assert (record.outcome, record.status) == (outcome, status)

    @pytest.mark.parametrize(
        ("reason", "code"),
        [
            ("deadline", "engine_timeout"),
            ("failed", "internal_error"),
            ("shutdown", "no_healthy_engine"),
            ("abort", "internal_error"),
        ],
    )
    def test_after_the_first_byte_it_is_the_last_event(self, fake: Pair, reason: FinishReason, code: str) -> None:
        gateway, engine = fake

        started = threading.Event()

        async def fail_late(job: Job) -> None:
            await job.accept()
            await job.emit([40, 41])
            await asyncio.to_thread(started.wait, WAIT_S)
            await job.finish(reason, fault=Fault("x", "Words for the client."))

        engine.behaviour = fail_late
        name = f"late-{reason}"
        body = {**CHAT, "stream": True}
        with gateway.client.stream("POST", URL, json=body, headers={"x-request-id": name}) as answer:
            assert answer.status_code == 200
            texts = answer.iter_text()
            text = next(texts)
            started.set()
            text += "".join(texts)
        assert "[DONE]" not in text
        last = text.split("\n\n")[-2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
        record = gateway.record(name)
        assert (record.status, record.output_tokens) == (200, 2)
        assert record.outcome == ("no_healthy_engine" if reason == "shutdown" else reason)
        check_golden(f"{name}.sse", last)

    def test_one_of_three_choices_fails(self, fake: Pair) -> None:
        gateway, engine = fake

        async def second_fails(job: Job) -> None:
            await job.accept()
            if job.request.request_id.endswith("-1"):
                await job.finish("failed", fault=Fault("internal_error", "NaN"))
            else:
                await job.until_aborted()

        engine.behaviour = second_fails
        answer = gateway.client.post(URL, json={**CHAT, "n": 3})
        error_of(answer, 500, "server_error", "internal_error")
        request_id = answer.headers["x-request-id"]
        assert {engine.wait_for_abort(request_id, index) > 0 for index in (0, 2)} == {True}
        assert gateway.record(request_id).outcome == "failed"

    def test_the_queue_of_the_real_engine_is_bounded(self, model_dir: Path, vocab_size: int, socket_path: str) -> None:
        engine = ShellEngine(socket_path, vocab_size=vocab_size, step_delay_s=0.1)  # slower than we send
        engine.start()
        gateway = LiveGateway(options_for(model_dir, socket_path))
        gateway.start()
        body = {"model": "tiny", "prompt": ["a b c"] * 16, "n": 8, "max_tokens": 50, "ignore_eos": True}
        answer = gateway.client.post("/v1/completions", json=body)
        error_of(answer, 503, "server_error", "overloaded")  # 128 sequences: 16 in the batch and 64 in the queue
        assert gateway.client.post(URL, json={**CHAT, "max_tokens": 2}).status_code == 200
        gateway.stop()
        engine.stop()


class TestCors:
    def test_preflight_needs_nothing(self, shell: LiveGateway) -> None:
        headers = {
            "origin": "http://app",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type",
        }
        answer = shell.client.options(URL, headers=headers)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
        assert "content-length" not in answer.headers

    @pytest.mark.parametrize("path", ["/health", "/nope", URL])
    def test_every_response_carries_the_headers(self, shell: LiveGateway, path: str) -> None:
        answer = shell.client.get(path, headers={"origin": "http://app"})
        assert answer.headers["access-control-allow-origin"] == "*"
        exposed = answer.headers["access-control-expose-headers"]
        assert all(name in exposed for name in ("x-request-id", "retry-after", "x-ratelimit-remaining-tokens"))
        assert "access-control-allow-origin" not in shell.client.get(path).headers

    def test_named_origins_only(self, custom: Custom) -> None:
        gateway, _ = custom(cors_origins=("http://good",))
        good = gateway.client.get("/health", headers={"origin": "http://good"})
        assert (good.headers["access-control-allow-origin"], good.headers["vary"]) == ("http://good", "origin")
        assert (
            "access-control-allow-origin" not in gateway.client.get("/health", headers={"origin": "http://bad"}).headers
        )


def test_bodies_of_errors(custom: Custom) -> None:
    gateway, _ = custom()
    cases: dict[str, dict[str, Any]] = {
        "unknown field": {**CHAT, "temprature": 1},
        "missing": {"model": "tiny"},
        "part": {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "tools": {**CHAT, "tools": [{"type": "function"}]},
        "model": {**CHAT, "model": "other"},
        "context": {**CHAT, "max_tokens": 1000},
        "range": {**CHAT, "temperature": 3},
    }
    shown = "".join(f"{name}: {gateway.client.post(URL, json=body).text}\n" for name, body in cases.items())
    check_golden("errors.txt", shown)
