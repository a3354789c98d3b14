"""
The live view: what is streamed to those who look, that it costs nothing while nobody does, and that it ends with the
gateway; and the files of the page.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway import page
from gateway.admission import Ticket
from gateway.live import TICK_S, VIEWERS_MAX, Snapshot, Viewer
from telemetry.clock import now_ns
from telemetry.records import STEP_PARTS
from telemetry.vocabulary import STATES
from tests.http.asking import Pair, chat, post
from tests.http.conftest import Custom, options_for
from tests.http.fake_engine import FakeEngine
from tests.http.guard import Guard, ask, bearer, until
from tests.http.harness import WAIT_S, LiveGateway, ShellEngine
from tests.http.workers import Workers

Event = dict[str, Any]


@contextlib.contextmanager
def looking(gateway: LiveGateway, **headers: str) -> Iterator[Iterator[Event]]:
    """The events of a viewer."""
    with gateway.client.stream("GET", "/debug/live", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield events_of(answer)


def events_of(answer: httpx.Response) -> Iterator[Event]:
    """As they come."""
    for line in answer.iter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


def with_sight(events: Iterator[Event]) -> Event:
    """The first one in which the engine shows something."""
    return next(event for event in events if event["sights"])


@pytest.fixture
def watched(model_dir: Path, vocab_size: int, socket_path: str) -> Iterator[tuple[LiveGateway, ShellEngine]]:
    """A gateway before an engine with real books, of this test alone."""
    engine = ShellEngine(socket_path, vocab_size=vocab_size, step_delay_s=0.006)
    engine.start()
    gateway = LiveGateway(options_for(model_dir, socket_path))
    gateway.start()
    yield gateway, engine
    gateway.stop()
    engine.stop()


def tasks(gateway: LiveGateway) -> set[str]:
    """Names of what runs in the gateway's loop."""

    async def names() -> set[str]:
        return {task.get_name() for task in asyncio.all_tasks()}

    return asyncio.run_coroutine_threadsafe(names(), gateway.loop).result(WAIT_S)


# ---- what is seen


def test_the_first_event_is_whole_and_later_ones_are_news(watched: tuple[LiveGateway, ShellEngine]) -> None:
    gateway, _ = watched
    first_id = post(gateway, chat())["id"]
    with looking(gateway) as events:
        whole = next(events)
        assert whole["whole"] and whole["number"] > 0
        assert whole["vocabulary"]["states"] == list(STATES) and whole["vocabulary"]["parts"] == list(STEP_PARTS)
        assert [one["request_id"] for one in whole["requests"]] == [first_id]
        assert whole["engines"] == [{"replica": 0, "trouble": None}]
        known = {step["step_id"] for step in whole["steps"]}
        news = next(events)
        assert not news["whole"] and news["requests"] == news["steps"] == [] and "vocabulary" not in news
        second_id = post(gateway, chat(max_tokens=40))["id"]
        seen: list[Event] = []
        while not any(one["outcome"] for event in seen for one in event["requests"]):
            seen.append(next(events))
        assert {one["request_id"] for event in seen for one in event["requests"]} == {second_id}
        told = [step["step_id"] for event in seen for step in reversed(event["steps"])]
        assert told == sorted(set(told)) and not known & set(told), "each step once, in order"
        later = next(events)
        assert later["requests"] == [], "who has ended is told once"
        served = later["served"]
        assert (served["requests"], served["failed"]) == (2, 0)
        assert served["time_to_first_token"]["within"] == 1 and served["time_to_first_token"]["p99_ns"] > 0
    shown = gateway.client.get("/debug/requests").json()["requests"]
    assert {one["request_id"] for one in shown} == {first_id, second_id}, "who looks is no request"
    steps = gateway.client.get("/debug/steps").json()["steps"]
    assert {step["step_id"] for step in steps} >= set(told)


def test_the_blocks_are_the_book(watched: tuple[LiveGateway, ShellEngine]) -> None:
    gateway, engine = watched
    post(gateway, chat())
    with looking(gateway) as events:
        idle = with_sight(events)["sights"][0]
        assert idle["slots"] == gateway.client.get("/debug/kv").json()["slots"] == sums(idle)
        asking = threading.Thread(target=gateway.client.post, args=("/v1/chat/completions",), kwargs={"json": long()})
        asking.start()
        busy = next(one for event in events for one in event["sights"] if one["sequences"])
        asking.join(WAIT_S)
    assert sums(busy) == busy["slots"] and busy["slots"]["filled"] > 0
    [sequence] = busy["sequences"]
    assert sequence["state"] in ("prefill", "decode") and sequence["blocks"] > 0
    assert {owner for count, _, _, owner, _ in busy["runs"] if owner >= 0} == {sequence["number"]}
    assert engine.looks > 0


