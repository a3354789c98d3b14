"""
The official OpenAI SDK against a live gateway: what it parses, and what it raises.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from engine.api import Fault
from tests.http.conftest import Custom
from tests.http.fake_engine import FakeEngine, Job
from tests.http.harness import LiveGateway

Pair = tuple[LiveGateway, FakeEngine]
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(shell: LiveGateway) -> Iterator[openai.OpenAI]:
    """A client that does not retry, so that each error is seen."""
    with openai.OpenAI(base_url=f"{shell.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(shell: LiveGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{shell.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


class TestSync:
    def test_chat(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, seed=1)
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.prompt_tokens_details is not None
        assert answer.system_fingerprint == "fake-400"
        assert answer._request_id == answer.id

    def test_stream(self, client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, seed=1)
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                max_tokens=8,
                seed=1,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)

    def test_the_stream_helper_agrees(self, client: openai.OpenAI) -> None:
        with client.chat.completions.stream(model="tiny", messages=MESSAGES, max_tokens=8, seed=1, n=3) as stream:
            for _ in stream:
                pass
            final = stream.current_completion_snapshot
        whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, seed=1, n=3)
        assert [one.message.content for one in final.choices] == [one.message.content for one in whole.choices]

    def test_n_logprobs_and_stop(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=24, n=3, seed=2, logprobs=True, top_logprobs=2, stop=["e", "\n"]
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        for choice in answer.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
            assert "e" not in (choice.message.content or "")

    def test_completions(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model="tiny", prompt=["Hello", "fox"], max_tokens=6, echo=True, seed=1)
        assert [choice.text[:3] for choice in answer.choices] == ["Hel", "fox"]
        logprobs = (
            client.completions.create(model="tiny", prompt=[40, 41], max_tokens=6, logprobs=2).choices[0].logprobs
        )
        assert logprobs is not None
        assert logprobs.tokens is not None
        parts = client.completions.create(model="tiny", prompt="Hello", max_tokens=6, seed=1, stream=True)
        assert "Hello" + "".join(part.choices[0].text for part in parts) == answer.choices[0].text

    def test_models(self, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "pellucid"

    def test_extras_of_other_servers(self, client: openai.OpenAI) -> None:
        extra = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True, "min_tokens": 4}
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, extra_body=extra)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4


class TestAsync:
    async def test_chat_and_stream(self, async_client: openai.AsyncOpenAI) -> None:
        whole = await async_client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, seed=1)
        text = ""
        stream = await async_client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=8, seed=1, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text == whole.choices[0].message.content

    async def test_completions(self, async_client: openai.AsyncOpenAI) -> None:
        answer = await async_client.completions.create(model="tiny", prompt="Hello", max_tokens=4, n=2, seed=1)
        assert len(answer.choices) == 2

    async def test_closing_a_stream_early_aborts(self, shell: LiveGateway, async_client: openai.AsyncOpenAI) -> None:
        stream = await async_client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}
        )
        first = await anext(aiter(stream))
        await stream.close()
        assert shell.record(first.id).outcome in ("client_gone", "length")


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "error", "code"),
        [
            ({"temperature": 3}, openai.BadRequestError, "invalid_value"),
            ({"model": "other"}, openai.NotFoundError, "model_not_found"),
            ({"max_tokens": 5000}, openai.BadRequestError, "context_length_exceeded"),
            ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "unknown_parameter"),
            ({"messages": []}, openai.BadRequestError, "invalid_value"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "invalid_value"),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_the_client_s_own(
        self,
        client: openai.OpenAI,
        arguments: dict[str, Any],
        error: type[openai.APIStatusError],
        code: str,
        stream: bool,
    ) -> None:
        with pytest.raises(error) as caught:
            client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **arguments}, stream=stream)
        assert caught.value.code == code
        assert caught.value.type == "invalid_request_error"
        assert caught.value.request_id

    @pytest.mark.parametrize(
        ("reason", "status", "code"),
        [("overloaded", 503, "overloaded"), ("deadline", 504, "engine_timeout"), ("failed", 500, "internal_error")],
    )
    def test_the_server_s(self, fake: Pair, reason: Any, status: int, code: str) -> None:
        gateway, engine = fake

        async def refuse(job: Job) -> None:
            await job.finish(reason, fault=Fault(code, "words"))

        engine.behaviour = refuse
        with (
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client,
            pytest.raises(openai.InternalServerError) as caught,
        ):
            client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert (caught.value.status_code, caught.value.code) == (status, code)

    def test_failures_that_pass_are_retried_by_the_sdk(self, fake: Pair) -> None:
        gateway, engine = fake
        tries = 0

        async def second_time_lucky(job: Job) -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                await job.finish("overloaded", fault=Fault("overloaded", "Full."))
            else:
                await job.accept()
                await job.finish("length", tokens=[40])

        engine.behaviour = second_time_lucky
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=2) as client:
            assert client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message.content == "F"
        assert tries == 2

    def test_a_stream_that_breaks(self, custom: Custom) -> None:
        gateway, engine = custom(resume_deadline_s=0)

        async def fail_late(job: Job) -> None:
            await job.accept()
            await job.emit([40])
            await job.until_aborted()

        engine.behaviour = fail_late
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
            stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            next(stream)
            gateway.loop.call_soon_threadsafe(engine_is_lost, gateway)
            with pytest.raises(openai.APIError, match="went away"):
                list(stream)


def engine_is_lost(gateway: LiveGateway) -> None:
    """Break the connection to the engine, from our side."""
    writer = gateway.application.backend.replicas[0]._writer
    assert writer is not None
    writer.transport.abort()
