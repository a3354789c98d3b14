"""Upstreams that fail, say nothing, say nonsense or send the gateway elsewhere: each request ends, in bounded time."""

import gzip
import json
from typing import Any

import httpx
import pytest

from gateway.upstream_answer import EVENT_BYTES_MAX
from tests.http.asking import Body
from tests.http.conftest import Relay, Relaying
from tests.http.harness import LiveGateway
from tests.http.scripted_upstream import Behaviour, ScriptedUpstream, Visit, event, whole
from tests.http.test_upstream import CHAT_URL, chat

SECRET = "internal-detail-7"


def answers(status: int, body: object = None, **headers: str) -> Behaviour:
    """Always the same."""

    async def behave(visit: Visit) -> None:
        await visit.answer({"error": {"message": SECRET, "type": SECRET}} if body is None else body, status, **headers)

    return behave


def sends(data: bytes) -> Behaviour:
    """These bytes, and the end."""

    async def behave(visit: Visit) -> None:
        await visit.raw(data)
        visit.writer.close()

    return behave


def streams(data: bytes, content_type: str = "text/event-stream") -> Behaviour:
    """A stream with these bytes in it."""

    async def behave(visit: Visit) -> None:
        await visit.begin(content_type)
        await visit.chunk(data)
        await visit.end(done=False)

    return behave


def failed(gateway: LiveGateway, answer: httpx.Response) -> tuple[int, Body, str]:
    """Status and error of a failure that keeps to the rules, and its record's outcome."""
    error: Body = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    shown = answer.text + str(answer.headers)
    port = gateway.options.upstreams[0].url.rpartition(":")[2].partition("/")[0]
    for secret in (SECRET, "theirs-1", f":{port}", "their/model", "x-internal"):
        assert secret not in shown
    record = gateway.record(answer.headers["x-request-id"])
    assert record.status == answer.status_code
    return answer.status_code, error, record.outcome


