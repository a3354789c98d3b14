"""Keys and limits over real sockets, on a real Valkey: who is let in, and what is charged."""

import contextlib
import functools
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from cache.accounts import Limits
from cache.limits import Limiter
from engine.api import Fault
from gateway.__main__ import main
from gateway.admission import Ticket
from gateway.refusals import duration
from telemetry.books import request_mismatches
from telemetry.records import RequestRecord
from tests.http.asking import COMPLETIONS_URL, Pair, prompt, raw_request, read_until
from tests.http.conftest import Custom, options_for
from tests.http.fake_engine import Job, greet_and_stop
from tests.http.guard import Guard, ask, bearer, sdk, until
from tests.http.test_lifecycle import silent, talk

pytestmark = pytest.mark.usefixtures("patient")

REQUESTS, TOKENS = 6, 600  # so few that what time gives back while a test runs is less than one
ALL = Limits(requests_per_minute=REQUESTS, tokens_per_minute=TOKENS, concurrent=5)
OPEN = ("/health", "/ready", "/metrics", "/openapi.json")
CLOSED = (
    "/v1/models",
    "/v1/models/tiny",
    "/debug/requests",
    "/debug/requests/x",
    "/debug/steps",
    "/debug/kv",
    "/debug/live",
)


# ---- who


def test_without_keys_all_may_come_and_any_key_will_do(guarded: Pair) -> None:
    answer = ask(guarded, "none")
    assert answer.status_code == 200
    assert "x-pellucid-degraded" not in answer.headers and "x-ratelimit-limit-tokens" not in answer.headers


def test_the_first_key_closes_the_door(guarded: Pair, guard: Guard) -> None:
    assert ask(guarded, "none").status_code == 200
    issued = guard.create()
    assert ask(guarded, issued.key).status_code == 200  # at once, whatever was known before
    assert ask(guarded, "none").status_code == 401


def test_every_reason_for_a_refusal_looks_alike(guarded: Pair, guard: Guard) -> None:
    good, revoked = guard.create(), guard.create()
    expired = guard.create(ago_s=3600, expires_s=int(time.time()) - 60)
    guard.revoke(revoked.key_id)
    unknown = "pk-" + "0" * 15 + "1-" + "a" * 48
    wrong = good.key[:-1] + ("0" if good.key[-1] != "0" else "1")
    origin = {"origin": "http://browser"}
    answers = [
        guarded[0].client.post(COMPLETIONS_URL, json=prompt(), headers=origin | headers)
        for headers in (
            {},
            {"authorization": "Basic eDp5"},
            {"authorization": "Bearer"},
            *(bearer(key) for key in ("nonsense", unknown, wrong, revoked.key, expired.key)),
            {"x-api-key": unknown},
        )
    ]
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.text for answer in answers}) == 1
    assert {answer.headers["access-control-allow-origin"] for answer in answers} == {"*"}
    error = answers[0].json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    with pytest.raises(openai.AuthenticationError):
        sdk(guarded, unknown).models.list()
    record = guarded[0].record(answers[0].headers["x-request-id"])
    assert (record.outcome, record.status, record.tenant) == ("unauthorized", 401, "")


def test_the_rest_of_a_refused_body_is_not_waited_for_on_account_of_the_keys(guarded: Pair, guard: Guard) -> None:
    guard.create()
    with guarded[0].connect() as raw:
        sent = raw_request(prompt(), "no-key", COMPLETIONS_URL)
        raw.sendall(sent[:-1])
        until(lambda: "no-key" in guarded[0].application.front.open, "it is not there")
        time.sleep(0.3)  # what is waited for
        raw.sendall(sent[-1:])
        assert read_until(raw, b'"error"').startswith(b"HTTP/1.1 401")
    record = guarded[0].record("no-key")
    assert record.states["parse"] > 200_000_000 > record.states["auth"]


