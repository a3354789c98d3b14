"""Real servers behind the gateway, asked by the official SDK: Pellucid itself, and llama.cpp where it was built."""

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import ROOT
from tests.http.asking import sdk
from tests.http.conftest import Relay, Relaying
from tests.http.guard import until
from tests.http.harness import LiveGateway
from tests.http.scripted_upstream import USAGE, Visit, event
from tests.http.test_upstream import CHAT_URL, chat
from tests.http.test_upstream_trouble import answers

LLAMA_SERVER = ROOT / ".peers/llama.cpp/bin/llama-server"  # `make bench-peers` builds it
LOAD_S = 60.0
MESSAGES: list[Any] = [{"role": "user", "content": "Say hello."}]


class TestScripted:
    def test_streams_tools_and_lists(self, relay: Relay) -> None:
        gateway, upstream = relay
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}

        async def calls_a_tool(visit: Visit) -> None:
            assert visit.body["tools"][0]["function"]["name"] == "f"
            await visit.begin()
            for part in (
                call,
                {"index": 0, "function": {"arguments": '{"a"'}},
                {"index": 0, "function": {"arguments": ":1}"}},
            ):
                await visit.chunk(event("", choices=[{"index": 0, "delta": {"tool_calls": [part]}}]))
            await visit.say(finish="tool_calls")
            await visit.chunk(event("", choices=[], usage=USAGE))
            await visit.end()

        upstream.behaviour = calls_a_tool
        tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        client = sdk(gateway)
        with client.chat.completions.stream(model="remote", messages=MESSAGES, tools=tools) as stream:
            final = stream.get_final_completion()
        [made] = final.choices[0].message.tool_calls or []
        assert (made.id, made.function.name, json.loads(made.function.arguments)) == ("call_1", "f", {"a": 1})
        record = gateway.record(final.id)
        assert (record.outcome, record.output_tokens) == ("stop", 3)
        assert [model.id for model in client.models.list().data] == ["remote"]
        assert client.models.retrieve("remote").owned_by == "upstream"

    def test_errors(self, relay: Relay) -> None:
        gateway, upstream = relay
        client = sdk(gateway)
        expected: list[tuple[int, type[openai.APIStatusError]]] = [
            (400, openai.BadRequestError),
            (429, openai.RateLimitError),
            (500, openai.InternalServerError),
        ]
        for status, kind in expected:
            upstream.behaviour = answers(status)
            with pytest.raises(kind) as caught:
                client.chat.completions.create(model="remote", messages=MESSAGES, stream=status == 500)
            assert caught.value.request_id == caught.value.response.headers["x-request-id"]
            gateway.application.upstreams.upstreams[0].rests_until_ns = 0

    def test_a_stream_that_breaks_raises(self, relay: Relay) -> None:
        gateway, upstream = relay

        async def breaks_off(visit: Visit) -> None:
            await visit.begin()
            await visit.say("one")
            visit.writer.close()

        upstream.behaviour = breaks_off
        said = []
        with pytest.raises(openai.APIError, match="The server that answers for this model failed"):
            for chunk in sdk(gateway).chat.completions.create(model="remote", messages=MESSAGES, stream=True):
                said.append(chunk.choices[0].delta.content)
        assert said == ["one"]


class TestPellucid:
    """A gateway with an engine, behind a gateway without one."""

    @pytest.fixture
    def pair(self, shell: LiveGateway, relaying: Relaying) -> tuple[LiveGateway, LiveGateway]:
        return relaying(f"{shell.url}/v1", model="far", upstream_model="tiny"), shell

    @pytest.mark.parametrize("stream", [False, True])
    def test_the_answer_is_the_one_that_it_gives_itself(
        self, pair: tuple[LiveGateway, LiveGateway], stream: bool
    ) -> None:
        front, behind = pair
        texts = []
        for gateway, model in ((front, "far"), (behind, "tiny")):
            create = sdk(gateway).chat.completions.create
            asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8, "seed": 1}
            if stream:
                texts.append(
                    "".join(one.choices[0].delta.content or "" for one in create(model=model, stream=True, **asked))
                )
            else:
                texts.append(create(model=model, **asked).choices[0].message.content)
        assert texts[0] == texts[1] and texts[0]

    def test_both_have_the_request_under_one_name_and_trace_and_their_books_agree(
        self, pair: tuple[LiveGateway, LiveGateway]
    ) -> None:
        front, behind = pair
        answer = front.client.post(CHAT_URL, json=chat(model="far"), headers={"x-request-id": "two-books"})
        assert answer.status_code == 200 and answer.json()["id"] == "two-books"
        mine, theirs = front.record("two-books"), behind.record("two-books")
        assert mine.trace_id == theirs.trace_id
        assert (mine.prompt_tokens, mine.output_tokens) == (theirs.prompt_tokens, theirs.output_tokens)
        assert mine.states["upstream"] > 0 and "upstream" not in theirs.states
        assert mine.kv_block_ns == 0 < theirs.kv_block_ns

    def test_what_it_refuses_is_said_in_its_words(self, pair: tuple[LiveGateway, LiveGateway]) -> None:
        answer = pair[0].client.post(CHAT_URL, json=chat(model="far", tools=[{"type": "function"}], temperature=9))
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] in ("tools", "temperature")
        answer = pair[0].client.post(CHAT_URL, json=chat(model="far", max_tokens=100_000))
        assert answer.json()["error"]["code"] == "context_length_exceeded"

    def test_a_client_that_leaves_ends_it_there_too(
        self, pair: tuple[LiveGateway, LiveGateway], shell: LiveGateway
    ) -> None:
        front, _ = pair
        body = chat(model="far", max_tokens=400, ignore_eos=True, stream=True)
        with front.client.stream("POST", CHAT_URL, json=body, headers={"x-request-id": "leaves-both"}) as answer:
            next(answer.iter_text())
        assert front.record("leaves-both").outcome == "client_gone"
        assert shell.record("leaves-both").outcome in ("client_gone", "length")


