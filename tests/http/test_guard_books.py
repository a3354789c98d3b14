"""What a day may cost, and what /metrics says of limits and their server."""

import pytest

from cache.accounts import Limits
from tests.contract.telemetry.test_metrics import read, total
from tests.http.asking import COMPLETIONS_URL, Pair, prompt
from tests.http.conftest import Custom
from tests.http.guard import Guard, ask, bearer, until
from tests.http.test_guard import ALL
from tests.http.test_lifecycle import silent

PRICES = {"price_prompt_micros": 2_000_000, "price_output_micros": 10_000_000}  # 2 and 10 a token, in micros


def test_a_day_may_cost_so_much_and_no_more(guard: Guard, custom: Custom) -> None:
    """2 tokens of prompt and 3 of output cost 34 micros; reserved are 12 of output, together 124."""
    pair = custom(**guard.options, **PRICES)
    issued = guard.create(limits=Limits(spend_micros_per_day=160))
    for spent in (34, 68):
        answer = ask(pair, issued.key)
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 3)
        assert pair[0].record(answer.headers["x-request-id"]).charged_micros == 34
        state = guard.server.ask("GET", f"pellucid:{{default}}:limits:key:{issued.key_id}").split(b"\r\n")[1].split()
        assert int(state[6]) == spent
    refused = ask(pair, issued.key)  # 68 + 124 is too much for today
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert "0.00016 per day" in refused.json()["error"]["message"] and "today" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false" and 0 < int(refused.headers["retry-after"]) <= 86_400
    assert ask(pair, issued.key, max_tokens=3).status_code == 200
    never = ask(pair, issued.key, max_tokens=100)
    assert "never" in never.json()["error"]["message"] and "retry-after" not in never.headers


def test_a_small_allowance_serves_who_names_no_maximum(guard: Guard, custom: Custom) -> None:
    """As a small bucket does: else it could never ask."""
    pair = custom(**guard.options, **PRICES)
    issued = guard.create(limits=Limits(spend_micros_per_day=1000))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    assert pair[0].client.post("/v1/chat/completions", json=body, headers=bearer(issued.key)).status_code == 200


def test_a_spend_limit_without_prices_is_said_to_limit_nothing(
    guard: Guard, custom: Custom, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("gateway.admission._log.warning", said.append)
    pair = custom(**guard.options)
    issued = guard.create(limits=Limits(spend_micros_per_day=1))
    assert [ask(pair, issued.key).status_code for _ in range(3)] == [200] * 3
    assert len(said) == 1 and "--price-prompt" in said[0]


def test_what_metrics_say_of_the_limits(guarded: Pair, guard: Guard) -> None:
    client = guarded[0].client
    issued = guard.create(limits=Limits(requests_per_minute=2, tokens_per_minute=6000))

    def numbers() -> dict[str, float]:
        series = read(client.get("/metrics").content)
        assert total(series, "pellucid_book_mismatches_total") == 0
        names = {name.removeprefix("pellucid_") for name, _ in series if "_limit_" in name or "_redis_" in name}
        found = {name: total(series, f"pellucid_{name}") for name in names}
        for stage in ("reserved", "charged"):
            found[stage] = total(series, "pellucid_limit_tokens_total", stage=stage)
        found["refused"] = total(series, "pellucid_limit_refusals_total", level="key", limit="requests")
        return found

    used = sum(ask(guarded, issued.key).json()["usage"]["total_tokens"] for _ in range(2))
    assert [ask(guarded, issued.key).status_code for _ in range(3)] == [429] * 3
    now = numbers()
    assert (now["reserved"], now["charged"], now["refused"]) == (2 * (2 + 12), used, 3)
    assert (now["redis_up"], now["limit_workers"], now["limit_reservations_held"], now["limit_settlements_owed"]) == (
        1, 1, 0, 0,
    )  # fmt: skip
    guarded[1].behaviour = silent
    fresh = guard.create(limits=ALL)
    with client.stream("POST", COMPLETIONS_URL, json=prompt(stream=True), headers=bearer(fresh.key)):
        assert numbers()["limit_reservations_held"] == 1
        guard.server.freeze()
    until(lambda: numbers()["limit_settlements_owed"] == 1, "the debt is not shown")
    until(lambda: ask(guarded, "none").status_code == 503 and numbers()["redis_up"] == 0, "the outage is not shown")
    assert numbers()["redis_commands_failed_total"] >= 5 and numbers()["redis_breaker_openings_total"] == 1
    guard.server.thaw()
    until(lambda: numbers()["limit_settlements_owed"] == 0, "the debt is not paid")
    now = numbers()
    assert (now["redis_up"], now["limit_reservations_held"], now["limit_settlements_forgotten_total"]) == (1, 0, 0)