def test_what_needs_a_key(guarded: Pair, guard: Guard) -> None:
    issued = guard.create()
    client = guarded[0].client
    assert [client.get(path).status_code for path in OPEN] == [200] * len(OPEN)
    assert [client.get(path).status_code for path in CLOSED] == [401] * len(CLOSED)
    assert [client.get(path, headers={"x-api-key": issued.key}).status_code for path in CLOSED[:3]] == [200] * 3
    ask_first = {"origin": "http://b", "access-control-request-method": "POST"}
    assert client.options(COMPLETIONS_URL, headers=ask_first).status_code == 204
    assert [client.post(path, json={}).status_code for path in ("/tokenize", "/detokenize")] == [401, 401]
    assert sdk(guarded, issued.key).models.list().data[0].id == "tiny"
    guard.server.kill()  # an unknown URL is refused to all alike, before anybody looks at a key
    assert [client.get("/nothing").status_code, client.delete("/v1/models").status_code] == [404, 405]


def test_a_key_for_other_models(guarded: Pair, guard: Guard) -> None:
    issued = guard.create(models=("another",))
    with pytest.raises(openai.PermissionDeniedError) as caught:
        sdk(guarded, issued.key).completions.create(model="tiny", prompt="Hello")
    assert (caught.value.code, caught.value.type, caught.value.param) == (
        "model_not_allowed",
        "permission_error",
        "model",
    )
    assert ask(guarded, issued.key, model="absent").status_code == 404


@pytest.mark.parametrize(
    ("own", "tier", "priority"),
    [
        ("normal", None, 0),
        ("high", None, -1),
        ("low", None, 1),
        ("normal", "priority", 0),
        ("high", "flex", 1),
        ("high", "priority", -1),
        ("low", "priority", 1),
    ],
)
def test_the_engine_knows_tenant_and_priority(
    guarded: Pair, guard: Guard, own: str, tier: str | None, priority: int
) -> None:
    issued = guard.create(tenant="green", priority=own)
    answer = ask(guarded, issued.key, **({"service_tier": tier} if tier else {}))
    request = guarded[1].requests[-1]
    assert (request.tenant, request.priority) == ("green", priority)
    assert guarded[0].record(answer.headers["x-request-id"]).tenant == "green"


def test_the_engine_knows_whose_turn_it_is_by_the_key(guarded: Pair, guard: Guard) -> None:
    for weight in (1, 7):
        issued = guard.create(tenant="green", weight=weight)
        ask(guarded, issued.key)
        request = guarded[1].requests[-1]
        assert (request.share, request.weight) == (issued.key_id, weight)


def test_tenants_do_not_see_each_other(guarded: Pair, guard: Guard) -> None:
    client = guarded[0].client
    keys = {tenant: guard.create(tenant=tenant).key for tenant in ("green", "blue")}
    ids = {tenant: ask(guarded, key).headers["x-request-id"] for tenant, key in keys.items()}
    for tenant, key in keys.items():
        seen = client.get("/debug/requests", headers=bearer(key)).json()["requests"]
        assert [one["request_id"] for one in seen] == [ids[tenant]]
        found = {other: client.get(f"/debug/requests/{ids[other]}", headers=bearer(key)).status_code for other in ids}
        assert found == {other: 200 if other == tenant else 404 for other in ids}
        for path in ("/debug/steps", "/debug/kv", "/metrics"):  # numbers of the engine, for everybody
            shown = client.get(path, headers=bearer(key)).text
            assert not any(name in shown for other in ids for name in (ids[other], other))


# ---- how much


