"""A model that an upstream serves: what it is sent, what the client gets, what the books say."""

import json
import threading
from typing import Any

import pytest

from telemetry.books import request_mismatches
from telemetry.records import RequestRecord
from tests.http.asking import Body, contents
from tests.http.conftest import Relay, Relaying
from tests.http.harness import WAIT_S, LiveGateway
from tests.http.scripted_upstream import UPSTREAM_MODEL, USAGE, ScriptedUpstream, Visit, event, whole

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


def chat(**fields: object) -> Body:
    return {"model": "remote", "messages": MESSAGES, "max_tokens": 12, **fields}


def streamed(gateway: LiveGateway, body: Body, path: str = CHAT_URL) -> tuple[list[Body], RequestRecord]:
    """The chunks of a good stream, and its record."""
    with gateway.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        transcript = "".join(answer.iter_text())
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert float(answer.headers["x-pellucid-overhead-ms"]) >= 0
    assert transcript.endswith("data: [DONE]\n\n")
    chunks: list[Body] = [json.loads(one.removeprefix("data: ")) for one in transcript.split("\n\n")[:-2]]
    record = gateway.record(answer.headers["x-request-id"])
    assert {(chunk["id"], chunk["model"]) for chunk in chunks} == {(record.request_id, "remote")}
    assert list(request_mismatches(record)) == []
    return chunks, record


