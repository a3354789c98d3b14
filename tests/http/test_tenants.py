"""
What a tenant is shown of its requests, whatever others do: how many they have, and what they call them.
"""

import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from gateway.siblings import REQUESTS_MAX, Siblings
from telemetry.clock import now_ns
from telemetry.hub import Hub
from telemetry.records import RequestRecord
from tests.http.asking import CHAT_URL, Pair, chat, raw_request, read_until
from tests.http.conftest import Custom, options_for
from tests.http.fake_engine import Job
from tests.http.guard import Guard, bearer, until

pytestmark = pytest.mark.usefixtures("patient")

EVENTS_MAX = 20
"""After so many, what has not been told is not going to be."""


def a_record(request_id: str, tenant: str, at_ns: int) -> RequestRecord:
    return RequestRecord(
        request_id=request_id, tenant=tenant, outcome="stop", status=200, route=CHAT_URL, accepted_ns=at_ns,
        finished_ns=at_ns + 9, states={"decode": 9},
    )  # fmt: skip


def one_quiet_and_one_busy(hub: Hub, prefix: str) -> None:
    """One request of `quiet`, and after it as many of `busy` as are shown."""
    hub.request(a_record(f"{prefix}-quiet", "quiet", at_ns=1))
    for number in range(REQUESTS_MAX):
        hub.request(a_record(f"{prefix}-busy-{number}", "busy", at_ns=2 + number))


def names(requests: list[dict[str, Any]]) -> set[str]:
    return {str(one["request_id"]) for one in requests}


# ---- how many


def test_a_quiet_tenant_sees_its_own_however_busy_another_is(guard: Guard, custom: Custom) -> None:
    gateway, _ = custom(**guard.options)
    quiet, busy = guard.create(tenant="quiet"), guard.create(tenant="busy")
    one_quiet_and_one_busy(gateway.application.hub, "one")
    listed = gateway.client.get("/debug/requests", headers=bearer(quiet.key)).json()["requests"]
    assert names(listed) == {"one-quiet"}
    with contextlib.ExitStack() as stack:
        shown = []
        for key in (quiet.key, busy.key):  # the second comes while ticks are made for the first
            answer = stack.enter_context(gateway.client.stream("GET", "/debug/live", headers=bearer(key)))
            shown.append(json.loads(next(line for line in answer.iter_lines() if line).removeprefix("data: ")))
    assert names(shown[0]["requests"]) == {"one-quiet"}
    assert len(shown[1]["requests"]) == REQUESTS_MAX and {one["tenant"] for one in shown[1]["requests"]} == {"busy"}
    assert all(one["whole"] for one in shown)


@pytest.fixture
async def two(model_dir: Path) -> AsyncIterator[list[tuple[Siblings, Hub]]]:
    """Two workers' ways to each other, with nothing else of a worker."""
    with TemporaryDirectory(prefix="pellucid") as home:
        sockets = (f"{home}/0.sock", f"{home}/1.sock")
        options = msgspec.structs.replace(options_for(model_dir, "/nowhere"), worker_sockets=sockets)
        hubs = [Hub(), Hub()]
        workers = [Siblings(msgspec.structs.replace(options, worker=number), hub) for number, hub in enumerate(hubs)]
        for worker in workers:
            await worker.start()
        yield list(zip(workers, hubs, strict=True))
        for worker in workers:
            await worker.stop()


async def test_workers_tell_each_other_of_the_tenant_that_was_asked_for(two: list[tuple[Siblings, Hub]]) -> None:
    for number, (_, hub) in enumerate(two):
        one_quiet_and_one_busy(hub, str(number))
    for siblings, _ in two:
        found, silent = await siblings.requests("quiet")
        assert (names(found), silent) == ({"0-quiet", "1-quiet"}, [])
        everybody, _ = await siblings.requests(None)
        assert len(everybody) == REQUESTS_MAX and {one["tenant"] for one in everybody} == {"busy"}


# ---- what they are called


async def test_a_name_that_many_tenants_have_chosen_is_told_of_all(two: list[tuple[Siblings, Hub]]) -> None:
    tenants = {f"tenant-{number}" for number in range(REQUESTS_MAX + 1)}
    for _, hub in two:
        for at_ns, tenant in enumerate(sorted(tenants)):
            hub.request(a_record("job-1", tenant, at_ns))
    for siblings, _ in two:
        found, _ = await siblings.find("job-1")
        records, _ = await siblings.records("job-1")
        assert {one["tenant"] for one in found} == {one.tenant for one in records} == tenants
        assert len(found) == len(records) == 2 * len(tenants), "of each worker"


def ledger(pair: Pair, key: str, name: str) -> dict[str, Any]:
    answer = pair[0].client.get(f"/debug/requests/{name}", headers=bearer(key))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    why = pair[0].client.get(f"/debug/why/{name}", headers=bearer(key))
    assert why.status_code == 200 and why.json()["outcome"] == found["outcome"]
    return found


def test_each_of_two_tenants_that_chose_the_same_name_sees_its_own(guard: Guard, custom: Custom) -> None:
    pair = gateway, engine = custom(**guard.options)
    keys = {tenant: guard.create(tenant=tenant).key for tenant in ("blue", "green")}
    for key in ("nonsense", *keys.values(), "nonsense"):  # nobody's, too
        headers = bearer(key) | {"x-request-id": "job-1"}
        answer = gateway.client.post(CHAT_URL, json=chat(), headers=headers)
        assert answer.headers["x-request-id"] == "job-1"
        until(lambda: "job-1" not in gateway.application.front.open, "it is not closed")
    before = {tenant: ledger(pair, key, "job-1") for tenant, key in keys.items()}
    assert {tenant: one["tenant"] for tenant, one in before.items()} == {"blue": "blue", "green": "green"}

    async def hang(job: Job) -> None:
        await job.accept()
        await job.emit([40, 41])
        await job.until_aborted()

    engine.behaviour = hang
    with gateway.connect() as raw:
        head = raw_request(chat(stream=True), "job-1")
        raw.sendall(head.replace(b"\r\n", f"\r\nauthorization: Bearer {keys['green']}\r\n".encode(), 1))
        read_until(raw, b"FG")
        assert ledger(pair, keys["blue"], "job-1") == before["blue"], "that of another is in flight"
        assert ledger(pair, keys["green"], "job-1")["outcome"] is None, "the newest"


def test_a_name_that_is_used_again_is_news_to_who_looks(guard: Guard, custom: Custom) -> None:
    gateway, _ = custom(**guard.options)
    keys = {tenant: guard.create(tenant=tenant).key for tenant in ("blue", "green")}
    hub = gateway.application.hub
    began_ns = now_ns()
    with contextlib.ExitStack() as stack:
        streams = {
            tenant: stack.enter_context(gateway.client.stream("GET", "/debug/live", headers=bearer(key))).iter_lines()
            for tenant, key in keys.items()
        }
        for turn, tenant in enumerate(("green", "blue", "blue")):
            hub.request(a_record("job-1", tenant, began_ns + turn))
            events = itertools.islice((line for line in streams[tenant] if line), EVENTS_MAX)
            told = (one for line in events for one in json.loads(line.removeprefix("data: "))["requests"])
            assert any(one["accepted_ns"] == began_ns + turn for one in told), f"{tenant} is not told of {turn}"