def test_more_requests_than_allowed(guarded: Pair, guard: Guard) -> None:
    issued = guard.create(limits=Limits(requests_per_minute=1, tokens_per_minute=6000))
    first = ask(guarded, issued.key)
    assert first.status_code == 200
    assert (first.headers["x-ratelimit-limit-requests"], first.headers["x-ratelimit-remaining-requests"]) == ("1", "0")
    assert first.headers["x-ratelimit-reset-requests"] in ("1m0s", "60s")
    assert first.headers["x-ratelimit-limit-tokens"] == "6000"
    before = len(guarded[1].requests)
    with pytest.raises(openai.RateLimitError) as caught:
        sdk(guarded, issued.key).completions.create(model="tiny", prompt="Hello", max_tokens=4)
    headers = caught.value.response.headers
    assert (caught.value.type, caught.value.code) == ("requests", "rate_limit_exceeded")
    assert 0 < int(headers["retry-after-ms"]) <= 60_000
    assert int(headers["retry-after"]) == -(-int(headers["retry-after-ms"]) // 1000)
    assert headers["x-ratelimit-remaining-requests"] == "0" and "x-should-retry" not in headers
    assert len(guarded[1].requests) == before
    assert guarded[0].record(headers["x-request-id"]).outcome == "rate_limited"


@pytest.mark.parametrize("limits", [Limits(tokens_per_minute=10), Limits(requests_per_minute=0), Limits(concurrent=0)])
def test_what_can_never_succeed_is_not_tried_again(guarded: Pair, guard: Guard, limits: Limits) -> None:
    issued = guard.create(limits=limits)
    answer = ask(guarded, issued.key, max_tokens=100)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")
    assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers
    assert guard.reservations() == 0


def test_a_small_key_that_names_no_maximum_is_served(guarded: Pair, guard: Guard) -> None:
    issued = guard.create(limits=Limits(tokens_per_minute=200))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    assert guarded[0].client.post("/v1/chat/completions", json=body, headers=bearer(issued.key)).status_code == 200


def settled(guard: Guard, key_id: str, began_s: float, *, requests: int, tokens: int) -> None:
    """The book: so much is charged, and nothing is held any more."""
    assert (guard.reservations(), guard.running(key_id)) == (0, 0)
    left = guard.left(key_id)
    for limit, held, used in zip((REQUESTS, TOKENS), left, (requests, tokens), strict=True):
        refilled = Fraction(time.monotonic() - began_s) * limit / 60
        assert limit - used <= held <= limit - used + refilled, (left, requests, tokens)


@pytest.fixture
def settled_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left for after the answer is never settled: else a test that looks a moment late sees no difference."""

    async def close(_ticket: Ticket, _record: RequestRecord) -> None:
        return

    monkeypatch.setattr(Ticket, "close", close)


@pytest.mark.usefixtures("settled_before_the_answer")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choices", [1, 3])
def test_what_is_charged_is_what_the_usage_says(guarded: Pair, guard: Guard, stream: bool, choices: int) -> None:
    issued = guard.create(limits=ALL)
    began_s = time.monotonic()
    more: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = ask(guarded, issued.key, n=choices, **more)
    text = answer.text.split("\n\n")[-3].removeprefix("data: ") if stream else answer.text
    usage = msgspec.json.decode(text)["usage"]
    settled(guard, issued.key_id, began_s, requests=1, tokens=usage["total_tokens"])
    record = guarded[0].record(answer.headers["x-request-id"])
    settled(guard, issued.key_id, began_s, requests=1, tokens=usage["total_tokens"])
    assert (record.reserved_tokens, record.charged_tokens) == (
        len(guarded[1].requests[0].prompt) + 12 * choices,
        usage["total_tokens"],
    )
    assert list(request_mismatches(record)) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("behave", "output"), [(silent, 0), (talk, 3)], ids=["computing", "talking"])
def test_who_leaves_pays_for_what_was_computed(
    guarded: Pair, guard: Guard, stream: bool, behave: Any, output: int
) -> None:
    gateway, engine = guarded
    engine.behaviour = behave
    issued = guard.create(limits=ALL)
    began_s = time.monotonic()
    raw_bytes = raw_request(prompt(stream=stream, max_tokens=100), "gone", COMPLETIONS_URL)
    with gateway.connect() as raw:
        raw.sendall(raw_bytes.replace(b"host: x\r\n", f"host: x\r\nx-api-key: {issued.key}\r\n".encode()))
        engine.wait_for_requests(1)
        until(lambda: guard.reservations() == 1, "nothing is reserved")
        assert guard.running(issued.key_id) == 1
        if stream and output:
            read_until(raw, b"FGH")
        elif output:
            until(lambda: gateway.application.front.open["gone"].live.output_tokens == 3, "no tokens come")
    record = gateway.record("gone")
    assert record.outcome == "client_gone"
    tokens = len(engine.requests[0].prompt) + output
    settled(guard, issued.key_id, began_s, requests=1, tokens=tokens)
    assert record.charged_tokens == tokens and list(request_mismatches(record)) == []


async def fails(job: Job) -> None:
    await job.finish("failed", fault=Fault("internal", "x"))


async def fails_later(job: Job) -> None:
    await job.accept()
    await job.emit([40, 41])
    await job.finish("failed", fault=Fault("internal", "x"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("behave", "charged"), [(fails, False), (fails_later, True)], ids=["before", "after"])
def test_failures_before_the_first_token_are_free(
    guarded: Pair, guard: Guard, stream: bool, behave: Any, charged: bool
) -> None:
    guarded[1].behaviour = behave
    issued = guard.create(limits=ALL)
    began_s = time.monotonic()
    answer = ask(guarded, issued.key, stream=stream)
    assert answer.status_code == 500 or (stream and charged)  # how far a stream has come by then is chance
    tokens = len(guarded[1].requests[0].prompt) + 2 if charged else 0
    record = guarded[0].record(answer.headers["x-request-id"])
    assert record.charged_tokens == tokens and list(request_mismatches(record)) == []
    settled(guard, issued.key_id, began_s, requests=int(charged), tokens=tokens)


@pytest.mark.parametrize("body", [{"max_tokens": 10_000}, {"temperature": 9}, {"nonsense": 1}])
def test_what_is_refused_as_invalid_costs_nothing(guarded: Pair, guard: Guard, body: dict[str, object]) -> None:
    issued = guard.create(limits=ALL)
    assert ask(guarded, issued.key, **body).status_code == 400
    assert guard.server.ask("EXISTS", f"pellucid:{{default}}:limits:key:{issued.key_id}") == b":0\r\n"


@pytest.mark.usefixtures("settled_before_the_answer")
def test_one_after_the_other_never_meets_the_limit_of_one(guarded: Pair, guard: Guard) -> None:
    issued = guard.create(limits=Limits(concurrent=1))
    client = sdk(guarded, issued.key)
    for number in range(10):
        guarded[1].behaviour = fails if number % 3 == 2 else greet_and_stop
        with contextlib.suppress(openai.InternalServerError):
            if number % 3:
                client.completions.create(model="tiny", prompt="Hello", max_tokens=4)
            else:
                for _ in client.completions.create(model="tiny", prompt="Hello", max_tokens=4, stream=True):
                    pass


def test_more_at_the_same_time_than_allowed(guarded: Pair, guard: Guard) -> None:
    gateway, engine = guarded
    engine.behaviour = silent
    issued = guard.create(limits=Limits(concurrent=1))
    with gateway.client.stream("POST", COMPLETIONS_URL, json=prompt(stream=True), headers=bearer(issued.key)):
        refused = ask(guarded, issued.key)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "requests")
    assert 0 < int(refused.headers["retry-after-ms"]) <= 1000
    until(lambda: guard.running(issued.key_id) == 0, "the slot is not freed")


def test_leases_are_renewed_while_the_engine_says_nothing(
    guard: Guard, custom: Custom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.admission.Limiter", functools.partial(Limiter, renew_s=0.05))
    pair = custom(**guard.options)
    pair[1].behaviour = silent
    issued = guard.create(limits=Limits(concurrent=1))
    name = f"pellucid:{{default}}:leases:key:{issued.key_id}"

    def score() -> float:
        words = guard.server.ask("ZRANGE", name, "0", "-1", "WITHSCORES").split(b"\r\n")
        return float(words[4]) if len(words) > 5 else 0.0

    with pair[0].client.stream("POST", COMPLETIONS_URL, json=prompt(stream=True), headers=bearer(issued.key)):
        first = score()
        assert first > 0
        until(lambda: score() > first, "the lease is not renewed")


@pytest.mark.parametrize(
    ("wait_ms", "text"),
    [(None, ""), (0, "0ms"), (12, "12ms"), (1000, "1s"), (1001, "2s"), (360_000, "6m0s"), (3_600_000, "1h0m0s")],
)
def test_durations(wait_ms: int | None, text: str) -> None:
    assert duration(wait_ms) == text


def test_the_process_takes_the_url_from_its_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_dir: Path
) -> None:
    monkeypatch.setenv("PELLUCID_REDIS_URL", "redis//:secret@h")
    options = msgspec.json.encode(msgspec.structs.replace(options_for(model_dir, "/nowhere"), port=0)).decode()
    assert main(["--options", options]) == 2
    said = capsys.readouterr().err
    assert "gateway: --redis-url: it begins with one of" in said and "secret" not in said