def long(**fields: object) -> dict[str, Any]:
    """A request that takes some ticks."""
    return chat(max_tokens=300, ignore_eos=True, **fields)


def sums(sight: Event) -> dict[str, int]:
    """The book that its blocks come to."""
    slots, size = dict.fromkeys(("total", "free", "cached_idle", "filled", "tail", "lookahead", "fenced"), 0), 0
    size = sight["block_slots"]
    for count, place, filled, _, _ in sight["runs"]:
        slots["total"] += count * size
        if place < 3:
            slots[("free", "cached_idle", "fenced")[place]] += count * size
        elif filled:
            slots["filled"] += count * filled
            slots["tail"] += count * (size - filled)
        else:
            slots["lookahead"] += count * size
    return slots


def test_a_tenant_sees_its_own(guard: Guard, model_dir: Path, vocab_size: int, socket_path: str, patient: None) -> None:
    engine = ShellEngine(socket_path, vocab_size=vocab_size, step_delay_s=0.01)
    engine.start()
    gateway = LiveGateway(msgspec.structs.replace(options_for(model_dir, socket_path), **guard.options))
    gateway.start()
    try:
        keys = {tenant: guard.create(tenant=tenant).key for tenant in ("green", "blue")}
        assert gateway.client.get("/debug/live").status_code == 401
        posting = [
            threading.Thread(
                target=gateway.client.post,
                args=("/v1/chat/completions",),
                kwargs={"json": long(), "headers": bearer(key) | {"x-request-id": f"of-{tenant}"}},
            )
            for tenant, key in keys.items()
        ]
        for thread in posting:
            thread.start()
        with looking(gateway, **bearer(keys["green"])) as events:
            event = next(one for one in events if one["sights"] and len(one["sights"][0]["sequences"]) == 2)
        for thread in posting:
            thread.join(WAIT_S)
        steps = gateway.client.get("/debug/steps", headers=bearer(keys["green"]))
        assert steps.json()["steps"] and "of-" not in steps.text, "steps are of the engine, and name nobody"
    finally:
        gateway.stop()
        engine.stop()
    sequences = event["sights"][0]["sequences"]
    assert {(one["tenant"], (one["request_id"] or "#").split("#")[0]) for one in sequences} == {
        ("green", "of-green"), (None, ""),
    }  # fmt: skip
    assert [one["request_id"] for one in event["requests"]] == ["of-green"]
    assert "blue" not in json.dumps(event)


def test_of_several_workers_each_tells_of_all(model_dir: Path, vocab_size: int, socket_path: str) -> None:
    engine = FakeEngine(socket_path, vocab_size=vocab_size, eos_id=2)
    engine.start()
    workers = Workers(model_dir, socket_path, Path(socket_path).parent, 2)
    try:
        for number in range(2):
            workers.wait_until_connected(number)
        for number in range(8):
            workers.post(f"one-{number}")
        with (
            httpx.Client(base_url=workers.url, timeout=WAIT_S, verify=False) as client,
            client.stream("GET", "/debug/live") as answer,
        ):
            event = next(events_of(answer))
    finally:
        workers.stop()
        engine.stop()
    assert {one["request_id"] for one in event["requests"]} == {f"one-{number}" for number in range(8)}
    assert event["served"]["requests"] == 8
    assert {workers.worker_of(f"one-{number}") for number in range(8)} <= {0, 1}


# ---- what it costs


def test_while_nobody_looks_no_engine_is_asked_and_nothing_runs(watched: tuple[LiveGateway, ShellEngine]) -> None:
    gateway, engine = watched
    live = gateway.application.gateway.live
    post(gateway, long())
    assert engine.looks == 0 and live.ticking is None
    assert not {"live view", "a viewer looks"} & tasks(gateway)
    with looking(gateway) as events, looking(gateway) as others:
        with_sight(events)
        assert next(others)["viewers"] == 2
        assert {"live view", "a viewer looks"} <= tasks(gateway)
    until(lambda: live.ticking is None, "the last viewer has left")
    until(lambda: not {"live view", "a viewer looks"} & tasks(gateway), "nothing of it runs")
    assert not live.viewers and all(replica.sight is None for replica in gateway.application.backend.replicas)
    looks = engine.looks
    post(gateway, long())
    assert engine.looks == looks > 0
    text = gateway.client.get("/metrics").text
    assert 'pellucid_requests_total{outcome="ok",route="/debug/live",status_class="2xx"} 2' in text


