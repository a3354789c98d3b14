"""
Engines that go in mid-stream: their requests go on elsewhere, and the client sees a pause.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.api import GenerateRequest, Sampling
from gateway.poison import FORGET_S, KILLS_MAX, SUSPECTS_MAX, Poison
from gateway.rescue import RESUMES_MAX
from telemetry.records import RequestRecord, StepRecord
from tests.http.asking import CHAT_URL, COMPLETIONS_URL, Body, chat, contents, prompt, raw_request, stream
from tests.http.conftest import options_for
from tests.http.fake_engine import FakeEngine, Job, greet_and_stop
from tests.http.guard import Guard, until
from tests.http.harness import WAIT_S, LiveGateway, ShellEngine
from tests.http.model_files import EOS_ID

STEP_S = 0.004


class Fleet:
    """A gateway, and engines that come and go."""

    def __init__(self, model_dir: Path, folder: Path, vocab_size: int) -> None:
        self._model_dir = model_dir
        self._folder = folder
        self._vocab_size = vocab_size
        self._stack = ExitStack()
        self.gateway: LiveGateway

    def serve(self, names: str, **changes: object) -> LiveGateway:
        """A gateway in front of the engines of these names, one letter each."""
        options = options_for(self._model_dir, self.path(names[0]))
        engines = tuple(f"unix:{self.path(name)}" for name in names)
        self.gateway = LiveGateway(msgspec.structs.replace(options, engines=engines, **changes))
        self.gateway.start()
        self._stack.callback(self.gateway.stop)
        return self.gateway

    def path(self, name: str) -> str:
        return str(self._folder / name)

    def shell(self, name: str, **settings: Any) -> ShellEngine:
        """The real engine shell, with a device whose next token is a hash of all before."""
        engine = ShellEngine(self.path(name), vocab_size=self._vocab_size, step_delay_s=STEP_S, **settings)
        engine.start()
        return engine

    def fake(self, name: str, **settings: Any) -> FakeEngine:
        """One that does as it is told."""
        engine = FakeEngine(self.path(name), vocab_size=self._vocab_size, eos_id=EOS_ID, **settings)
        engine.start()
        self._stack.callback(engine.stop)
        return engine

    def connected(self, count: int) -> None:
        """Wait until so many engines are."""

        async def wait() -> None:
            while len(self.gateway.application.backend.hellos()) != count:
                await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(wait(), self.gateway.loop).result(WAIT_S)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def fleet(model_dir: Path, vocab_size: int, socket_path: str) -> Iterator[Fleet]:
    found = Fleet(model_dir, Path(socket_path).parent, vocab_size)
    yield found
    found.close()


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


async def hang_up(job: Job) -> None:
    """Die of it, before anything has come of it."""
    job.hang_up()


async def hang_up_late(job: Job) -> None:
    """Die of it after one more token."""
    await job.accept()
    await job.emit([40])
    job.hang_up()


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


class TestPoison:
    def test_what_kills_two_engines_is_refused_and_remembered(self, fleet: Fleet) -> None:
        engine = fleet.fake("a")
        gateway = fleet.serve("a")
        engine.behaviour = hang_up
        answer = gateway.client.post(CHAT_URL, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_refused")
        assert gateway.record(answer.headers["x-request-id"]).outcome == "poisonous"
        assert len(engine.requests) == KILLS_MAX
        fleet.connected(1)
        engine.behaviour = greet_and_stop
        again = gateway.client.post(CHAT_URL, json=chat(seed=77, stream=True))
        assert (again.status_code, again.json()["error"]["code"]) == (400, "request_refused")
        assert len(engine.requests) == KILLS_MAX
        assert gateway.client.post(CHAT_URL, json=chat(temperature=0.3)).status_code == 200

    def test_its_neighbours_are_not_mistaken_for_it(self, fleet: Fleet) -> None:
        engine = fleet.fake("a")
        gateway = fleet.serve("a")
        all_here = asyncio.Event()
        poison = tuple(gateway.ids("poison"))

        async def die_of_poison(job: Job) -> None:
            if len(engine.requests) >= 4:
                all_here.set()
            await all_here.wait()
            if job.request.prompt[: len(poison)] == poison:
                job.hang_up()
            else:
                await greet_and_stop(job)

        engine.behaviour = die_of_poison
        statuses: dict[str, int] = {}

        def post(text: str) -> None:
            statuses[text] = gateway.client.post(COMPLETIONS_URL, json=prompt(prompt=text)).status_code

        threads = [threading.Thread(target=post, args=(text,)) for text in ("poison", "one", "two", "three")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert statuses == {"poison": 400, "one": 200, "two": 200, "three": 200}

    def test_one_that_kills_late_is_resumed_so_often_and_no_more(self, fleet: Fleet) -> None:
        engine = fleet.fake("a")
        gateway = fleet.serve("a")
        engine.behaviour = hang_up_late
        answer = gateway.client.post(CHAT_URL, json=chat(), headers={"x-request-id": "late"})
        assert answer.status_code == 502
        assert len(engine.requests) == 1 + RESUMES_MAX
        assert [request.resume for request in engine.requests] == [0, 1, 2, 3]
        assert gateway.record("late").resumes == RESUMES_MAX
        fleet.connected(1)
        assert gateway.client.post(CHAT_URL, json=chat()).status_code == 400

    def test_a_bystander_of_many_deaths_is_not_convicted(self, fleet: Fleet) -> None:
        """It comes further each time that it is sent."""
        engine = fleet.fake("a")
        gateway = fleet.serve("a")

        async def die_twice(job: Job) -> None:
            await job.accept()
            if len(engine.requests) < 3:
                await job.emit([40])
                job.hang_up()
            else:
                await job.finish("length", tokens=[41])

        engine.behaviour = die_twice
        answer = gateway.client.post(CHAT_URL, json=chat())
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 3

    def test_other_gateways_know_it_too(self, fleet: Fleet, guard: Guard) -> None:
        engine = fleet.fake("a")
        first = fleet.serve("a", **guard.options)
        second = fleet.serve("a", **guard.options)
        engine.behaviour = hang_up
        assert first.client.post(CHAT_URL, json=chat()).status_code == 400
        assert len(engine.requests) == KILLS_MAX
        poison = second.application.backend.poison
        until(lambda: poison.refuses(engine.requests[0], 0), "the other gateway has not heard of it")
        fleet.connected(1)
        assert second.client.post(CHAT_URL, json=chat(stream=True)).status_code == 400
        assert len(engine.requests) == KILLS_MAX

    def test_memory_has_bounds(self) -> None:
        poison = Poison()
        messages = [
            GenerateRequest(request_id=str(index), prompt=(index,), sampling=Sampling(seed=index), tokens_max=1)
            for index in range(SUSPECTS_MAX + 1)
        ]
        poison.suspect(messages, 1)
        poison.suspect([messages[0], messages[-1]], 1)
        assert not poison.refuses(messages[0], 2)
        assert poison.refuses(messages[-1], 2)
        assert poison.refuses(msgspec.structs.replace(messages[-1], sampling=Sampling(seed=-1)), 2)
        assert not poison.refuses(messages[-1], 2 + FORGET_S * 1_000_000_000)
        poison.acquit(messages[-1])
        assert not poison.refuses(messages[-1], 2)

    def test_the_same_request_many_times_is_one_suspect(self) -> None:
        poison = Poison()
        message = GenerateRequest(request_id="a", prompt=(1,), sampling=Sampling(), tokens_max=1)
        poison.suspect([message] * 5, 1)
        assert poison.deaths(message, 1) == 1


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
