"""
Requests that kill engines, and their neighbours, which do not.
"""

import asyncio
import threading

import msgspec

from engine.api import GenerateRequest, Sampling
from gateway.poison import FORGET_S, KILLS_MAX, SUSPECTS_MAX, Poison
from gateway.rescue import RESUMES_MAX
from tests.http.asking import CHAT_URL, COMPLETIONS_URL, chat, prompt
from tests.http.fake_engine import Job, greet_and_stop
from tests.http.fleet import Fleet
from tests.http.guard import Guard, until
from tests.http.harness import WAIT_S


async def hang_up(job: Job) -> None:
    """Die of it, before anything has come of it."""
    job.hang_up()


async def hang_up_late(job: Job) -> None:
    """Die of it after one more token."""
    await job.accept()
    await job.emit([40])
    job.hang_up()


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

    def test_who_has_been_answered_is_suspected_no_more(self, fleet: Fleet) -> None:
        """It was there when an engine died, was answered by the next one, and is there again at another death."""
        engine = fleet.fake("a")
        gateway = fleet.serve("a")

        async def die_at_each_first_try(job: Job) -> None:
            await (hang_up(job) if len(engine.requests) % 2 else greet_and_stop(job))

        engine.behaviour = die_at_each_first_try
        for _ in range(2 * KILLS_MAX):
            fleet.connected(1)
            assert gateway.client.post(CHAT_URL, json=chat()).status_code == 200
        assert len(engine.requests) == 4 * KILLS_MAX

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
