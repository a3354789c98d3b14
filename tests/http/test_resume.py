"""
Engines that go in mid-stream: their requests go on elsewhere, and the client sees a pause.
"""

import asyncio
import json
import threading
from collections.abc import Callable

import pytest

from telemetry.records import RequestRecord, StepRecord
from tests.http.asking import CHAT_URL, COMPLETIONS_URL, Body, chat, contents, prompt, raw_request, stream
from tests.http.fake_engine import Job
from tests.http.fleet import Fleet
from tests.http.harness import WAIT_S, LiveGateway, ShellEngine


def said(transcript: str, choices: int) -> tuple[list[str], list[object], Body]:
    """The texts, everything else of each choice in order, and the bill; not how it was cut into chunks."""
    chunks = [json.loads(event.removeprefix("data: ")) for event in transcript.split("\n\n")[:-2]]
    facts: list[object] = []
    for index in range(choices):
        for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
            logprobs = choice["logprobs"] or {}
            facts += [logprobs.get("content") or list(zip(*(logprobs.get(name, ()) for name in LISTS), strict=True))]
            facts += [choice["finish_reason"]]
    flat = [fact for group in facts for fact in (group if isinstance(group, list) else [group]) if fact is not None]
    usage: Body = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), {})
    return contents(chunks, choices), flat, {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}


LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def ask(gateway: LiveGateway, body: Body, path: str, after: Callable[[], None], **headers: str) -> str:
    """The transcript of a stream; `after` is called when its first text has come."""
    with gateway.client.stream("POST", path, json={**body, "stream": True}, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        texts = answer.iter_text()
        transcript = ""
        while "text" not in transcript and '"content":"' not in transcript.replace('"content":""', ""):
            transcript += next(texts)
        after()
        return transcript + "".join(texts)


def check_resumed(record: RequestRecord, resumes: int) -> None:
    assert record.outcome in ("stop", "length")
    assert record.resumes == resumes
    assert record.states["lost"] > 0
    assert record.states["resume"] > 0


BODIES = [
    (prompt(max_tokens=60, seed=5, temperature=1, ignore_eos=True), COMPLETIONS_URL),
    (prompt(max_tokens=60, seed=5, temperature=1, n=3, logprobs=2, ignore_eos=True), COMPLETIONS_URL),
    (chat(max_tokens=60, temperature=0, logprobs=True, min_tokens=60), CHAT_URL),
]


@pytest.mark.parametrize(("body", "path"), BODIES, ids=["completion", "three choices, logprobs", "chat, logprobs"])
def test_the_text_goes_on_at_another_engine(fleet: Fleet, body: Body, path: str) -> None:
    engines = {"a": fleet.shell("a"), "b": fleet.shell("b")}
    gateway = fleet.serve("ab")
    fleet.connected(2)
    body = {**body, "stream_options": {"include_usage": True}}
    _, undisturbed = stream(gateway, body, path)

    def kill() -> None:
        busy = next(name for name, engine in engines.items() if engine.scheduler.has_work)
        engines.pop(busy).kill()

    disturbed = ask(gateway, body, path, kill, **{"x-request-id": "moved"})
    choices = body.get("n", 1)
    assert said(disturbed, choices) == said(undisturbed, choices)
    assert disturbed.endswith("data: [DONE]\n\n")
    check_resumed(gateway.record("moved"), choices)
    for engine in engines.values():
        engine.stop()


def test_it_goes_on_at_the_same_engine_when_that_is_back(fleet: Fleet) -> None:
    first = fleet.shell("a")
    gateway = fleet.serve("a")
    body = prompt(max_tokens=60, seed=6, ignore_eos=True)
    _, undisturbed = stream(gateway, body, COMPLETIONS_URL)
    second: list[ShellEngine] = []

    def restart() -> None:
        first.kill()
        second.append(fleet.shell("a"))

    disturbed = ask(gateway, body, COMPLETIONS_URL, restart, **{"x-request-id": "waited"})
    assert said(disturbed, 1) == said(undisturbed, 1)
    check_resumed(gateway.record("waited"), 1)
    second[0].stop()


def test_an_engine_that_leaves_in_order_hands_its_requests_on(fleet: Fleet) -> None:
    engines = {"a": fleet.shell("a"), "b": fleet.shell("b")}
    gateway = fleet.serve("ab")
    fleet.connected(2)
    body = prompt(max_tokens=60, seed=7, ignore_eos=True)
    _, undisturbed = stream(gateway, body, COMPLETIONS_URL)

    def leave() -> None:
        busy = next(name for name, engine in engines.items() if engine.scheduler.has_work)
        engines.pop(busy).stop()

    disturbed = ask(gateway, body, COMPLETIONS_URL, leave, **{"x-request-id": "handed"})
    assert said(disturbed, 1) == said(undisturbed, 1)
    check_resumed(gateway.record("handed"), 1)
    for engine in engines.values():
        engine.stop()


class TestNobodyTakesIt:
    @pytest.mark.parametrize("stream", [False, True])
    def test_the_deadline_passes(self, fleet: Fleet, stream: bool) -> None:
        engine = fleet.fake("a")
        gateway = fleet.serve("a", resume_deadline_s=0.3)

        async def die_for_good(job: Job) -> None:
            await job.accept()
            await job.emit([40])
            assert engine._server is not None
            engine._server.close()
            job.hang_up()

        engine.behaviour = die_for_good
        answer = gateway.client.post(CHAT_URL, json=chat(stream=stream), headers={"x-request-id": "end"})
        assert answer.status_code == (200 if stream else 502)
        assert '"bad_gateway"' in answer.text
        assert "[DONE]" not in answer.text
        record = gateway.record("end")
        assert (record.outcome, record.output_tokens, record.resumes) == ("engine_lost", 1, 0)
        assert 0.3e9 <= record.states["resume"] < 5e9

    def test_other_weights_say_something_else(self, fleet: Fleet) -> None:
        engines = [fleet.fake("a"), fleet.fake("b", fingerprint="fp-other")]
        gateway = fleet.serve("ab", resume_deadline_s=0.3)
        fleet.connected(2)

        async def die_for_good(job: Job) -> None:
            await job.accept()
            assert job.engine._server is not None
            job.engine._server.close()
            job.hang_up()

        for engine in engines:
            engine.behaviour = die_for_good
        assert gateway.client.post(CHAT_URL, json=chat()).status_code == 502
        assert sum(len(engine.requests) for engine in engines) == 1

    def test_the_client_leaves_while_it_waits(self, fleet: Fleet) -> None:
        engine = fleet.fake("a")
        gateway = fleet.serve("a", resume_deadline_s=60.0)
        died = threading.Event()

        async def die_for_good(job: Job) -> None:
            await job.accept()
            assert engine._server is not None
            engine._server.close()
            job.hang_up()
            died.set()

        engine.behaviour = die_for_good
        with gateway.connect() as raw:
            raw.sendall(raw_request(chat(stream=True), "left"))
            assert died.wait(WAIT_S)
            fleet.connected(0)
        record = gateway.record("left")
        assert (record.outcome, record.status) == ("client_gone", 499)
        assert record.states["resume"] > 0


class TestSilence:
    def test_one_with_work_is_given_up(self, fleet: Fleet) -> None:
        engines = {"a": fleet.fake("a"), "b": fleet.fake("b")}
        gateway = fleet.serve("ab", silence_s=0.3)
        fleet.connected(2)
        for replica in gateway.application.backend.replicas:  # A step each, so that it is known how long they take.
            replica._patience.learn(StepRecord(step_id=1, ended_ns=1, step_ns=1, parts={}))
        first: list[str] = []

        async def wedge_once(job: Job) -> None:
            await job.accept()
            if not first:
                first.append(job.request.request_id)
                await job.emit([40])
                job.engine.mute = True
                await job.until_aborted()
            else:
                await job.finish("length", tokens=[41])

        for engine in engines.values():
            engine.behaviour = wedge_once
        answer = gateway.client.post(CHAT_URL, json=chat(), headers={"x-request-id": "moved"})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 2
        record = gateway.record("moved")
        check_resumed(record, 1)
        assert record.states["lost"] >= 0.25e9

    def test_an_idle_one_is_found_out_before_it_gets_a_request(self, fleet: Fleet) -> None:
        engine = fleet.fake("a")
        gateway = fleet.serve("a", silence_s=0.2)
        engine.mute = True

        async def lost() -> None:
            while not (gateway.application.backend.replicas[0].trouble(0) or engine.mute is False):
                await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(lost(), gateway.loop).result(WAIT_S)
        engine.mute = False
        fleet.connected(1)
        assert gateway.client.post(CHAT_URL, json=chat()).status_code == 200
