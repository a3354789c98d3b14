"""Upstreams that take too long, and clients that leave: each connection ends, in bounded time."""

import asyncio
import contextlib
import json
import socket
import time

import pytest

from tests.http.asking import raw_request, read_until
from tests.http.conftest import Relay, Relaying
from tests.http.guard import until
from tests.http.harness import WAIT_S, LiveGateway
from tests.http.scripted_upstream import USAGE, ScriptedUpstream, Visit, event, whole
from tests.http.test_upstream import CHAT_URL, chat
from tests.http.test_upstream_trouble import answers, broken_stream, failed
from tests.http.test_upstreams import hanging

LEFT_WITHIN_NS = 200_000_000


class TestDeadlines:
    def test_it_takes_no_connection(self, relaying: Relaying) -> None:
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            waiting = [socket.socket() for _ in range(4)]
            for one in waiting:  # fill its queue: what comes next is not even refused
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            gateway = relaying(url, ready=False, connect_timeout_s=0.2, probe_interval_s=60)
            began_s = time.monotonic()
            answer = gateway.client.post(CHAT_URL, json=chat())
            assert time.monotonic() - began_s < 2
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")
            record = gateway.record(answer.headers["x-request-id"])
            assert record.outcome == "timeout" and record.states["dispatch"] >= 200_000_000
            assert "upstream" not in record.states
            for one in waiting:
                one.close()

    @pytest.mark.parametrize("head", [False, True])
    def test_a_stream_that_does_not_begin(self, upstream: ScriptedUpstream, relaying: Relaying, head: bool) -> None:
        async def behave(visit: Visit) -> None:
            if head:
                await visit.begin()
            await visit.until_gone()

        upstream.behaviour = behave
        gateway = relaying(upstream, first_byte_timeout_s=0.2)
        answer = gateway.client.post(CHAT_URL, json=chat(stream=True))
        got, error, outcome = failed(gateway, answer)
        assert (got, error["code"], outcome) == (504, "engine_timeout", "timeout")
        upstream.wait_for(lambda: bool(upstream.visits[0].gone_ns))
        assert len(upstream.visits) == 1

    def test_a_stream_that_falls_silent(self, upstream: ScriptedUpstream, relaying: Relaying) -> None:
        async def behave(visit: Visit) -> None:
            await visit.begin()
            await visit.say("one")
            await visit.until_gone()

        upstream.behaviour = behave
        _, error, outcome = broken_stream(relaying(upstream, idle_timeout_s=0.2))
        assert (error["code"], outcome) == ("engine_timeout", "timeout")
        upstream.wait_for(lambda: bool(upstream.visits[0].gone_ns))

    def test_a_whole_answer_that_falls_silent(self, upstream: ScriptedUpstream, relaying: Relaying) -> None:
        async def behave(visit: Visit) -> None:
            await visit.head(content_type="application/json", content_length="100")
            await visit.raw(b"{")
            await visit.until_gone()

        upstream.behaviour = behave
        gateway = relaying(upstream, idle_timeout_s=0.2)
        assert failed(gateway, gateway.client.post(CHAT_URL, json=chat()))[0] == 504

    @pytest.mark.parametrize("alive", [False, True])
    def test_a_whole_answer_may_take_long_from_one_that_answers_probes(
        self, upstream: ScriptedUpstream, relaying: Relaying, monkeypatch: pytest.MonkeyPatch, alive: bool
    ) -> None:
        monkeypatch.setattr("gateway.upstream.PROBE_TIMEOUT_S", 0.1)

        async def behave(visit: Visit) -> None:
            if alive:
                await asyncio.to_thread(upstream.wait_for, lambda: len(upstream.probes) > probes + 8)
                await visit.answer(whole())
            await visit.until_gone()

        upstream.behaviour = behave
        gateway = relaying(upstream, first_byte_timeout_s=0.2, connect_timeout_s=0.1, probe_interval_s=0.05)
        probes = len(upstream.probes)
        if not alive:
            upstream.probed = hanging
        answer = gateway.client.post(CHAT_URL, json=chat())
        assert answer.status_code == (200 if alive else 504), answer.text
        if not alive:
            assert gateway.record(answer.headers["x-request-id"]).outcome == "timeout"
            upstream.wait_for(lambda: bool(upstream.visits[0].gone_ns))

    @pytest.mark.parametrize("stream", [False, True])
    def test_it_takes_longer_than_all_of_it_may(
        self, upstream: ScriptedUpstream, relaying: Relaying, stream: bool
    ) -> None:
        async def behave(visit: Visit) -> None:
            if visit.body.get("stream"):
                await visit.begin()
                with contextlib.suppress(OSError):  # it may be gone before we have seen that
                    while not visit.reader.at_eof():
                        await visit.say("on and on")
                        await asyncio.sleep(0.02)
            await visit.until_gone()

        upstream.behaviour = behave
        gateway = relaying(upstream, gateway={"request_timeout_s": 0.3})
        if stream:
            with gateway.client.stream("POST", CHAT_URL, json=chat(stream=True)) as streamed:
                last = "".join(streamed.iter_text()).split("\n\n")[-2]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_timeout"
        else:
            assert failed(gateway, gateway.client.post(CHAT_URL, json=chat()))[0] == 504
        upstream.wait_for(lambda: bool(upstream.visits[0].gone_ns))
        [behind] = gateway.application.upstreams.upstreams
        assert not behind.trouble(), "it was not silent"

    def test_a_client_that_reads_slowly_is_not_the_upstreams_silence(
        self, upstream: ScriptedUpstream, relaying: Relaying
    ) -> None:
        sent = 0

        async def behave(visit: Visit) -> None:
            nonlocal sent
            await visit.begin()
            piece = event("x" * 50_000)
            for _ in range(1600):
                await visit.chunk(piece)
                sent += len(piece)
            await visit.end()

        upstream.behaviour = behave
        gateway = relaying(upstream, idle_timeout_s=0.2)
        with gateway.connect() as raw:
            raw.sendall(raw_request(chat(stream=True), "slow"))
            read_until(raw, b"data: ")
            stuck, deadline_s = -1, time.monotonic() + WAIT_S
            while stuck != sent:  # until nothing moves: the upstream waits for the gateway, and it for the client
                assert time.monotonic() < deadline_s
                stuck = sent
                time.sleep(0.3)
            assert stuck < 50_000_000, "the kernel holds some 20 MB of it, of 80"
            last = b""
            while b"[DONE]" not in last:
                last = last[-10:] + raw.recv(1 << 20)
        record = gateway.record("slow")
        assert record.outcome == "stop" and record.states["send_blocked"] > 300_000_000