def test_there_are_only_so_many_viewers(watched: tuple[LiveGateway, ShellEngine]) -> None:
    gateway, _ = watched
    with contextlib.ExitStack() as stack:
        viewers = [stack.enter_context(looking(gateway)) for _ in range(VIEWERS_MAX)]
        assert next(viewers[-1])["viewers"] == VIEWERS_MAX
        refused = gateway.client.get("/debug/live")
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "overloaded"
        assert f"{VIEWERS_MAX} viewers" in refused.json()["error"]["message"]
    until(lambda: not gateway.application.gateway.live.viewers, "all have left")
    with looking(gateway) as events:
        assert next(events)["whole"]


async def test_who_reads_slowly_gets_the_newest_as_a_whole_and_nothing_waits_for_it() -> None:
    def snapshot(number: int) -> Snapshot:
        return Snapshot({"sights": []}, number=number, requests={None: []})

    viewer = Viewer(Ticket())
    events = viewer.events()

    async def read() -> Event:
        data, more = await anext(events)
        assert more
        found: Event = json.loads(data.removeprefix(b"data: "))
        assert found["whole"] is ("vocabulary" in found)
        return found

    viewer.show(snapshot(7))
    first = await read()
    assert (first["number"], first["whole"]) == (7, True)
    viewer.show(snapshot(8))
    assert await read() == {"number": 8, "whole": False, "requests": [], "steps": [], "sights": []}
    for number in range(9, 400):
        viewer.show(snapshot(number))
    assert (await read())["number"] == 399
    viewer.show(snapshot(400))
    viewer.show(snapshot(401))
    newest = await read()
    assert (newest["number"], newest["whole"]) == (401, True)
    viewer.show(snapshot(402))
    viewer.end()
    assert await anext(events) == (b"", False)


async def test_a_snapshot_is_encoded_once_for_all_who_see_the_same() -> None:
    one = Snapshot({"sights": []}, number=1, requests={None: []})
    assert one.event(Ticket(), whole=True) is one.event(Ticket(), whole=True)


def test_an_engine_whose_blocks_are_many_is_asked_less_often(fake: Pair) -> None:
    gateway, _ = fake
    [replica] = gateway.application.backend.replicas
    writes: list[bytes] = []

    class Writer:
        class transport:
            @staticmethod
            def get_write_buffer_size() -> int:
                return 0

        @staticmethod
        def write(data: bytes) -> None:
            writes.append(data)

    before, replica._writer = replica._writer, Writer()  # type: ignore[assignment]  # as much of it as is asked
    try:
        replica._looked_ns = 30_000_000
        replica.look_away()  # Who comes back at once is no reason to ask again.
        replica.seen_ns = now_ns()
        replica.look(replica.seen_ns + int(2.9e9))
        assert not writes
        replica.look(replica.seen_ns + int(3.1e9))
        assert len(writes) == 1
    finally:
        replica._writer = before
        replica.look_away()


# ---- the end


def test_a_drain_ends_the_streams_at_once(watched: tuple[LiveGateway, ShellEngine]) -> None:
    gateway, _ = watched
    with looking(gateway) as events:
        next(events)
        began_ns = now_ns()
        asyncio.run_coroutine_threadsafe(gateway.application.gateway.drain(), gateway.loop).result(WAIT_S)
        assert list(events) == []
        assert now_ns() - began_ns < TICK_S * 1e9
    refused = gateway.client.get("/debug/live")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"


# ---- the page


def test_its_files(shell: LiveGateway) -> None:
    index = shell.client.get("/")
    assert index.status_code == 200 and index.headers["content-type"] == "text/html; charset=utf-8"
    names = set(page.load())
    assert {"index.html", "style.css", "page.js", "icon.svg"} <= names
    for name in names:
        answer = shell.client.get(f"/page/{name}")
        assert answer.status_code == 200 and answer.content
        assert answer.headers["content-security-policy"] == page.POLICY and "unsafe" not in page.POLICY
        assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-content-type-options"] == "nosniff"
        again = shell.client.get(f"/page/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content
        words = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in words and "https://" not in words, f"{name} asks somebody else"
    assert "style=" not in index.text and "<script>" not in index.text and " on" + "click" not in index.text


def test_the_page_needs_no_key_and_what_it_shows_does(guarded: Pair, guard: Guard) -> None:
    guard.create()
    client = guarded[0].client
    assert client.get("/").status_code == client.get("/page/page.js").status_code == 200
    assert client.get("/debug/live").status_code == 401
    assert ask(guarded, "none").status_code == 401


def test_it_can_be_had_with_other_engines(custom: Custom) -> None:
    gateway, engine = custom()
    with looking(gateway) as events:
        event = next(events)
        assert event["sights"] == [] and event["engines"] == [{"replica": 0, "trouble": None}]
        assert not engine.requests, "an engine that shows nothing is asked, and serves on"
