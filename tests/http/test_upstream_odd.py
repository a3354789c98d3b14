"""Upstreams that keep the spirit of the OpenAI API and not its letter: what a client gets of them, and what it pays."""

import asyncio
import json

import pytest

from tests.http.conftest import Relay, Relaying
from tests.http.scripted_upstream import USAGE, ScriptedUpstream, Visit, whole
from tests.http.test_upstream import CHAT_URL, chat, streamed
from tests.http.test_upstream_trouble import answers


@pytest.mark.parametrize(("code", "expected"), [(400, 400), (429, 429), (503, 503), (None, 502)])
def test_an_error_object_under_a_200_in_place_of_a_stream(relay: Relay, code: int | None, expected: int) -> None:
    gateway, upstream = relay
    upstream.behaviour = answers(200, {"error": {"message": "no such schema", "code": code}})
    answer = gateway.client.post(CHAT_URL, json=chat(stream=True))
    assert answer.status_code == expected
    assert ("no such schema" in answer.text) == (expected == 400)


def test_a_whole_answer_in_place_of_a_stream_is_none(relay: Relay) -> None:
    gateway, upstream = relay
    upstream.behaviour = answers(200, whole())
    assert gateway.client.post(CHAT_URL, json=chat(stream=True)).status_code == 502


@pytest.mark.parametrize("usage", [{"prompt_tokens": 7}, {"prompt_tokens": 7, "completion_tokens": 0}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_usage_that_makes_an_output_free_is_not_believed(relay: Relay, usage: dict[str, int], stream: bool) -> None:
    gateway, upstream = relay

    async def behave(visit: Visit) -> None:
        if not stream:
            await visit.answer(whole("word " * 40, usage=usage))
            return
        await visit.begin()
        await visit.say("word " * 40, usage=usage)
        await visit.say(finish="stop")
        await visit.end()

    upstream.behaviour = behave
    answer = gateway.client.post(CHAT_URL, json=chat(stream=stream))
    record = gateway.record(answer.headers["x-request-id"])
    assert record.usage_estimated and record.output_tokens == 50


def test_choices_that_are_null_are_an_empty_list_for_the_client(relay: Relay) -> None:
    gateway, upstream = relay

    async def behave(visit: Visit) -> None:
        await visit.begin()
        await visit.say("Hel")
        await visit.say(finish="stop")
        await visit.chunk(b"data: " + json.dumps({"choices": None, "usage": USAGE}).encode() + b"\n\n")
        await visit.end()

    upstream.behaviour = behave
    chunks, record = streamed(gateway, chat(stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == USAGE
    assert record.output_tokens == USAGE["completion_tokens"] and not record.usage_estimated


@pytest.mark.parametrize("first", [False, True])
def test_a_ping_is_not_passed_on(relay: Relay, first: bool) -> None:
    gateway, upstream = relay

    async def behave(visit: Visit) -> None:
        await visit.begin()
        for _ in range(2):
            if first:
                await visit.chunk(b'event: ping\ndata: {"type": "ping"}\n\n')
            await visit.say("Hel")
            if not first:
                await visit.chunk(b'event: ping\ndata: {"type": "ping"}\n\n')
        await visit.say(finish="stop")
        await visit.end()

    upstream.behaviour = behave
    chunks, _ = streamed(gateway, chat())
    assert len(chunks) == 3 and all("choices" in chunk for chunk in chunks)


def test_a_head_is_no_beginning(upstream: ScriptedUpstream, relaying: Relaying) -> None:
    gateway = relaying(upstream, first_byte_timeout_s=1.0)

    async def behave(visit: Visit) -> None:
        await asyncio.sleep(0.7)  # a server whose head is late
        await visit.begin()
        await visit.until_gone()

    upstream.behaviour = behave
    answer = gateway.client.post(CHAT_URL, json=chat(stream=True))
    record = gateway.record(answer.headers["x-request-id"])
    assert answer.status_code == 504 and record.finished_ns - record.accepted_ns < 1_650_000_000
