"""What an outage of the server for keys and limits changes."""

import pytest

from cache.accounts import Limits
from cache.limits import WORKERS_KEY
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
    health, ready = (pair[0].client.get(path) for path in ("/health", "/ready"))
    assert (health.status_code, ready.status_code) == (200, 200)
    assert health.json()["status"] == "degraded" and "does not answer" in health.json()["degraded"]
    assert "503" in ready.json()["degraded"] == health.json()["degraded"]
    for key in ("none", issued.key):
        answer = ask(pair, key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "keys_unavailable")
        assert answer.headers["retry-after"] == "1"
    if why == "pepper":
        guard.server.restart()
        until(lambda: ask(pair, issued.key).status_code == 200, "it does not come back")
        assert ask(pair, "none").status_code == 401
        assert pair[0].client.get("/ready").json()["degraded"] is None


def test_a_server_that_has_lost_the_keys_lets_nobody_in(guard: Guard, custom: Custom) -> None:
    """Also where the gateway began afterwards: a pepper is made with the first key."""
    issued = guard.create(limits=ALL)
    guard.server.ask("FLUSHALL")
    pair = custom(**guard.options)
    for key in ("none", issued.key):
        assert ask(pair, key).status_code == 401
    assert ask(pair, guard.create(limits=ALL).key).status_code == 200


def test_a_gateway_that_is_cut_off_forgets_that_there_were_no_keys(
    guard: Guard, custom: Custom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may have made the first one meanwhile, on another machine."""
    pair = custom(**guard.options, redis_named=True)
    assert ask(pair, "none").status_code == 200
    guard.server.kill()
    assert {ask(pair, "none").status_code for _ in range(10)} == {200}
    monkeypatch.setattr("gateway.admission.STALE_S", 0.01)
    until(lambda: ask(pair, "none").status_code == 503, "everybody is served for ever")

    def said() -> bool:
        ask(pair, "none")  # some must have failed before the breaker opens
        return "503" in (pair[0].client.get("/health").json()["degraded"] or "")

    until(said, "it is not said")


def test_keys_without_their_pepper(guard: Guard, custom: Custom) -> None:
    issued = guard.create()
    pepper = guard.pepper_file.read_bytes()
    guard.pepper_file.unlink()
    pair = custom(**guard.options)
    for _ in range(3):
        assert ask(pair, issued.key).status_code == 503
    assert "pepper" in pair[0].client.get("/ready").json()["degraded"]
    guard.pepper_file.write_bytes(pepper)
    guard.pepper_file.chmod(0o644)
    assert ask(pair, issued.key).status_code == 503
    guard.pepper_file.chmod(0o600)
    assert ask(pair, issued.key).status_code == 200
    assert pair[0].client.get("/health").json()["status"] == "ok"


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


def test_one_gateway_of_two_grants_its_share(guard: Guard, custom: Custom) -> None:
    """7 requests a minute are 4 and 3; what the server has granted before is the server's."""
    for_long_us = "9000000000000000"
    guard.server.ask("ZADD", WORKERS_KEY, for_long_us, "z")  # another one, whose name comes later
    pair = custom(**guard.options)
    issued = guard.create(limits=Limits(requests_per_minute=7))
    assert ask(pair, issued.key).status_code == 200
    guard.server.kill()
    answers = [ask(pair, issued.key) for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 4 + [429] * 2
    assert {answer.headers["x-pellucid-degraded"] for answer in answers[:4]} == {"limits"}


def test_a_tenant_that_is_not_to_be_served_without_limits(guarded: Pair, guard: Guard) -> None:
    guard.change_tenant("blue", policy="closed")
    issued = guard.create(limits=ALL)
    assert ask(guarded, issued.key).status_code == 200
    guard.server.kill()
    answer = ask(guarded, issued.key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "limits_unavailable")
