"""
200 clients on four workers, against 60 requests and 5,000 tokens a minute: the book closes to the last token.

A bucket that is not full again after its first request, a large one, holds at any time exactly

    limit - charged + rate * (time since the first request)

so what the server holds in the end, and when it last wrote it, is compared with the sum of what was charged.
"""

import asyncio
import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec
import pytest

from cache.accounts import Limits
from cache.key_records import Issued
from tests.contract.telemetry.test_metrics import total
from tests.http.asking import COMPLETIONS_URL, prompt
from tests.http.fake_engine import FakeEngine, Job
from tests.http.guard import Guard, bearer, until
from tests.http.harness import WAIT_S
from tests.http.model_files import EOS_ID
from tests.http.workers import Workers

WORKERS = 4
CLIENTS = 200
LOAD_S = 4.0
REQUESTS, TOKENS = 60, 5000
LIMITS = Limits(requests_per_minute=REQUESTS, tokens_per_minute=TOKENS)
OUTPUT = 40
"""What is generated at most."""
LARGE = 600
"""But where somebody asks for just that: more than is reserved for any output."""


async def answer(job: Job) -> None:
    """Slow enough that leases overlap, and that a client may leave in between."""
    count = LARGE if job.request.tokens_max == LARGE else min(job.request.tokens_max, OUTPUT)
    await job.accept()
    await job.emit([40] * (count // 2))
    await asyncio.sleep(0.02)
    await job.finish("length", tokens=[41] * (count - count // 2))


class Answer(msgspec.Struct):
    """What one client was told."""

    at_s: float
    status: int
    headers: dict[str, str]
    tokens: int = 0

    def left(self, kind: str) -> int:
        """`x-ratelimit-remaining-*`."""
        return int(self.headers[f"x-ratelimit-remaining-{kind}"])


class Load:
    """The clients of one key, one request after the other each, until the time is over."""

    def __init__(self, workers: Workers, tenant: str, issued: Issued, bodies: list[dict[str, Any]]) -> None:
        self.workers = workers
        self.tenant = tenant
        self.issued = issued
        self.bodies = bodies
        self.clients: list[list[Answer]] = []
        self.left = 0
        """Clients that have not waited for the end."""

    async def run(self, http: httpx.AsyncClient, clients: int) -> None:
        """Until LOAD_S are over."""
        until_s = time.monotonic() + LOAD_S
        self.clients += [[] for _ in range(clients)]
        await asyncio.gather(*(self._client(http, number, until_s) for number in range(clients)))

    async def _client(self, http: httpx.AsyncClient, number: int, until_s: float) -> None:
        turn = number
        while time.monotonic() < until_s:
            body = self.bodies[turn % len(self.bodies)]
            turn += 1
            told = await self.ask(http, body, leaves=bool(body.get("stream")) and number % 4 == 0)
            if told is not None:
                self.clients[number].append(told)

    async def ask(self, http: httpx.AsyncClient, body: dict[str, Any], *, leaves: bool = False) -> Answer | None:
        """One request; None if the client has left in the middle."""
        async with http.stream(
            "POST", self.workers.url + COMPLETIONS_URL, json=body, headers=bearer(self.issued.key)
        ) as response:
            if leaves and response.status_code == 200:
                self.left += 1
                return None
            text = (await response.aread()).decode()
        tokens = int(found[-1]) if (found := re.findall(r'"total_tokens":(\d+)', text)) else 0
        return Answer(time.monotonic(), response.status_code, dict(response.headers), tokens)

    @property
    def answers(self) -> list[Answer]:
        """Of all clients."""
        return [answer for client in self.clients for answer in client]

    @property
    def admitted(self) -> list[Answer]:
        """Those that were."""
        return [answer for answer in self.answers if answer.status == 200]


@pytest.fixture
def workers(model_dir: Path, vocab_size: int, guard: Guard) -> Iterator[Workers]:
    with TemporaryDirectory(prefix="pellucid") as home:
        engine = FakeEngine(f"{home}/engine.sock", vocab_size=vocab_size, eos_id=EOS_ID, context_max=2048)
        engine.behaviour = answer
        engine.start()
        guard.create()  # with a key, and so a pepper, before anybody looks
        workers = Workers(model_dir, engine.path, Path(home), WORKERS, **guard.options)
        yield workers
        workers.stop()
        engine.stop()


def server_us(guard: Guard) -> int:
    """The server's clock."""
    words = guard.server.ask("TIME").split(b"\r\n")
    return int(words[2]) * 1_000_000 + int(words[4])


# A client that leaves while it connects may leave its socket to the garbage collector.
@pytest.mark.filterwarnings("ignore:.*unclosed <socket:pytest.PytestUnraisableExceptionWarning")
def test_the_book_closes_under_load(workers: Workers, guard: Guard) -> None:
    small = [prompt(max_tokens=8), prompt(max_tokens=8, stream=True, stream_options={"include_usage": True})]
    large = [prompt(max_tokens=OUTPUT), prompt(max_tokens=LARGE), prompt(max_tokens=OUTPUT, stream=True)]
    del large[0]["max_tokens"]  # what is reserved is more than what is used, and in the next one less
    by_requests = Load(workers, "green", guard.create(tenant="green", limits=LIMITS), small)
    by_tokens = Load(workers, "red", guard.create(tenant="red", limits=LIMITS), large)
    began = asyncio.run(_run(guard, [by_requests, by_tokens]))
    until(lambda: guard.reservations() == 0, "something is not settled")
    for load, (before_us, after_us) in zip((by_requests, by_tokens), began, strict=True):
        assert guard.running(load.issued.key_id) == 0, "a slot is taken for ever"
        assert {answer.status for answer in load.answers} == {200, 429}
        assert not any("x-pellucid-degraded" in answer.headers for answer in load.answers)
        _the_headers_are_right(load)
        _the_book_closes(workers, guard, load, before_us, after_us)
    assert len(by_requests.admitted) + by_requests.left >= REQUESTS, "more was promised"
    assert sum(answer.tokens for answer in by_tokens.admitted) > TOKENS * 0.7, "the tokens were no limit"
    _all_workers_together_say_the_same(workers, [by_requests, by_tokens])
    asyncio.run(_who_waits_as_told_is_let_in([by_requests, by_tokens]))


async def _run(guard: Guard, loads: list[Load]) -> list[tuple[int, int]]:
    """All of it; between which times of the server the first request of each was."""
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=CLIENTS), timeout=WAIT_S) as http:
        began = [await _first(guard, load, http) for load in loads]
        await asyncio.gather(*(load.run(http, CLIENTS // len(loads)) for load in loads))
    return began


async def _first(guard: Guard, load: Load, http: httpx.AsyncClient) -> tuple[int, int]:
    """The first request, with which the bucket begins: between these two times of the server."""
    before_us = server_us(guard)
    told = await load.ask(http, prompt(max_tokens=LARGE))
    assert told is not None and told.status == 200
    load.clients.append([told])
    return before_us, server_us(guard)


def _the_book_closes(workers: Workers, guard: Guard, load: Load, before_us: int, after_us: int) -> None:
    def logged() -> list[dict[str, Any]]:
        return [line for line in workers.request_lines() if line["tenant"] == load.tenant]

    until(lambda: len(logged()) == len(load.answers) + load.left, "not all are logged")
    lines = logged()
    admitted = [line for line in lines if line["outcome"] != "rate_limited"]
    assert len(lines) - len(admitted) == sum(answer.status == 429 for answer in load.answers)
    charged = {"requests": len(admitted), "tokens": sum(map(_tokens, admitted))}
    assert sum(answer.tokens for answer in load.admitted) <= charged["tokens"]
    at_us, requests, _, tokens, *_ = guard.bucket(load.issued.key_id)
    for kind, limit, left in (("requests", REQUESTS, requests), ("tokens", TOKENS, tokens)):
        # One request is soon there again: until all the others begin nothing may have been gained.
        lost = 3 if kind == "requests" else 1
        refilled = [limit * (at_us - began_us) / 60e6 for began_us in (after_us, before_us)]
        assert refilled[0] - lost <= left - (limit - charged[kind]) <= refilled[1] + 1, (kind, left, charged, refilled)
        assert left < limit, "a full bucket proves nothing"


def _tokens(line: dict[str, Any]) -> int:
    """Of one request, as its worker has logged it."""
    return int(line["prompt_tokens"] + line["output_tokens"])


def _the_headers_are_right(load: Load) -> None:
    for answer in load.answers:
        assert (answer.headers["x-ratelimit-limit-requests"], answer.headers["x-ratelimit-limit-tokens"]) == (
            str(REQUESTS),
            str(TOKENS),
        )
        assert 0 <= answer.left("requests") < REQUESTS and 0 <= answer.left("tokens") < TOKENS
        assert (answer.status == 429) == ("retry-after-ms" in answer.headers)
    for client in load.clients:  # what comes back in between is what the rate allows, or was reserved and not used
        for one, then in itertools.pairwise(client):
            assert then.left("requests") <= one.left("requests") + (then.at_s - one.at_s) * REQUESTS / 60 + 2
    elapsed_s = max(answer.at_s for answer in load.answers) - min(answer.at_s for answer in load.answers)
    lefts = [answer.left("requests") for answer in load.admitted]
    for left in set(lefts):
        # Each of those has left so many behind it, so there cannot have been more of them.
        assert sum(other >= left for other in lefts) <= REQUESTS - left + elapsed_s * REQUESTS / 60 + 1


def _all_workers_together_say_the_same(workers: Workers, loads: list[Load]) -> None:
    series = workers.metrics()
    assert total(series, "pellucid_gateway_workers_silent") == 0
    refused = sum(answer.status == 429 for load in loads for answer in load.answers)
    assert total(series, "pellucid_requests_total", outcome="rate_limited") == refused
    lines = [line for line in workers.request_lines() if line["outcome"] == "length"]
    assert total(series, "pellucid_requests_total", outcome="length") == len(lines)


async def _who_waits_as_told_is_let_in(loads: list[Load]) -> None:
    """It is a promise: nobody else comes, so the first try after the time that was named succeeds."""

    async def wait(load: Load, http: httpx.AsyncClient) -> None:
        told = await load.ask(http, prompt(max_tokens=8))
        if told is not None and told.status == 429:
            await asyncio.sleep(int(told.headers["retry-after-ms"]) / 1000)
            told = await load.ask(http, prompt(max_tokens=8))
        assert told is not None and told.status == 200, told

    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        await asyncio.gather(*(wait(load, http) for load in loads))