@pytest.fixture(scope="session")
def llama(default_model: Path) -> Iterator[str]:
    """The base URL of a llama.cpp server with a key."""
    if not LLAMA_SERVER.is_file():
        pytest.skip("no llama.cpp server here: make bench-peers builds one")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(LLAMA_SERVER), "-m", str(default_model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-t", "1", "-c", "2048", "-np", "2", "--api-key", "llama-key", "--offline", "--log-disable"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + LOAD_S
            while not _healthy(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None and time.monotonic() < deadline_s, "llama-server does not start"
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1).status_code == 200
    except httpx.TransportError:
        return False


class TestLlama:
    @pytest.fixture
    def gateway(self, llama: str, relaying: Relaying, monkeypatch: pytest.MonkeyPatch) -> LiveGateway:
        monkeypatch.setenv("LLAMA_KEY", "llama-key")
        return relaying(llama, model="llama", upstream_model="x", api_key_env="LLAMA_KEY")

    def test_a_stream_and_a_whole_answer_are_the_same_and_their_usage_is_its_own(self, gateway: LiveGateway) -> None:
        client = sdk(gateway)
        asked: dict[str, Any] = {"model": "llama", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.choices[0].message.content and text
        for usage, request_id in ((whole.usage, whole.id), (chunks[-1].usage, chunks[-1].id)):
            assert usage is not None
            record = gateway.record(request_id)
            assert not record.usage_estimated
            assert (record.prompt_tokens, record.output_tokens) == (usage.prompt_tokens, usage.completion_tokens)
        answer = client.completions.create(model="llama", prompt="Once upon a time", max_tokens=4)
        assert answer.choices[0].text and answer.model == "llama"

    def test_structured_output_which_only_the_upstream_can(self, gateway: LiveGateway) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        wish: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        asked: dict[str, Any] = {"model": "llama", "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
        answer = sdk(gateway).chat.completions.create(**asked, response_format=wish)
        assert isinstance(json.loads(answer.choices[0].message.content or "")["a"], int)

    def test_what_is_too_long_is_refused_as_everywhere(self, gateway: LiveGateway) -> None:
        messages: list[Any] = [{"role": "user", "content": "word " * 4000}]
        with pytest.raises(openai.BadRequestError) as caught:
            sdk(gateway).chat.completions.create(model="llama", messages=messages)
        assert caught.value.code == "context_length_exceeded"

    def test_a_client_that_leaves_frees_its_place(self, gateway: LiveGateway, llama: str) -> None:
        stream = sdk(gateway).chat.completions.create(model="llama", messages=MESSAGES, max_tokens=1500, stream=True)
        request_id = next(iter(stream)).id
        stream.close()
        assert gateway.record(request_id).outcome == "client_gone"

        def idle() -> bool:
            slots = httpx.get(f"{llama}/slots", headers={"authorization": "Bearer llama-key"}, timeout=5).json()
            return not any(slot["is_processing"] for slot in slots)

        until(idle, "it goes on for nobody")

    def test_a_wrong_key_is_the_operators_trouble(
        self, llama: str, relaying: Relaying, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LLAMA_KEY", "wrong")
        gateway = relaying(llama, ready=False, model="llama", api_key_env="LLAMA_KEY")
        answer = gateway.client.post(CHAT_URL, json=chat(model="llama"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_gateway")
        reason = gateway.client.get("/health").json()["upstreams"][0]["reason"]
        assert reason == "answers 401: is its API key right?" and "wrong" not in answer.text
