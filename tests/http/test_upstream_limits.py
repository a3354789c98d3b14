"""Keys and limits before an upstream: its usage is charged, or an estimate."""

import asyncio
import threading
import time

import openai
import pytest

from cache.accounts import Limits
from tests.http.asking import raw_request, read_until, sdk
from tests.http.conftest import Relaying
from tests.http.guard import Guard, bearer, until
from tests.http.harness import WAIT_S, LiveGateway
from tests.http.scripted_upstream import ScriptedUpstream, Visit, event, well, whole
from tests.http.test_guard import (
    ALL,
    TOKENS,
    settled,
    settled_before_the_answer,  # noqa: F401 - a fixture
)
from tests.http.test_upstream import CHAT_URL, chat
from tests.http.test_upstream_trouble import answers

pytestmark = pytest.mark.usefixtures("patient")


class TestLimits:
    def pair(self, guard: Guard, upstream: ScriptedUpstream, relaying: Relaying) -> LiveGateway:
        return relaying(upstream, gateway=dict(guard.options))

    @pytest.mark.usefixtures("settled_before_the_answer")
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("usage", [True, False])
    def test_what_is_charged_is_the_usage_or_the_estimate(
        self, guard: Guard, upstream: ScriptedUpstream, relaying: Relaying, stream: bool, usage: bool
    ) -> None:
        async def without(visit: Visit) -> None:
            if visit.body.get("stream"):
                await visit.begin()
                await visit.say("0123456789")
                await visit.end()
            else:
                await visit.answer(whole("0123456789", usage=None))

        if not usage:
            upstream.behaviour = without
        gateway = self.pair(guard, upstream, relaying)
        issued = guard.create(limits=ALL)
        began_s = time.monotonic()
        answer = gateway.client.post(CHAT_URL, json=chat(stream=stream), headers=bearer(issued.key))
        assert answer.status_code == 200 and int(answer.headers["x-ratelimit-limit-tokens"]) == TOKENS
        settled(guard, issued.key_id, began_s, requests=1, tokens=24 if usage else 6 + 3)
        record = gateway.record(answer.headers["x-request-id"])
        assert (record.tenant, record.usage_estimated) == ("blue", not usage)

    @pytest.mark.parametrize("stream", [False, True])
    def test_its_tokens_have_the_prices_of_ours(
        self, guard: Guard, upstream: ScriptedUpstream, relaying: Relaying, stream: bool
    ) -> None:
        prices = {"price_prompt_micros": 1_000_000, "price_output_micros": 10_000_000}
        gateway = relaying(upstream, gateway={**guard.options, **prices})
        issued = guard.create(limits=Limits(spend_micros_per_day=1000))
        answer = gateway.client.post(CHAT_URL, json=chat(stream=stream), headers=bearer(issued.key))
        assert answer.status_code == 200, answer.text
        record = gateway.record(answer.headers["x-request-id"])
        assert (record.prompt_tokens, record.output_tokens, record.charged_tokens) == (21, 3, 24)
        assert record.charged_micros == 21 + 3 * 10
        poor = guard.create(tenant="green", limits=Limits(spend_micros_per_day=5))
        answer = gateway.client.post(CHAT_URL, json=chat(), headers=bearer(poor.key))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")

    @pytest.mark.usefixtures("settled_before_the_answer")
    @pytest.mark.parametrize("status", [400, 429, 500])
    def test_what_failed_before_its_first_token_is_free(
        self, guard: Guard, upstream: ScriptedUpstream, relaying: Relaying, status: int
    ) -> None:
        upstream.behaviour = answers(status)
        gateway = self.pair(guard, upstream, relaying)
        issued = guard.create(limits=ALL)
        began_s = time.monotonic()
        assert gateway.client.post(CHAT_URL, json=chat(), headers=bearer(issued.key)).status_code in (400, 429, 502)
        settled(guard, issued.key_id, began_s, requests=0, tokens=0)

    @pytest.mark.usefixtures("settled_before_the_answer")
    def test_what_was_said_before_it_broke_is_charged(
        self, guard: Guard, upstream: ScriptedUpstream, relaying: Relaying
    ) -> None:
        async def breaks_off(visit: Visit) -> None:
            await visit.begin()
            await visit.chunk(event("one") + event("two"))
            visit.writer.close()

        upstream.behaviour = breaks_off
        gateway = self.pair(guard, upstream, relaying)
        issued = guard.create(limits=ALL)
        began_s = time.monotonic()
        answer = gateway.client.post(CHAT_URL, json=chat(stream=True), headers=bearer(issued.key))
        assert "bad_gateway" in answer.text
        settled(guard, issued.key_id, began_s, requests=1, tokens=6 + 2)

    @pytest.mark.parametrize(("said", "used"), [(0, 6), (5, 11)])
    def test_who_leaves_pays_for_the_prompt_and_what_was_said(
        self, guard: Guard, upstream: ScriptedUpstream, relaying: Relaying, said: int, used: int
    ) -> None:
        async def talks(visit: Visit) -> None:
            await visit.begin()
            await visit.chunk(event("word") * said or b": wait\n\n")
            await visit.until_gone()

        upstream.behaviour = talks
        gateway = self.pair(guard, upstream, relaying)
        issued = guard.create(limits=ALL)
        began_s = time.monotonic()
        with gateway.connect() as raw:
            request = raw_request(chat(stream=True), "left")
            raw.sendall(request.replace(b"host: x", b"host: x\r\nx-api-key: " + issued.key.encode()))
            if said:
                read_until(raw, b"word")
            else:
                upstream.wait_for(lambda: len(upstream.visits) == 1)
        assert gateway.record("left").outcome == "client_gone"
        until(lambda: guard.reservations() == 0, "it is settled")
        settled(guard, issued.key_id, began_s, requests=1, tokens=used)

    def test_what_is_over_the_limit_goes_nowhere(
        self, guard: Guard, upstream: ScriptedUpstream, relaying: Relaying
    ) -> None:
        gateway = self.pair(guard, upstream, relaying)
        issued = guard.create(limits=Limits(tokens_per_minute=100))
        long = chat(messages=[{"role": "user", "content": "x" * 1000}])
        answer = gateway.client.post(CHAT_URL, json=long, headers=bearer(issued.key))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")
        assert gateway.client.post(CHAT_URL, json=chat(), headers=bearer("none")).status_code == 401
        barred = guard.create(models=("tiny",))
        answer = gateway.client.post(CHAT_URL, json=chat(), headers=bearer(barred.key))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")
        allowed = guard.create(models=("remote",))
        assert gateway.client.post(CHAT_URL, json=chat(), headers=bearer(allowed.key)).status_code == 200
        assert len(upstream.visits) == 1

    def test_a_place_is_taken_for_as_long_as_it_takes(
        self, guard: Guard, upstream: ScriptedUpstream, relaying: Relaying
    ) -> None:
        gateway = self.pair(guard, upstream, relaying)
        issued = guard.create(limits=Limits(concurrent=1))
        answered = threading.Event()

        async def waits(visit: Visit) -> None:
            await asyncio.to_thread(answered.wait, WAIT_S)
            await well(visit)

        upstream.behaviour = waits
        client = sdk(gateway, issued.key)
        first = threading.Thread(target=lambda: client.chat.completions.create(**chat()))
        first.start()
        upstream.wait_for(lambda: len(upstream.visits) == 1)
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(**chat())
        answered.set()
        first.join(WAIT_S)
        assert client.chat.completions.create(**chat()).choices[0].message.content == "Hello there"
