"""
Engines that die, say nothing, or say nonsense: each request ends with an error, in bounded time.
"""

import asyncio
import json
import threading
from typing import Any

import pytest

from gateway.calls import Call, Flight
from telemetry.clock import now_ns
from tests.http.asking import raw_request
from tests.http.conftest import Custom
from tests.http.fake_engine import FakeEngine, Job
from tests.http.harness import WAIT_S, LiveGateway
from tests.http.model_files import EOS_ID

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400}
URL = "/v1/chat/completions"


async def silent(job: Job) -> None:
    """Accept, and compute for ever."""
    await job.accept()
    await job.until_aborted()


async def deaf(job: Job) -> None:
    """Not even accept."""
    await job.until_aborted()


class TestEngineTrouble:
    def test_none_is_there(self, custom: Custom, socket_path: str) -> None:
        gateway, _ = custom(engines=(f"unix:{socket_path}.none",), ready=False)
        answer = gateway.client.post(URL, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_healthy_engine")
        assert answer.headers["retry-after"] == "1"
        record = gateway.record(answer.headers["x-request-id"])
        assert record.outcome == "no_healthy_engine"
        assert set(record.states) <= {"auth", "parse", "tokenize", "send", "finalize"}
        ready = gateway.client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
        assert "not connected" in ready.json()["reason"]
        assert gateway.client.get("/health").status_code == 200

    @pytest.mark.parametrize("stream", [False, True])
    def test_it_dies_with_the_request_and_comes_back(self, custom: Custom, stream: bool) -> None:
        gateway, engine = custom(resume_deadline_s=0)
        started = threading.Event()

        async def die(job: Job) -> None:
            await job.accept()
            await job.emit([40, 41])
            if stream:
                await asyncio.to_thread(started.wait, WAIT_S)
            job.writer.close()
            await job.writer.wait_closed()

        engine.behaviour = die
        body = {**CHAT, "stream": stream}
        with gateway.client.stream("POST", URL, json=body, headers={"x-request-id": "died"}) as answer:
            texts = answer.iter_text()
            text = next(texts)
            started.set()
            text += "".join(texts)
        assert answer.status_code == (200 if stream else 502)
        assert "[DONE]" not in text
        last = text.split("\n\n")[-2].removeprefix("data: ") if stream else text
        assert json.loads(last)["error"]["code"] == "bad_gateway"
        record = gateway.record("died")
        assert record.outcome == "engine_lost"
        assert record.output_tokens == 2

        async def fine(job: Job) -> None:
            await job.accept()
            await job.finish("length", tokens=[40])

        engine.behaviour = fine
        gateway.until_ready()
        assert gateway.client.post(URL, json=CHAT).status_code == 200

    def test_it_sends_garbage(self, custom: Custom) -> None:
        gateway, engine = custom(resume_deadline_s=0)

        async def garbage(job: Job) -> None:
            job.writer.write(b"\x05\x00\x00\x00hello")

        engine.behaviour = garbage
        answer = gateway.client.post(URL, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_gateway")

    @pytest.mark.parametrize("behave", [silent, deaf], ids=["after accepting", "before accepting"])
    def test_it_is_silent(self, custom: Custom, behave: Any) -> None:
        gateway, engine = custom(first_frame_timeout_s=0.3, resume_deadline_s=0)
        engine.behaviour = behave
        answer = gateway.client.post(URL, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")
        assert gateway.record(answer.headers["x-request-id"]).outcome == "timeout"

    def test_silence_with_work_is_not_ready(self, custom: Custom, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gateway.replica.CONNECT_TIMEOUT_S", 0.2)
        gateway, engine = custom(first_frame_timeout_s=0.3, resume_deadline_s=0)
        assert gateway.client.get("/ready").json() == {
            "status": "ready",
            "reason": None,
            "engines": {},
            "degraded": None,
        }
        replica = gateway.application.backend.replicas[0]

        async def wedged(job: Job) -> None:
            engine.mute, engine.greets = True, False
            await asyncio.Event().wait()

        engine.behaviour = wedged
        with gateway.connect() as raw:
            raw.sendall(raw_request(CHAT, "wedged"))
            engine.wait_for_requests(1)
            [call] = replica.calls.values()
            assert "silent" in replica.trouble(call.sent_ns + 400_000_000)
            assert replica.trouble(call.sent_ns + 1) == ""
            assert gateway.record("wedged").outcome == "timeout"
        assert not replica.working
        ready = gateway.client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
        answer = gateway.client.post(URL, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_healthy_engine")
        engine.greets = True
        asyncio.run_coroutine_threadsafe(_until_healthy(gateway), gateway.loop).result(WAIT_S)
        assert gateway.client.get("/ready").status_code == 200

    def test_an_abort_alone_is_owed_no_answer(self, custom: Custom) -> None:
        gateway, engine = custom(first_frame_timeout_s=0.3)
        answer = gateway.client.post(URL, json=CHAT)
        replica = gateway.application.backend.replicas[0]
        call = Call(engine.requests[0], Flight())
        gateway.loop.call_soon_threadsafe(replica.abort, call)
        engine.wait_for_abort(answer.headers["x-request-id"])
        assert replica.trouble(now_ns() + 400_000_000) == ""

    def test_it_ignores_the_deadline(self, custom: Custom, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gateway.backend.DEADLINE_GRACE_S", 0.0)
        gateway, engine = custom(request_timeout_s=0.3, first_frame_timeout_s=0.5)

        async def chatter(job: Job) -> None:
            await job.accept()
            while not job.aborted.is_set():
                await job.emit([40])
                await asyncio.sleep(0.01)
            await job.finish("abort")

        engine.behaviour = chatter
        answer = gateway.client.post(URL, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")

    def test_it_never_says_hello(self, custom: Custom, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gateway.replica.CONNECT_TIMEOUT_S", 0.2)
        gateway, _ = custom(greets=False, ready=False)
        assert gateway.client.post(URL, json=CHAT).status_code == 503

    def test_a_stop_string_ends_even_if_the_engine_does_not_confirm(self, custom: Custom) -> None:
        gateway, engine = custom(record_timeout_s=0.2)

        async def stubborn(job: Job) -> None:
            await job.accept()
            await job.emit([40, 41, 42])
            await asyncio.Event().wait()

        engine.behaviour = stubborn
        answer = gateway.client.post(URL, json={**CHAT, "stop": "G"}, headers={"x-request-id": "stop-stubborn"})
        assert answer.json()["choices"][0]["message"]["content"] == "F"
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert gateway.record("stop-stubborn").outcome == "stop"

    def test_the_less_busy_replica_is_chosen(self, custom: Custom, socket_path: str, vocab_size: int) -> None:
        other = FakeEngine(socket_path + "2", vocab_size=vocab_size, eos_id=EOS_ID)
        other.start()
        gateway, engine = custom(engines=(f"unix:{socket_path}", f"unix:{socket_path}2"), ready=False)
        try:
            asyncio.run_coroutine_threadsafe(_until_connected(gateway, 2), gateway.loop).result(WAIT_S)
            engine.behaviour = other.behaviour = silent
            with gateway.connect() as first, gateway.connect() as second:
                first.sendall(raw_request(CHAT, "one"))
                engine.wait_for_requests(1)
                second.sendall(raw_request(CHAT, "two"))
                other.wait_for_requests(1)
            assert gateway.record("one").outcome == gateway.record("two").outcome == "client_gone"
        finally:
            other.stop()


async def _until_healthy(gateway: LiveGateway) -> None:
    while gateway.application.backend.troubles():
        await asyncio.sleep(0.005)


async def _until_connected(gateway: LiveGateway, count: int) -> None:
    while len(gateway.application.backend.hellos()) < count:
        await asyncio.sleep(0.005)
