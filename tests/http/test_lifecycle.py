"""
Clients that leave or do not read: everything ends, once, and is booked.
"""

import asyncio
import contextlib
import socket
import threading
from typing import Any

import httpx
import pytest

from telemetry.clock import now_ns
from tests.http.asking import Pair, raw_request, read_until
from tests.http.conftest import Custom
from tests.http.fake_engine import Job
from tests.http.harness import WAIT_S, LiveGateway

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400}
URL = "/v1/chat/completions"
ABORT_NS_MAX = 200_000_000


async def silent(job: Job) -> None:
    """Accept, and compute for ever."""
    await job.accept()
    await job.until_aborted()


async def deaf(job: Job) -> None:
    """Not even accept."""
    await job.until_aborted()


async def talk(job: Job) -> None:
    """A little text, then nothing."""
    await job.accept()
    await job.emit([40, 41, 42])
    await job.until_aborted()


class TestDisconnect:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("behave", [silent, deaf, talk], ids=["computing", "queued", "talking"])
    @pytest.mark.parametrize("path", [URL, "/v1/completions"])
    def test_it_aborts_at_once(self, fake: Pair, stream: bool, behave: Any, path: str) -> None:
        gateway, engine = fake
        engine.behaviour = behave
        request_id = f"gone-{stream}-{behave.__name__}-{path.count('/')}"
        body = CHAT if path == URL else {"model": "tiny", "prompt": "Hello", "max_tokens": 400}
        before = len(engine.requests)
        with gateway.connect() as raw:
            raw.sendall(raw_request({**body, "stream": stream}, request_id, path))
            engine.wait_for_requests(before + 1)
            if stream and behave is talk:
                assert b"FGH" in read_until(raw, b"FGH")
            left_ns = now_ns()
        assert engine.wait_for_abort(request_id) - left_ns < ABORT_NS_MAX
        record = gateway.record(request_id)
        assert (record.outcome, record.status) == ("client_gone", 499)
        if behave is talk:
            assert record.output_tokens == 3
            assert record.states["decode"] > 0

    def test_all_choices_are_aborted(self, fake: Pair) -> None:
        gateway, engine = fake
        engine.behaviour = silent
        before = len(engine.requests)
        with gateway.connect() as raw:
            raw.sendall(raw_request({**CHAT, "n": 3}, "gone-n"))
            engine.wait_for_requests(before + 3)
        for index in range(3):
            engine.wait_for_abort("gone-n", index)
        assert gateway.record("gone-n").outcome == "client_gone"

    def test_an_engine_that_never_confirms_the_abort_holds_the_record_for_a_bounded_time(self, custom: Custom) -> None:
        gateway, engine = custom(record_timeout_s=0.2)

        async def stubborn(job: Job) -> None:
            await job.accept()
            await asyncio.Event().wait()

        engine.behaviour = stubborn
        with gateway.connect() as raw:
            raw.sendall(raw_request({**CHAT, "stream": True}, "stubborn"))
            read_until(raw, b"assistant")
        record = gateway.record("stubborn")
        assert record.outcome == "client_gone"
        assert record.states["deliver"] > 0

    def test_before_the_body_is_complete(self, fake: Pair) -> None:
        gateway, _ = fake
        with gateway.connect() as raw:
            raw.sendall(raw_request(CHAT, "half")[:-20])
        record = gateway.record("half")
        assert (record.outcome, record.status) == ("client_gone", 499)

    def test_closing_after_done_is_success(self, fake: Pair) -> None:
        gateway, engine = fake
        aborts = len(engine.aborts)
        for index in range(5):
            with gateway.connect() as raw:
                raw.sendall(raw_request({**CHAT, "stream": True}, f"done-{index}"))
                read_until(raw, b"[DONE]")
            record = gateway.record(f"done-{index}")
            assert (record.outcome, record.status) == ("length", 200)
        assert len(engine.aborts) == aborts

    def test_the_real_engine_gets_its_kv_back(self, shell: LiveGateway) -> None:
        def held() -> int:
            slots = shell.client.get("/debug/kv").json()["slots"]
            return int(slots["filled"] + slots["tail"] + slots["lookahead"])

        for index in range(6):
            with shell.connect() as raw:
                body = {**CHAT, "ignore_eos": True, "stream": index % 2 == 0, "n": 2}
                raw.sendall(raw_request(body, f"kv-{index}"))
                if index % 2 == 0:
                    read_until(raw, b"assistant")
            record = shell.record(f"kv-{index}")
            assert record.outcome in ("client_gone", "length")
        httpx.post(shell.url + URL, json={**CHAT, "max_tokens": 1})
        assert held() == 0


