"""What an outage of the server for keys and limits changes."""

import pytest

from cache.accounts import Limits
from cache.key_records import Tenant
from tests.http.asking import COMPLETIONS_URL, Pair, prompt
from tests.http.conftest import Custom
from tests.http.guard import Guard, ask, bearer, until
from tests.http.test_lifecycle import talk

ALL = Limits(requests_per_minute=600, tokens_per_minute=600, concurrent=5)


def test_without_its_server_from_the_start_it_serves_while_there_are_no_keys(guard: Guard, custom: Custom) -> None:
    guard.server.kill()
    pair = custom(**guard.options)
    answer = ask(pair, "none")
    assert (answer.status_code, answer.headers["x-pellucid-degraded"]) == (200, "limits")
    assert pair[0].client.get("/health").json()["status"] == "degraded"
    assert pair[0].client.get("/ready").status_code == 200
    guard.server.restart()
    until(lambda: pair[0].client.get("/health").json()["status"] == "ok", "it does not come back")
    guard.create()
    assert ask(pair, "none").status_code == 401


@pytest.mark.parametrize("why", ["pepper", "named"])
def test_without_its_server_from_the_start_nobody_is_let_in_where_keys_may_be(
    guard: Guard, custom: Custom, why: str
) -> None:
    issued = guard.create(limits=ALL)
    if why == "named":
        guard.pepper_file.unlink()
    guard.server.kill()
    pair = custom(**guard.options, redis_named=why == "named")
    for key in ("none", issued.key):
        answer = ask(pair, key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "keys_unavailable")
        assert answer.headers["retry-after"] == "1"
    if why == "pepper":
        guard.server.restart()
        until(lambda: ask(pair, issued.key).status_code == 200, "it does not come back")
        assert ask(pair, "none").status_code == 401


def test_a_server_that_freezes_in_the_middle(guarded: Pair, guard: Guard) -> None:
    issued = guard.create(limits=ALL)
    assert ask(guarded, issued.key).status_code == 200
    guard.server.freeze()
    answers = [ask(guarded, issued.key) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-pellucid-degraded"] for answer in answers} == {"limits"}
    assert guarded[0].client.get("/health").json()["status"] == "degraded"
    guard.server.thaw()
    until(lambda: guarded[0].client.get("/health").json()["status"] == "ok", "it does not come back")
    last = ask(guarded, issued.key)
    assert last.status_code == 200 and "x-pellucid-degraded" not in last.headers
    until(lambda: guard.reservations() == 0, "something is not settled")
    assert guard.running(issued.key_id) == 0


def test_a_server_that_freezes_while_a_stream_runs_is_paid_later(guarded: Pair, guard: Guard) -> None:
    issued = guard.create(limits=ALL)
    guarded[1].behaviour = talk
    with guarded[0].client.stream("POST", COMPLETIONS_URL, json=prompt(stream=True), headers=bearer(issued.key)) as one:
        assert guard.reservations() == 1
        guard.server.freeze()
        one.close()
    guarded[0].record(one.headers["x-request-id"])
    guard.server.thaw()
    until(lambda: guard.reservations() == 0, "it is not paid")
    assert guard.running(issued.key_id) == 0


def test_a_tenant_that_is_not_to_be_served_without_limits(guarded: Pair, guard: Guard) -> None:
    guard.put_tenant(Tenant(name="blue", policy="closed"))
    issued = guard.create(limits=ALL)
    assert ask(guarded, issued.key).status_code == 200
    guard.server.kill()
    answer = ask(guarded, issued.key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "limits_unavailable")