class TestTheWayThere:
    def test_it_gets_what_the_client_said_and_nothing_of_who_said_it(
        self, upstream: ScriptedUpstream, relaying: Relaying, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("THEIR_KEY", "their-secret")
        gateway = relaying(upstream, api_key_env="THEIR_KEY")
        text = (
            '{"model":"remote", "messages":[{"role":"user","content":"\\u00e9\\ud83d\\ude09","extra":[1e400,-0.0]}],'
            '"tools":[{"type":"function","function":{"name":"f","parameters":{"b":1,"a":12345678901234567890123}}}],'
            '"response_format":{"type":"json_schema"},"n":1,"something_new":{"x": [ 1 ]}}'
        )
        headers = {
            "content-type": "application/json",
            "authorization": "Bearer my-key",
            "x-api-key": "my-key",
            "cookie": "session=mine",
            "x-forwarded-for": "10.1.2.3",
            "user-agent": "me",
            "x-request-id": "asked-1",
            "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
            "tracestate": "vendor=1",
            "te": "trailers",
            "connection": "keep-alive, x-mine",
            "x-mine": "mine",
        }
        answer = gateway.client.post(CHAT_URL, content=text, headers=headers)
        assert answer.status_code == 200, answer.text
        [visit] = upstream.visits
        assert (visit.method, visit.path) == ("POST", "/v1/chat/completions")
        expected = text.replace(" ", "").replace('"remote"', f'"{UPSTREAM_MODEL}"')
        assert visit.raw_body.decode().replace(" ", "") == expected
        traceparent = visit.headers.pop("traceparent")
        assert traceparent.startswith(f"00-{'a' * 32}-") and "b" * 16 not in traceparent
        assert visit.headers == {
            "host": f"127.0.0.1:{upstream.port}",
            "user-agent": "pellucid",
            "accept": "application/json",
            "accept-encoding": "identity",
            "authorization": "Bearer their-secret",
            "content-type": "application/json",
            "content-length": str(len(visit.raw_body)),
            "x-request-id": "asked-1",
            "tracestate": "vendor=1",
        }

    def test_a_trace_state_that_is_none_goes_nowhere(self, relay: Relay) -> None:
        gateway, upstream = relay
        headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": b"vendor=\xff\x09x"}
        assert gateway.client.post(CHAT_URL, json=chat(), headers=headers).status_code == 200  # type: ignore[arg-type]
        assert "tracestate" not in upstream.visits[0].headers

    @pytest.mark.parametrize("given", [None, {}, {"include_usage": False}, {"include_usage": True, "more": 1}])
    def test_a_stream_is_always_asked_for_its_usage(self, relay: Relay, given: Any) -> None:
        gateway, upstream = relay
        chunks, record = streamed(gateway, chat(stream_options=given) if given is not None else chat())
        assert upstream.visits[0].body["stream_options"] == {**(given or {}), "include_usage": True}
        shown = [chunk["usage"] for chunk in chunks if "usage" in chunk]
        assert shown == ([USAGE] if (given or {}).get("include_usage") else [])
        assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (21, 16, 3)
        assert not record.usage_estimated

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"stream": "yes"}, "stream"),
            ({"stream": True, "stream_options": []}, "stream_options"),
            ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
            ({"messages": []}, "messages"),
            ({"messages": "Hello"}, "messages"),
            ({"messages": None}, "messages"),
            ({"messages": [MESSAGES[0]] * 5}, "messages"),
        ],
    )
    def test_what_we_must_know_ourselves_is_checked(
        self, upstream: ScriptedUpstream, relaying: Relaying, fields: Body, param: str
    ) -> None:
        gateway = relaying(upstream, gateway={"messages_max": 4})
        answer = gateway.client.post(CHAT_URL, json=chat(**fields))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert upstream.visits == []

    @pytest.mark.parametrize("path", [CHAT_URL, COMPLETIONS_URL])
    def test_an_unknown_model_is_that_whatever_else_is_asked_for(self, relay: Relay, path: str) -> None:
        gateway, upstream = relay
        answer = gateway.client.post(path, json=chat(model="unknown", tools=[{}], nonsense=1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert gateway.client.post(path, json={"messages": MESSAGES}).status_code == 400
        assert upstream.visits == []

    @pytest.mark.parametrize(
        "text",
        [
            '{"model":"remote","messages":' + "[" * 80 + "]" * 80 + "}",
            '{"model":"remote","messages":' + "[" * 100_000 + "]" * 100_000 + "}",
            '{"model":"remote","messages":[{"role":"user","content":"\\ud800"}]}',
            '{"model":"remote","messages":[{"role":"user","content":NaN}]}',
            '{"model":"remote","model":"other","messages":[]}',
            '{"model":"remote","messages":[1}',
            '{"model":{"a":"remote"}}',
            '["remote"]',
        ],
    )
    def test_what_is_no_json_of_ours_goes_nowhere(self, relay: Relay, text: str) -> None:
        gateway, upstream = relay
        headers = {"content-type": "application/json"}
        assert gateway.client.post(CHAT_URL, content=text, headers=headers).status_code in (400, 404)
        assert upstream.visits == []

    def test_a_large_body_arrives(self, relay: Relay) -> None:
        gateway, upstream = relay
        content = "é" * 2_500_000
        answer = gateway.client.post(CHAT_URL, json=chat(messages=[{"role": "user", "content": content}]))
        assert answer.status_code == 200
        assert upstream.visits[0].body["messages"][0]["content"] == content

    def test_only_the_two_routes_lead_there(self, upstream: ScriptedUpstream, relaying: Relaying) -> None:
        gateway = relaying(upstream)
        assert gateway.client.post("/v1/embeddings", json=chat()).status_code == 404
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            answer = gateway.client.post(path, json={"model": "remote", **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
            assert gateway.client.post(path, json=body).status_code == 404
        assert upstream.visits == []
        assert {visit.path for visit in upstream.probes} == {"/v1/models"}


class TestTheWayBack:
    def test_a_whole_answer(self, relay: Relay) -> None:
        gateway, upstream = relay
        given = whole(system_fingerprint="fp", odd={"x": [1, 2.50]}, service_tier=None)

        async def behave(visit: Visit) -> None:
            await visit.answer(given)

        upstream.behaviour = behave
        answer = gateway.client.post(CHAT_URL, json=chat())
        record = gateway.record(answer.headers["x-request-id"])
        assert answer.json() == {**given, "id": record.request_id, "model": "remote"}
        assert b'"odd":{"x": [1, 2.5]}' in answer.content  # as it came, byte for byte
        assert answer.headers["server-timing"].startswith("parse;dur=")
        assert (record.outcome, record.status, record.upstream, record.model) == ("stop", 200, "up0", "remote")
        assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (21, 16, 3)
        assert {"parse", "dispatch", "upstream"} <= set(record.states) <= {
            "auth", "parse", "limit", "route", "dispatch", "upstream", "send", "send_blocked", "finalize",
        }  # fmt: skip
        assert record.first_token_ns == record.gap_max_ns == record.computed_tokens == record.kv_block_ns == 0
        assert list(request_mismatches(record)) == []

    def test_a_stream_comes_event_by_event(self, relay: Relay) -> None:
        gateway, upstream = relay
        seen = [threading.Event() for _ in range(2)]

        async def behave(visit: Visit) -> None:
            import asyncio

            await visit.begin()
            for content, read in zip(("one", "two"), seen, strict=True):
                await visit.say(content)
                assert await asyncio.to_thread(read.wait, WAIT_S)
            await visit.say(finish="length")
            await visit.end()

        upstream.behaviour = behave
        with gateway.client.stream("POST", CHAT_URL, json=chat(stream=True)) as answer:
            texts = answer.iter_text()
            assert '"one"' in next(texts)
            seen[0].set()
            assert '"two"' in next(texts)
            live = gateway.client.get("/debug/requests").json()["requests"][0]
            assert (live["outcome"], live["output_tokens"], live["state"]) == (None, 2, "upstream")
            seen[1].set()
            assert "".join(texts).endswith("data: [DONE]\n\n")
        record = gateway.record(answer.headers["x-request-id"])
        assert (record.outcome, record.stream, record.output_tokens) == ("length", True, 2)
        assert record.usage_estimated and record.prompt_tokens == 6
        assert 0 < record.first_token_ns < record.finished_ns - record.accepted_ns
        assert record.gap_max_ns > 0 and record.states["upstream"] > record.gap_max_ns

    @pytest.mark.parametrize("path", [CHAT_URL, COMPLETIONS_URL])
    def test_a_stream_as_good_servers_send_it(self, relay: Relay, path: str) -> None:
        body = chat() if path == CHAT_URL else {"model": "remote", "prompt": ["a", "b"], "n": 2}
        chunks, record = streamed(relay[0], body, path)
        assert contents(chunks) == ["Hello there"]
        assert all("usage" not in chunk for chunk in chunks)
        assert record.choices == (1 if path == CHAT_URL else 4)

    @pytest.mark.parametrize("path", [CHAT_URL, COMPLETIONS_URL])
    def test_a_whole_answer_without_a_usage_is_estimated(self, relay: Relay, path: str) -> None:
        gateway, upstream = relay

        async def behave(visit: Visit) -> None:
            await visit.answer(whole("0123456789", chat=path == CHAT_URL, usage=None))

        upstream.behaviour = behave
        body = chat() if path == CHAT_URL else {"model": "remote", "prompt": [[1, 2, 3], [4]]}
        record = gateway.record(gateway.client.post(path, json=body).headers["x-request-id"])
        assert record.usage_estimated
        assert (record.prompt_tokens, record.output_tokens) == (6 if path == CHAT_URL else 4, 3)

    @pytest.mark.parametrize("usage", [[], {}, {"prompt_tokens": -1}, {"prompt_tokens": 10**40}, "7", 7])
    def test_a_usage_that_is_none_is_estimated(self, relay: Relay, usage: object) -> None:
        gateway, upstream = relay

        async def behave(visit: Visit) -> None:
            await visit.answer(whole("0123456789", usage=usage))

        upstream.behaviour = behave
        record = gateway.record(gateway.client.post(CHAT_URL, json=chat()).headers["x-request-id"])
        assert record.usage_estimated and (record.prompt_tokens, record.output_tokens) == (6, 3)

    def test_a_usage_beside_the_last_words_is_taken_and_not_shown(self, relay: Relay) -> None:
        gateway, upstream = relay

        async def behave(visit: Visit) -> None:
            await visit.begin()
            await visit.chunk(event("", choices=[], usage=None, prompt_filter_results=[]))  # as Azure begins
            await visit.say("Hi", usage={"prompt_tokens": 1, "completion_tokens": 1})  # as vLLM can be told to
            await visit.say(finish="stop", usage=USAGE)
            await visit.end()

        upstream.behaviour = behave
        chunks, record = streamed(gateway, chat())
        assert len(chunks) == 3 and all("usage" not in chunk for chunk in chunks)
        assert (record.prompt_tokens, record.output_tokens) == (21, 3)

    @pytest.mark.parametrize(
        ("body", "counted"), [(chat(n=2), (21, 6)), ({"model": "remote", "prompt": ["a", "b"]}, (42, 6))]
    )
    def test_a_usage_for_each_choice_is_added_up(self, relay: Relay, body: Body, counted: tuple[int, int]) -> None:
        gateway, upstream = relay

        async def behave(visit: Visit) -> None:  # as llama.cpp does
            await visit.begin()
            for index in (1, 0):
                await visit.chunk(event("", choices=[{"index": index, "delta": {"content": "Hi"}, "text": "Hi"}]))
                await visit.chunk(event("", choices=[], usage=USAGE))
            await visit.end()

        upstream.behaviour = behave
        _, record = streamed(gateway, body, CHAT_URL if "messages" in body else COMPLETIONS_URL)
        assert (record.prompt_tokens, record.output_tokens) == counted and not record.usage_estimated

    def test_what_means_nothing_breaks_nothing(self, relay: Relay) -> None:
        gateway, upstream = relay

        async def behave(visit: Visit) -> None:
            await visit.begin()
            await visit.say("Hi")
            await visit.chunk(b"event: ping\ndata:\n\n")
            await visit.chunk(event("", choices=None, usage=USAGE))
            await visit.end()

        upstream.behaviour = behave
        with gateway.client.stream("POST", CHAT_URL, json=chat(stream=True)) as answer:
            text = "".join(answer.iter_text())
        assert text.count("data: ") == 2 and text.endswith("data: [DONE]\n\n") and "error" not in text
        assert gateway.record(answer.headers["x-request-id"]).output_tokens == 3

    @pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
    def test_pieces_may_be_cut_anywhere(self, relay: Relay, size: int) -> None:
        gateway, upstream = relay
        words = ["é", "\N{WINKING FACE}", " \\n\n", "ก็"]
        text = b"".join(event(word) for word in words).replace(b"\n\n", b"\r\n\r\n") + b": ping\r\n\r\ndata: [DONE]\n\n"

        async def behave(visit: Visit) -> None:
            await visit.begin()
            for start in range(0, len(text), size):
                await visit.chunk(text[start : start + size])
            await visit.end(done=False)

        upstream.behaviour = behave
        with gateway.client.stream("POST", CHAT_URL, json=chat(stream=True)) as answer:
            lines = [line for line in answer.iter_lines() if line and line != ":"]
        assert lines[-1] == "data: [DONE]"
        assert contents([json.loads(line.removeprefix("data: ")) for line in lines[:-1]]) == ["".join(words)]

    def test_a_connection_is_used_again(self, upstream: ScriptedUpstream, relaying: Relaying) -> None:
        gateway = relaying(upstream, probe_interval_s=60)
        for _ in range(3):
            streamed(gateway, chat())
            assert gateway.client.post(CHAT_URL, json=chat()).status_code == 200
        assert len(upstream.visits) == 6
        assert upstream.connections == 1