def _until_end(raw: socket.socket) -> bytes:
    parts: list[bytes] = []
    while b"[DONE]" not in b"".join(parts[-2:]):
        parts.append(raw.recv(1 << 20))
        assert parts[-1]
    return b"".join(parts)


async def _until_finished(gateway: LiveGateway, request_id: str) -> None:
    for call in gateway.application.front.open[request_id].flight.calls:
        await call.record_came.wait()


class TestSlowReader:
    def test_it_costs_no_memory_and_is_booked_as_blocked(self, fake: Pair) -> None:
        gateway, engine = fake
        released = threading.Event()
        count = 20_000

        async def flood(job: Job) -> None:
            await job.accept()
            for _ in range(count // 100):
                await job.emit([40] * 100)
            await job.finish("length")
            released.set()

        engine.behaviour = flood
        with gateway.connect() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            body = {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 5}
            raw.sendall(raw_request(body, "slow"))
            assert released.wait(WAIT_S), "the engine was held up by a client that does not read"
            asyncio.run_coroutine_threadsafe(_until_finished(gateway, "slow"), gateway.loop).result(WAIT_S)
            transcript = _until_end(raw)
        assert transcript.count(b'"token":"F","logprob":-0.5,"bytes":[70],"top_logprobs"') == count
        record = gateway.record("slow")
        assert record.outcome == "length"
        assert record.states["send_blocked"] > 0

    def test_a_client_that_never_reads_is_gone_after_a_while(self, custom: Custom) -> None:
        gateway, engine = custom(send_timeout_s=0.3)

        async def flood(job: Job) -> None:
            await job.accept()
            while not job.aborted.is_set():
                await job.emit([40] * 1000)
                await asyncio.sleep(0)
            await job.finish("abort")

        engine.behaviour = flood
        with gateway.connect() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20}
            raw.sendall(raw_request(body, "never"))
            engine.wait_for_abort("never")
            assert gateway.record("never").outcome == "client_gone"