class TestBeforeTheFirstByte:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("status", "expected"),
        [
            (500, (502, "bad_gateway", "upstream_failed")),
            (502, (502, "bad_gateway", "upstream_failed")),
            (529, (502, "bad_gateway", "upstream_failed")),
            (503, (503, "no_healthy_engine", "no_healthy_engine")),
            (504, (504, "engine_timeout", "timeout")),
            (408, (504, "engine_timeout", "timeout")),
            (401, (502, "bad_gateway", "upstream_failed")),
            (403, (502, "bad_gateway", "upstream_failed")),
            (404, (502, "bad_gateway", "upstream_failed")),
            (405, (502, "bad_gateway", "upstream_failed")),
            (413, (413, "request_too_large", "invalid")),
            (301, (502, "bad_gateway", "upstream_failed")),
            (307, (502, "bad_gateway", "upstream_failed")),
            (204, (502, "bad_gateway", "upstream_failed")),
        ],
    )
    def test_each_status_has_its_meaning(
        self, relay: Relay, status: int, expected: tuple[int, str, str], stream: bool
    ) -> None:
        gateway, upstream = relay
        upstream.behaviour = answers(status, x_internal=SECRET, location=f"{gateway.url}/health")
        answer = gateway.client.post(CHAT_URL, json=chat(stream=stream))
        got, error, outcome = failed(gateway, answer)
        assert (got, error["code"], outcome) == expected
        assert len(upstream.visits) == 1

    @pytest.mark.parametrize("status", [429, 503])
    @pytest.mark.parametrize(
        ("headers", "after"),
        [
            ({"retry_after": "7"}, ("7", "7000")),
            ({"retry_after": "7", "retry_after_ms": "1500"}, ("2", "1500")),
            ({"retry_after": "Wed, 21 Oct 2015 07:28:00 GMT"}, ("1", "1000")),
            ({"retry_after": "-3", "retry_after_ms": "nan"}, ("1", "1000")),
            ({}, ("1", "1000")),
        ],
    )
    def test_when_to_come_again(
        self, relay: Relay, status: int, headers: dict[str, str], after: tuple[str, str]
    ) -> None:
        gateway, upstream = relay
        upstream.behaviour = answers(status, **headers)
        answer = gateway.client.post(CHAT_URL, json=chat())
        got, error, outcome = failed(gateway, answer)
        assert got == status and outcome == ("rate_limited" if status == 429 else "no_healthy_engine")
        assert error["type"] == ("requests" if status == 429 else "server_error")
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == after

    def test_at_its_rate_limit_it_is_left_alone(self, relay: Relay) -> None:
        gateway, upstream = relay
        upstream.behaviour = answers(429, retry_after="5")
        results = [gateway.client.post(CHAT_URL, json=chat()) for _ in range(3)]
        assert {answer.status_code for answer in results} == {429}
        assert all(4000 < int(answer.headers["retry-after-ms"]) <= 5000 for answer in results)
        assert len(upstream.visits) == 1
        [behind] = gateway.application.upstreams.upstreams
        assert not behind.breaker.is_open
        upstream.behaviour = answers(200, whole())
        behind.rests_until_ns = 0
        assert gateway.client.post(CHAT_URL, json=chat()).status_code == 200

    @pytest.mark.parametrize(
        ("body", "message", "code", "param"),
        [
            ({"error": {"message": "what?", "code": "unknown_parameter"}}, "what?", "unknown_parameter", None),
            (
                {"error": {"message": "bad temperature", "type": "x", "param": "temperature", "code": "out_of_range"}},
                "bad temperature",
                "invalid_value",
                "temperature",
            ),
            (
                {"object": "error", "message": "This model's maximum context length is 8 tokens.", "code": 400},
                "This model's maximum context length is 8 tokens.",
                "context_length_exceeded",
                None,
            ),
            (
                {"error": {"code": 400, "message": "too long", "type": "exceed_context_size_error", "n_ctx": 8}},
                "too long",
                "context_length_exceeded",
                None,
            ),
            ({"error": {"message": "m" * 5000, "param": 3}}, "m" * 1000, "invalid_value", None),
            ({"detail": [{"loc": ["body"], "msg": SECRET}]}, None, "invalid_value", None),
            (b"<html>" + SECRET.encode(), None, "invalid_value", None),
            (b'{"error": ' + b"[" * 60_000, None, "invalid_value", None),
            (b"", None, "invalid_value", None),
            ({"error": "just words"}, None, "invalid_value", None),
            ({"error": {"message": "\N{WINKING FACE} \ud800"}}, None, "invalid_value", None),
        ],
    )
    @pytest.mark.parametrize("status", [400, 422])
    def test_what_it_says_of_a_bad_request_is_passed_on(
        self, relay: Relay, status: int, body: Any, message: str | None, code: str, param: str | None
    ) -> None:
        gateway, upstream = relay
        upstream.behaviour = answers(status, body)
        got, error, outcome = failed(gateway, gateway.client.post(CHAT_URL, json=chat(stream=True)))
        assert (got, outcome, error["type"]) == (400, "refused", "invalid_request_error")
        expected = message or "The server of this model refused the request."
        assert (error["message"], error["code"], error["param"]) == (expected, code, param)

    @pytest.mark.parametrize("stream", [False, True])
    def test_its_key_and_address_never_come_back(
        self, upstream: ScriptedUpstream, relaying: Relaying, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        monkeypatch.setenv("THEIR_KEY", "canary+/=1")

        async def talkative(visit: Visit) -> None:
            said = f"{visit.headers['authorization']} is no key at http://{visit.headers['host']}/v1"
            await visit.answer({"error": {"message": said, "code": said, "param": said}}, 400)

        upstream.behaviour = talkative
        gateway = relaying(upstream, api_key_env="THEIR_KEY")
        answer = gateway.client.post(CHAT_URL, json=chat(stream=stream))
        failed(gateway, answer)
        assert answer.status_code == 400 and "canary" not in answer.text and str(upstream.port) not in answer.text
        assert "is no key at" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("data", "stream"),
        [
            (b"nonsense\r\n\r\n", False),
            (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", False),
            (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", False),
            (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 500 + b"\r\n", False),
            (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{", False),
            (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 0\r\n\r\n", False),
            (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", True),
            (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab", True),
            (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", True),
            (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {", True),
        ],
        ids=range(10),
    )
    def test_no_http_or_half_of_it(self, relay: Relay, data: bytes, stream: bool) -> None:
        gateway, upstream = relay
        upstream.behaviour = sends(data)
        got, error, outcome = failed(gateway, gateway.client.post(CHAT_URL, json=chat(stream=stream)))
        assert (got, error["code"], outcome) == (502, "bad_gateway", "upstream_failed")
        assert len(upstream.visits) == 1

    @pytest.mark.parametrize(
        ("behave", "stream"),
        [
            (answers(200, whole()), True),
            (answers(200, whole(), content_type="text/plain"), False),
            (answers(200, whole(), content_type=""), False),
            (streams(event("x")), False),
            (streams(event("x"), "application/json"), True),
            (answers(200, gzip.compress(json.dumps(whole()).encode()), content_encoding="gzip"), False),
            (answers(200, b"[1]"), False),
            (answers(200, b"null"), False),
            (answers(200, b'{"choices":'), False),
            (answers(200, b'{"choices":{}}'), False),
            (answers(200, b'{"choices":[' + b"[" * 50_000), False),
            (answers(200, {"object": "list"}), False),
            (answers(200, {"object": "list", "choices": None}), False),
            (answers(200, {"object": "error", "message": SECRET, "code": 500}), False),
            (streams(b'data: {"object":"error","message":"' + SECRET.encode() + b'"}\n\ndata: [DONE]\n\n'), True),
            (answers(200, b'{"choices":[{"text":"\xff"}]}'), False),
            (answers(200, {"error": {"message": SECRET}}), False),
            (streams(b"data: {\n\n"), True),
            (streams(b"data: 17\n\n"), True),
            (streams(b'data: {"choices":[{"delta":{"content":"\xc3"}}]}\n\n'), True),
            (streams(b'data: {"choices":[3]}\n\n'), True),
            (streams(b'data: {"error":{"message":"' + SECRET.encode() + b'"}}\n\n'), True),
            (streams(b"<html>" + SECRET.encode()), True),
            (streams(b": nothing\n\n" * 10), True),
            (streams(b": nothing\n\ndata: [DONE]\n\n"), True),
        ],
        ids=range(25),
    )
    def test_what_is_no_answer(self, relay: Relay, behave: Behaviour, stream: bool) -> None:
        gateway, upstream = relay
        upstream.behaviour = behave
        got, error, outcome = failed(gateway, gateway.client.post(CHAT_URL, json=chat(stream=stream)))
        assert (got, error["code"], outcome) == (502, "bad_gateway", "upstream_failed")

    @pytest.mark.parametrize("size", [1024, 60_000])
    def test_an_event_without_an_end(self, relay: Relay, size: int) -> None:
        gateway, upstream = relay
        sent = 0

        async def behave(visit: Visit) -> None:
            nonlocal sent
            await visit.begin()
            await visit.chunk(b"data: ")
            while True:
                await visit.chunk(b"x" * size)
                sent += size

        upstream.behaviour = behave
        got, error, _ = failed(gateway, gateway.client.post(CHAT_URL, json=chat(stream=True)))
        assert (got, error["code"]) == (502, "bad_gateway")
        assert sent < EVENT_BYTES_MAX + 16 * 1024 * 1024  # what lies in the buffers of two sockets

    def test_a_whole_answer_without_an_end(self, relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gateway.upstream_relay.WHOLE_BYTES_MAX", 100_000)
        gateway, upstream = relay

        async def behave(visit: Visit) -> None:
            await visit.begin("application/json")
            while True:
                await visit.chunk(b" " * 10_000)

        upstream.behaviour = behave
        assert failed(gateway, gateway.client.post(CHAT_URL, json=chat()))[0] == 502

    @pytest.mark.parametrize(("code", "status"), [(400, 400), (429, 429), (503, 503), (500, 502), ("x", 502), (7, 502)])
    @pytest.mark.parametrize("old", [False, True])
    def test_an_error_in_place_of_the_first_event_is_a_status(
        self, relay: Relay, code: object, status: int, old: bool
    ) -> None:
        gateway, upstream = relay
        said = {"message": "no", "code": code}  # the older form is that of vLLM and SGLang
        body = {"object": "error", **said} if old else {"error": said}
        upstream.behaviour = streams(b"data: " + json.dumps(body).encode() + b"\n\ndata: [DONE]\n\n")
        assert failed(gateway, gateway.client.post(CHAT_URL, json=chat(stream=True)))[0] == status


def broken_stream(gateway: LiveGateway, **fields: object) -> tuple[list[str], Body, str]:
    """The events of a stream that fails in the middle, its error, and its record's outcome."""
    with gateway.client.stream("POST", CHAT_URL, json=chat(stream=True, **fields)) as answer:
        assert answer.status_code == 200
        text = "".join(answer.iter_text())
    events = text.split("\n\n")
    assert events[-1] == "" and "[DONE]" not in text and SECRET not in text
    error: Body = json.loads(events[-2].removeprefix("data: "))["error"]
    record = gateway.record(answer.headers["x-request-id"])
    assert record.usage_estimated and record.output_tokens == len(events) - 2
    return events[:-2], error, record.outcome


class TestAfterTheFirstByte:
    @pytest.mark.parametrize(
        ("rest", "code"),
        [
            (b"", "bad_gateway"),
            (b"data: {broken\n\n", "bad_gateway"),
            (b"data: " + b"x" * (EVENT_BYTES_MAX + 1), "bad_gateway"),
            (b'data: {"error":{"message":"' + SECRET.encode() + b'","code":500}}\n\n', "bad_gateway"),
            (b'data: {"error":{"message":"gone","code":503}}\n\ndata: [DONE]\n\n', "no_healthy_engine"),
            (b'data: {"object":"error","message":"gone","code":503}\n\ndata: [DONE]\n\n', "no_healthy_engine"),
            (b'data: {"choices":[{"delta":{"content":"\xe2\x82"}}]}\n\n', "bad_gateway"),
        ],
        ids=["end", "garbage", "huge", "error", "error 503", "old error 503", "half a character"],
    )
    @pytest.mark.parametrize("together", [False, True])
    def test_what_came_before_it_stays(self, relay: Relay, rest: bytes, code: str, together: bool) -> None:
        gateway, upstream = relay

        async def behave(visit: Visit) -> None:
            await visit.begin()
            good = event("one") + event("two")
            await visit.chunk(good + rest if together else good)
            if rest and not together:
                await visit.chunk(rest)
            await visit.end(done=False)

        upstream.behaviour = behave
        events, error, outcome = broken_stream(gateway)
        assert len(events) == 2 and error["code"] == code
        assert outcome == ("upstream_failed" if code == "bad_gateway" else code)

    def test_it_hangs_up(self, relay: Relay) -> None:
        gateway, upstream = relay

        async def behave(visit: Visit) -> None:
            await visit.begin()
            await visit.say("one")
            visit.writer.transport.abort()

        upstream.behaviour = behave
        assert broken_stream(gateway)[1:][1] == "upstream_failed"
