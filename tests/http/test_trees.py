"""
Every way out of a gateway leaves one whole tree behind, as a strict collector receives it over either protocol.

That any tree is whole is looked at wherever there is a live gateway (`harness.Trees`); here it is which ways out.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from cache.accounts import Limits
from engine.api import Fault, FinishReason
from telemetry.spans import phases
from tests.contract.telemetry.otlp_file import read_trace_file
from tests.contract.telemetry.otlp_sink import Collector, grpc_collector, http_collector
from tests.contract.telemetry.trees import Piece, received, roots
from tests.http.asking import CHAT_URL, COMPLETIONS_URL, chat, prompt, raw_request, read_until
from tests.http.conftest import Custom, Relaying
from tests.http.fake_engine import Job
from tests.http.fleet import Fleet
from tests.http.guard import Guard, bearer
from tests.http.harness import LiveGateway
from tests.http.scripted_upstream import ScriptedUpstream, Visit
from tests.http.test_lifecycle import talk

Openers = Callable[[], AbstractContextManager[Collector]]


@pytest.fixture(params=[http_collector, grpc_collector], ids=["http", "grpc"])
def sink(request: pytest.FixtureRequest) -> Iterator[Collector]:
    """A strict collector."""
    opened: Openers = request.param
    with opened() as collector:
        yield collector


def roots_of(gateway: LiveGateway, sink: Collector, ids: list[str]) -> dict[str, Piece]:
    """The roots of these requests, once their whole trees have come."""
    records = [gateway.record(request_id) for request_id in ids]
    expected = sum(1 + (record.route in (CHAT_URL, COMPLETIONS_URL)) + len(phases(record)) for record in records)
    found = roots(map(received, sink.wait_for(expected)))
    assert set(found) == set(ids)
    for record in records:
        assert found[record.request_id].attributes["pellucid.outcome"] == record.outcome
        assert found[record.request_id].ended_ns - found[record.request_id].started_ns == (
            record.finished_ns - record.accepted_ns
        )
    return found


async def ends(job: Job, *, reason: FinishReason) -> None:
    """As it is told, after some tokens."""
    await job.accept()
    await job.emit([40, 41])
    await job.finish(reason, fault=Fault("internal_error", "no") if reason == "failed" else None)


async def refuses(job: Job, *, reason: FinishReason) -> None:
    """As it is told, at once."""
    await job.finish(reason, fault=Fault("internal_error", "no") if reason in ("refused", "failed") else None)


async def dies(job: Job) -> None:
    """In mid-stream."""
    await job.accept()
    await job.emit([40])
    job.hang_up()


EARLY: tuple[FinishReason, ...] = ("overloaded", "refused", "failed", "shutdown", "deadline", "abort")
LATE: tuple[FinishReason, ...] = ("stop", "length", "failed", "shutdown", "deadline", "abort")
WAYS: dict[str, Any] = {
    **{f"early-{reason}": functools.partial(refuses, reason=reason) for reason in EARLY},
    **{f"late-{reason}": functools.partial(ends, reason=reason) for reason in LATE},
    "dies": dies,
}


def test_whatever_an_engine_does(custom: Custom, sink: Collector) -> None:
    gateway, engine = custom(otlp_endpoint=sink.url, resume_deadline_s=0.0)
    ids = []
    for name, behaviour in WAYS.items():
        for stream in (False, True):
            gateway.until_ready()
            engine.behaviour = behaviour
            ids.append(f"{name}-{stream}")
            path, body = (CHAT_URL, chat(stream=stream)) if stream else (COMPLETIONS_URL, prompt())
            gateway.client.post(path, json=body, headers={"x-request-id": ids[-1]})
    found = roots_of(gateway, sink, ids)
    outcomes = {str(root.attributes["pellucid.outcome"]) for root in found.values()}
    # An engine that says "shutdown" is leaving, and there is no other.
    assert outcomes == {*EARLY, *LATE, "engine_lost", "no_healthy_engine"} - {"shutdown"}
    faults = {name for name, root in found.items() if root.attributes["pellucid.sampled_because"] == "fault"}
    assert {f"{name}-True" for name in ("late-failed", "early-failed", "dies", "early-overloaded")} <= faults


def test_clients_that_leave_and_clients_that_err(custom: Custom, sink: Collector) -> None:
    gateway, engine = custom(otlp_endpoint=sink.url)
    engine.behaviour = talk
    for stream in (False, True):
        with gateway.connect() as raw:
            raw.sendall(raw_request(chat(stream=stream), f"gone-{stream}"))
            engine.wait_for_requests(1 + stream)
            if stream:
                read_until(raw, b"FGH")
        engine.wait_for_abort(f"gone-{stream}")
    asked: dict[str, tuple[str, str, dict[str, Any]]] = {
        "invalid": ("POST", CHAT_URL, {"json": chat(temperature=-1)}),
        "broken": ("POST", CHAT_URL, {"content": b"{"}),
        "nowhere": ("GET", "/v1/nowhere", {}),
        "method": ("GET", CHAT_URL, {}),
        "model": ("GET", "/v1/models/none", {}),
        "models": ("GET", "/v1/models", {}),
        "words": ("POST", "/tokenize", {"json": {"prompt": "a"}}),
        "health": ("GET", "/health", {}),
    }
    for name, (method, path, content) in asked.items():
        gateway.client.request(method, path, headers={"x-request-id": name}, **content)
    ids = ["gone-False", "gone-True", "invalid", "broken", "nowhere", "method", "model", "models", "words"]
    found = roots_of(gateway, sink, ids)
    outcomes = {name: root.attributes["pellucid.outcome"] for name, root in found.items()}
    assert outcomes["gone-True"] == outcomes["gone-False"] == "client_gone"
    assert outcomes["invalid"] == outcomes["broken"] == "invalid"


def test_who_is_refused_at_the_door(custom: Custom, guard: Guard, sink: Collector, patient: None) -> None:
    gateway, _ = custom(otlp_endpoint=sink.url, **guard.options)
    key = guard.create(limits=Limits(requests_per_minute=1)).key
    for name, headers in {"ok": bearer(key), "much": bearer(key), "who": {}}.items():
        gateway.client.post(COMPLETIONS_URL, json=prompt(), headers={"x-request-id": name, **headers})
    found = roots_of(gateway, sink, ["ok", "much", "who"])
    outcomes = [found[name].attributes["pellucid.outcome"] for name in ("ok", "much", "who")]
    assert outcomes == ["length", "rate_limited", "unauthorized"]
    assert found["ok"].attributes["pellucid.tenant"] == "blue"


def test_an_engine_that_dies_and_another_that_goes_on(fleet: Fleet, sink: Collector) -> None:
    async def once(job: Job) -> None:
        await job.accept()
        await job.emit([40])
        first.behaviour = second.behaviour = goes_on
        job.hang_up()

    async def goes_on(job: Job) -> None:
        await job.accept()
        await job.finish("length", tokens=[41])

    first, second = fleet.fake("a"), fleet.fake("b")
    gateway = fleet.serve("ab", otlp_endpoint=sink.url)
    fleet.connected(2)
    first.behaviour = second.behaviour = once
    gateway.client.post(COMPLETIONS_URL, json=prompt(stream=True), headers={"x-request-id": "moved"})
    assert gateway.record("moved").resumes == 1
    found = roots_of(gateway, sink, ["moved"])
    spans = {span.name for span in map(received, sink.wait_for(1))}
    assert {"lost", "resume"} <= spans and len(found) == 1


def test_what_another_server_answers(upstream: ScriptedUpstream, relaying: Relaying, sink: Collector) -> None:
    gateway = relaying(upstream, gateway={"otlp_endpoint": sink.url})

    async def breaks(visit: Visit) -> None:
        await visit.begin()
        await visit.say(content="Hel")
        visit.writer.transport.abort()

    ids = ["fine", "broken"]
    gateway.client.post(CHAT_URL, json=chat(model="remote", stream=True), headers={"x-request-id": "fine"})
    upstream.behaviour = breaks
    gateway.client.post(CHAT_URL, json=chat(model="remote", stream=True), headers={"x-request-id": "broken"})
    found = roots_of(gateway, sink, ids)
    assert found["broken"].attributes["pellucid.outcome"] == "upstream_failed"
    assert found["broken"].attributes["pellucid.sampled_because"] == "fault"


def test_a_gateway_that_is_stopped(custom: Custom, sink: Collector) -> None:
    """What it still had goes to the collector before it ends."""
    gateway, engine = custom(otlp_endpoint=sink.url, drain_s=0.2)
    engine.behaviour = talk
    with gateway.connect() as raw:
        raw.sendall(raw_request(chat(stream=True), "cut"))
        read_until(raw, b"FGH")
        asyncio.run_coroutine_threadsafe(_drain(gateway), gateway.loop).result(15)
    found = roots_of(gateway, sink, ["cut"])
    assert found["cut"].attributes["pellucid.outcome"] == "draining"


async def _drain(gateway: LiveGateway) -> None:
    await gateway.application.gateway.drain()


def test_a_file_has_the_same_trees(custom: Custom, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    gateway, _ = custom(export_trace=str(path))
    for number in range(3):
        gateway.client.post(CHAT_URL, json=chat(), headers={"x-request-id": f"r{number}"})
        gateway.record(f"r{number}")
    asyncio.run_coroutine_threadsafe(gateway.hub.stop(), gateway.loop).result(15)
    assert set(roots(map(received, read_trace_file(path).spans))) == {"r0", "r1", "r2"}
