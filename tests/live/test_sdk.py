"""
The official OpenAI SDK against the real model, synchronous and asynchronous, streaming and not.
"""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.live.conftest import Appliance
from tests.live.test_appliance import model_of

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me about the sea, with an emoji."}]


@pytest.fixture
def model(appliance: Appliance) -> str:
    return model_of(appliance)


@pytest.fixture
def client(appliance: Appliance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{appliance.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_stream_joins_to_the_text_of_the_whole_answer(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=40, seed=3, temperature=0.9)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_tokens=40,
            seed=3,
            temperature=0.9,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert sum(chunk.usage is not None for chunk in chunks) == 1


def test_n_choices_are_distinct_and_reproducible(client: openai.OpenAI, model: str) -> None:
    texts = [
        [
            choice.message.content
            for choice in sorted(
                client.chat.completions.create(
                    model=model, messages=MESSAGES, n=3, max_tokens=16, seed=11, temperature=1.0
                ).choices,
                key=lambda choice: choice.index,
            )
        ]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_logprobs_are_those_of_the_tokens_that_were_sent(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=10, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for token in logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob  # Greedy.
    joined = b"".join(bytes(token.bytes or []) for token in logprobs.content).decode("utf-8", "ignore")
    assert (answer.choices[0].message.content or "") in joined


def test_completions_with_token_ids_stop_and_echo(client: openai.OpenAI, model: str, appliance: Appliance) -> None:
    prompt = "Monday, Tuesday, Wednesday,"
    ids = appliance.http.post("/tokenize", json={"model": model, "prompt": prompt}).json()["tokens"]
    answers = [
        client.completions.create(model=model, prompt=form, max_tokens=12, temperature=0)
        for form in (prompt, [prompt], ids, [ids])
    ]
    assert len({answer.choices[0].text for answer in answers}) == 1
    text = answers[0].choices[0].text
    assert len(text) > 3
    stopped = client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0, stop=text[2:4])
    assert stopped.choices[0].text == text[: text.index(text[2:4])]
    assert stopped.choices[0].finish_reason == "stop"
    echoed = client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0, echo=True)
    assert echoed.choices[0].text == prompt + text


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"temperature": 3.0}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 1_000_000}, openai.BadRequestError, None),
        ({"logit_bias": {"99999999": 1}}, openai.BadRequestError, "logit_bias"),
        ({"model": "nobody"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"extra_body": {"frobnicate": 1}}, openai.BadRequestError, "frobnicate"),
    ],
)
def test_errors_are_the_sdks_classes_also_when_streaming(
    client: openai.OpenAI, model: str, fields: dict[str, object], error: type[openai.APIStatusError], param: str | None
) -> None:
    for stream in (False, True):
        request: dict[str, object] = {"model": model, "messages": MESSAGES, "stream": stream, **fields}
        with pytest.raises(error) as caught:
            client.chat.completions.create(**request)  # type: ignore[call-overload]
        if param is not None:
            assert str(caught.value.param).startswith(param)
        assert caught.value.request_id


async def test_many_at_once_are_as_if_alone(appliance: Appliance, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{appliance.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(number: int, stream: bool) -> str:
            messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"What is {number} plus two?"}]
            if not stream:
                whole = await client.chat.completions.create(
                    model=model, messages=messages, max_tokens=12, seed=number, temperature=0.8
                )
                return whole.choices[0].message.content or ""
            pieces = await client.chat.completions.create(
                model=model, messages=messages, max_tokens=12, seed=number, temperature=0.8, stream=True
            )
            return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

        alone = [await ask(number, False) for number in range(8)]
        together = await asyncio.gather(*(ask(number, True) for number in range(8)))
    assert together == alone
