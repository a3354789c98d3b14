"""
/debug/why and /debug/doctor, asked of a live gateway.
"""

import asyncio

from diagnosis.causes import BY_NAME
from telemetry.records import RequestRecord
from tests.http.asking import Pair, chat, post
from tests.http.conftest import Custom
from tests.http.fake_engine import Job
from tests.http.guard import Guard, bearer
from tests.http.harness import LiveGateway


async def slow(job: Job) -> None:
    """An engine that takes its time before it has the request."""
    await asyncio.sleep(0.3)
    await job.accept()
    await job.finish("length", tokens=[40, 41])


def test_why_is_exact_and_says_what_it_is_not(shell: LiveGateway) -> None:
    request_id = str(post(shell, chat())["id"])
    record = shell.record(request_id)
    why = shell.client.get(f"/debug/why/{request_id}").json()
    assert why["request_id"] == request_id and why["e2e_ns"] == record.finished_ns - record.accepted_ns
    assert sum(one["ns"] for one in why["causes"]) <= why["e2e_ns"]
    assert all(one["cause"] in BY_NAME for one in why["causes"])
    assert {"cause": "upstream", "words": BY_NAME["upstream"].absent} in why["not"]
    assert why["steps_known"] > 0, "the steps that it was in are remembered"


def test_a_request_that_nobody_knows_is_a_404(shell: LiveGateway) -> None:
    answer = shell.client.get("/debug/why/nobody")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_seconds_that_are_none_are_refused_by_name(shell: LiveGateway) -> None:
    for seconds in ("0", "-1", "nan", "much", "3601", ""):
        answer = shell.client.get("/debug/doctor", params={"seconds": seconds})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seconds"), seconds
    assert int(shell.client.get("/debug/doctor").json()["window_s"]) == 300


def test_the_doctor_looks_back_no_further_than_asked(fake: Pair) -> None:
    gateway, engine = fake
    post(gateway, chat())
    engine.behaviour = slow
    request_id = str(post(gateway, chat())["id"])
    report = gateway.client.get("/debug/doctor", params={"seconds": 60}).json()
    assert report["tails"]["ttft_p99"]["requests"] == [request_id]
    assert report["tails"]["ttft_p99"]["quantile_ns"] >= 300_000_000
    assert report["requests"] >= 2


def test_a_key_is_told_of_its_own_requests_only(guard: Guard, custom: Custom) -> None:
    gateway, _ = custom(**guard.options)
    blue, green = guard.create(tenant="blue"), guard.create(tenant="green")
    answer = gateway.client.post("/v1/chat/completions", json=chat(), headers=bearer(blue.key))
    request_id = answer.headers["x-request-id"]
    gateway.record(request_id)
    where = f"/debug/why/{request_id}"
    assert gateway.client.get(where).status_code == 401
    assert gateway.client.get(where, headers=bearer(green.key)).status_code == 404
    assert gateway.client.get(where, headers=bearer(blue.key)).json()["request_id"] == request_id
    tails = gateway.client.get("/debug/doctor", headers=bearer(green.key)).json()["tails"]
    assert all(tail["requests"] == [] for tail in tails.values())


def test_nobody_learns_the_names_of_others_requests(guard: Guard, custom: Custom) -> None:
    """Also not from those that were served while its own stalled."""
    gateway, _ = custom(**guard.options)
    blue = guard.create(tenant="blue")
    states = {"stalled": 70, "decode": 30}
    record = RequestRecord(
        request_id="mine", tenant="blue", outcome="stop", status=200, route="/v1/completions", accepted_ns=0,
        finished_ns=100, states=states, stalled_for={"theirs": 60, "": 10},
    )  # fmt: skip
    gateway.application.hub.request(record)
    for path in ("/debug/requests/mine", "/debug/requests", "/debug/why/mine"):
        text = gateway.client.get(path, headers=bearer(blue.key)).text
        assert "mine" in text and "theirs" not in text, path
    with gateway.client.stream("GET", "/debug/live", headers=bearer(blue.key)) as events:
        first = next(line for line in events.iter_lines() if line.startswith("data: "))
    assert "mine" in first and "theirs" not in first
    shown = gateway.client.get("/debug/requests/mine", headers=bearer(blue.key)).json()
    assert shown["stalled_for"] == {"": 70}