class TestBounds:
    def test_requests_in_flight(self, custom: Custom) -> None:
        gateway, engine = custom(requests_max=1)
        engine.behaviour = silent
        with gateway.connect() as raw:
            raw.sendall(raw_request(CHAT, "first"))
            engine.wait_for_requests(1)
            answer = gateway.client.post(URL, json=CHAT)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert "retry-after" in answer.headers
        gateway.record("first")
        engine.behaviour = talk_and_end
        assert gateway.client.post(URL, json=CHAT).status_code == 200

    @pytest.mark.parametrize("path", [URL, "/v1/completions"])
    def test_slow_bodies_and_a_slow_tokenizer_do_not_pass_the_bound(
        self, custom: Custom, monkeypatch: pytest.MonkeyPatch, path: str
    ) -> None:
        gateway, engine = custom(requests_max=2)
        encode, release = gateway.text.encode, threading.Event()

        async def slow_encode(text: str, *, add_special_tokens: bool) -> list[int]:
            await asyncio.to_thread(release.wait, WAIT_S)
            return await encode(text, add_special_tokens=add_special_tokens)

        monkeypatch.setattr(gateway.text, "encode", slow_encode)
        body = CHAT if path == URL else {"model": "tiny", "prompt": "Hello", "max_tokens": 400}
        halves = [_halves(raw_request(body, f"slow-{index}", path)) for index in range(5)]
        with contextlib.ExitStack() as stack:
            raws = [stack.enter_context(gateway.connect()) for _ in halves]
            for raw, (first, _) in zip(raws, halves, strict=True):
                raw.sendall(first)
            for raw, (_, rest) in zip(raws, halves, strict=True):
                raw.sendall(rest)
            try:
                with gateway.hub.change:
                    refused = gateway.hub.change.wait_for(lambda: len(_overloaded(gateway)) == 3, WAIT_S)
            finally:
                release.set()
            assert refused, _overloaded(gateway)
            statuses = sorted(read_until(raw, b"\r\n")[9:12] for raw in raws)
        assert statuses == [b"200", b"200", b"503", b"503", b"503"]
        assert len(engine.requests) == 2

    def test_a_body_that_is_no_good_gives_its_place_back(self, custom: Custom) -> None:
        gateway, _ = custom(requests_max=1)
        for body in ({}, {**CHAT, "model": "other"}, {**CHAT, "max_tokens": 10_000}):
            answer = gateway.client.post(URL, json=body)
            assert answer.status_code in (400, 404, 422)
            gateway.record(answer.headers["x-request-id"])
        assert gateway.client.post(URL, json=CHAT).status_code == 200

    def test_an_id_in_flight_is_not_given_twice(self, fake: Pair) -> None:
        gateway, engine = fake
        engine.behaviour = silent
        before = len(engine.requests)
        with gateway.connect() as raw:
            raw.sendall(raw_request({**CHAT, "n": 2}, "twice"))
            engine.wait_for_requests(before + 2)
            engine.behaviour = talk_and_end
            other = gateway.client.post(URL, json=CHAT, headers={"x-request-id": "twice"})
            assert other.status_code == 200
            assert other.json()["id"].startswith("chatcmpl-")
        gateway.record("twice")

    def test_names_in_the_engine_are_nobody_s_choice(self, fake: Pair) -> None:
        """An id that looks like another request's second choice disturbs neither."""
        gateway, engine = fake
        engine.behaviour = silent
        before = len(engine.requests)
        with gateway.connect() as raw:
            raw.sendall(raw_request(CHAT, "a-1"))
            engine.wait_for_requests(before + 1)
            engine.behaviour = talk_and_end
            for wanted in ("a", "a-0"):
                answer = gateway.client.post(URL, json={**CHAT, "n": 2}, headers={"x-request-id": wanted})
                assert answer.status_code == 200
                assert answer.json()["id"] == wanted
            assert gateway.application.backend.replicas[0].working == 1, "the first request is undisturbed"
        gateway.record("a-1")

    def test_nothing_is_left_behind(self, fake: Pair) -> None:
        gateway, engine = fake

        async def mixed(job: Job) -> None:
            await job.accept()
            await (talk_more(job) if job.request.sampling.seed % 2 else job.until_aborted())

        engine.behaviour = mixed
        before = len(engine.requests)
        for index in range(30):
            with gateway.connect() as raw:
                raw.sendall(raw_request({**CHAT, "stream": index % 3 == 0, "seed": index}, f"left-{index}"))
                engine.wait_for_requests(before + index + 1)
        for index in range(30):
            gateway.record(f"left-{index}")
        assert not gateway.application.backend.replicas[0].calls

        async def tasks() -> list[str]:
            return [task.get_name() for task in asyncio.all_tasks() if "left-" in task.get_name()]

        assert asyncio.run_coroutine_threadsafe(tasks(), gateway.loop).result(WAIT_S) == []


def _halves(request: bytes) -> tuple[bytes, bytes]:
    """The head with the beginning of the body, and the rest."""
    middle = request.index(b"\r\n\r\n") + 10
    return request[:middle], request[middle:]


def _overloaded(gateway: LiveGateway) -> list[str]:
    return [record.request_id for record in gateway.hub.records if record.outcome == "overloaded"]


async def talk_and_end(job: Job) -> None:
    """A short answer."""
    await job.accept()
    await talk_more(job)


async def talk_more(job: Job) -> None:
    """The rest of a short answer."""
    await job.finish("length", tokens=[40])