class TestClientsThatLeave:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("when", ["before", "after the head", "in the middle"])
    def test_the_upstream_is_hung_up_on_at_once(self, relay: Relay, stream: bool, when: str) -> None:
        gateway, upstream = relay

        async def behave(visit: Visit) -> None:
            if when != "before":
                if stream:
                    await visit.begin()
                else:
                    await visit.head(content_type="application/json", content_length="1000")
            if when == "in the middle":
                await (visit.say("one") if stream else visit.raw(b"{"))
            await visit.until_gone()

        upstream.behaviour = behave
        request_id = f"left-{stream}-{when.replace(' ', '-')}"
        with gateway.connect() as raw:
            raw.sendall(raw_request(chat(stream=stream), request_id))
            if stream and when == "in the middle":
                read_until(raw, b'"one"')
            else:
                upstream.wait_for(lambda: len(upstream.visits) == 1)
                until(lambda: _waits(gateway, when), "it has come so far")
            left_ns = time.monotonic_ns()
        upstream.wait_for(lambda: bool(upstream.visits[0].gone_ns))
        assert upstream.visits[0].gone_ns - left_ns < LEFT_WITHIN_NS
        record = gateway.record(request_id)
        assert (record.outcome, record.status) == ("client_gone", 499)
        assert record.output_tokens == int(stream and when == "in the middle")
        [behind] = gateway.application.upstreams.upstreams
        assert behind.in_flight == 0 and gateway.application.upstreams.relays == {}

    def test_a_usage_that_has_come_counts_whatever_the_end(self, relay: Relay) -> None:
        gateway, upstream = relay

        async def behave(visit: Visit) -> None:
            await visit.begin()
            await visit.say("one", usage=USAGE)
            await visit.until_gone()

        upstream.behaviour = behave
        with gateway.connect() as raw:
            raw.sendall(raw_request(chat(stream=True), "left-with-usage"))
            read_until(raw, b'"one"')
        record = gateway.record("left-with-usage")
        assert (record.prompt_tokens, record.output_tokens, record.usage_estimated) == (21, 3, False)

    def test_a_storm_of_them_leaves_nothing(self, relay: Relay) -> None:
        gateway, upstream = relay

        async def behave(visit: Visit) -> None:
            await visit.begin()
            while True:
                await visit.say("more")
                await asyncio.sleep(0.001)

        upstream.behaviour = behave
        for number in range(40):
            with gateway.connect() as raw:
                raw.sendall(raw_request(chat(stream=True), f"storm-{number}"))
                if number % 2:
                    read_until(raw, b"more")
        for number in range(40):
            assert gateway.record(f"storm-{number}").outcome == "client_gone"
        [behind] = gateway.application.upstreams.upstreams
        assert behind.in_flight == 0 and gateway.application.upstreams.relays == {}
        upstream.behaviour = answers(200, whole())
        assert gateway.client.post(CHAT_URL, json=chat()).status_code == 200

    def test_a_drain_ends_the_stream_with_an_error(self, upstream: ScriptedUpstream, relaying: Relaying) -> None:
        async def behave(visit: Visit) -> None:
            await visit.begin()
            await visit.say("one")
            await visit.until_gone()

        upstream.behaviour = behave
        gateway = relaying(upstream, gateway={"drain_s": 0.1})
        with gateway.client.stream("POST", CHAT_URL, json=chat(stream=True)) as answer:
            texts = answer.iter_text()
            assert "one" in next(texts)
            draining = asyncio.run_coroutine_threadsafe(gateway.application.gateway.drain(), gateway.loop)
            assert '"code":"draining"' in "".join(texts)
        draining.result(5)
        assert gateway.client.post(CHAT_URL, json=chat()).json()["error"]["code"] == "draining"


def _waits(gateway: LiveGateway, when: str) -> bool:
    """Whether the one request waits for its upstream, and has had of its answer what `when` says."""
    for relay in list(gateway.application.upstreams.relays):
        had = {"before": True, "after the head": relay._response is not None, "in the middle": relay._heard}
        return bool(relay._waiting_ns) and had[when]
    return False
