"""
Every panel and every alert on real numbers: Debian's Prometheus scrapes `pellucid serve` under a small load.

What a healthy appliance does not show is proven on the page of one that is in trouble: tests/live/scraped.py.
"""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from dashboards.alerts import ALERTS, Alert
from dashboards.board import Line
from dashboards.boards import BOARDS
from tests.live.conftest import Appliance
from tests.live.scraped import NOBODY, Prometheus, scraping, troubled_page
from tests.live.test_appliance import chat, wait_for

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus here; on Debian and Ubuntu: apt install prometheus"
)
WITHIN_S = 25.0
LINES = {
    f"{board.title} / {panel.title} / {line.legend}": line
    for board in BOARDS
    for panel in board.panels
    for line in panel.lines
}
_NO_UPSTREAMS = "it has no upstreams"
_ONE_RANK = "its engine has one rank"
NOT_HERE = {
    "Overview / Upstreams / ": _NO_UPSTREAMS,
    "Overview / Requests in their hands / ": _NO_UPSTREAMS,
    "Overview / Upstream attempts / ": _NO_UPSTREAMS,
    "Overview / Upstream tokens a second / ": _NO_UPSTREAMS,
    "Engine steps / Wait and transfer by exchange / ": _ONE_RANK,
    "Engine steps / Wait of each rank / ": _ONE_RANK,
    "Engine steps / Stragglers / ": _ONE_RANK,
    "Engine steps / Received by rank 0 / ": _ONE_RANK,
    "Engine steps / Exchanges a second / ": _ONE_RANK,
    "Tenants and limits / Charged of what was reserved / ": "it has no keys, so nothing is reserved",
}
"""Beginnings of the lines without data on a healthy appliance, and why."""
if not Path("/proc/pressure").exists():
    NOT_HERE["Engine steps / Pressure on the machine / "] = "this kernel keeps no account of pressure"
ALWAYS_ZERO = {"KV memory / Fragmentation / {{instance}} replica {{replica}}, external": "none, by construction"}
CERTAIN = (
    "PellucidEngineDown", "PellucidEngineRestarts", "PellucidWorkerSilent", "PellucidUpstreamDown",
    "PellucidLimitsServerDown", "PellucidSettlementsForgotten", "PellucidBookDoesNotClose", "PellucidTelemetryLost",
    "PellucidDegenerateOutput",
)  # fmt: skip
"""Alerts that a healthy appliance does not fire on any machine; the others depend on how busy that is."""


class Scraped(NamedTuple):
    """A Prometheus, and the instances that it knows."""

    prometheus: Prometheus
    healthy: str
    troubled: str


@pytest.fixture(scope="module")
def scraped(appliance: Appliance, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """With numbers from before and from after a small load."""
    healthy = appliance.url.removeprefix("http://")
    assert chat(appliance, "Hello.", max_tokens=4).status_code == 200  # what was never there has no rate
    folder = tmp_path_factory.mktemp("prometheus")
    with troubled_page() as troubled, scraping(folder, [healthy, troubled, NOBODY]) as prometheus:
        for instance in (healthy, troubled):
            seen = f'count_over_time(pellucid_gateway_workers{{instance="{instance}"}}[1m]) >= 2'
            wait_for(partial(prometheus.has, seen), f"{instance} is scraped", WITHIN_S)
        for turn in range(2):
            answer = chat(appliance, "Say one, two, three, one, two, three, one, two.", max_tokens=16, seed=turn)
            assert answer.status_code == 200
        yield Scraped(prometheus, healthy, troubled)


def here(line: Line, instance: str) -> str:
    return line.expr.replace("$__rate_interval", "1m").replace("$instance", instance)


def excepted(name: str, exceptions: dict[str, str]) -> bool:
    return any(name.startswith(beginning) for beginning in exceptions)


@pytest.mark.parametrize("where", ["healthy", "troubled"])
def test_every_line_of_every_panel_has_data(scraped: Scraped, where: str) -> None:
    instance = getattr(scraped, where)
    missing = set(LINES)

    def look() -> bool:
        missing.difference_update(
            name for name in sorted(missing) if scraped.prometheus.has(here(LINES[name], instance))
        )
        return missing == expected

    expected = {name for name in LINES if where == "healthy" and excepted(name, NOT_HERE)}
    with suppress(AssertionError):  # Whoever waits in vain says what it waited for when it began.
        wait_for(look, where, WITHIN_S)
    assert missing == expected, "these have no data, and those should have none"


def test_every_line_shows_something_that_is_not_zero(scraped: Scraped) -> None:
    """A panel that is empty in trouble is no panel: each is above zero on one appliance or the other."""
    flat = set(LINES)

    def look() -> bool:
        either = f"{scraped.healthy}|{scraped.troubled}"
        shown = {name: scraped.prometheus.values(here(LINES[name], either)) for name in sorted(flat)}
        flat.difference_update(name for name, values in shown.items() if any(values))
        return flat == {name for name in LINES if excepted(name, ALWAYS_ZERO)}

    with suppress(AssertionError):
        wait_for(look, "above zero", WITHIN_S)
    assert flat == {name for name in LINES if excepted(name, ALWAYS_ZERO)}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_would_fire_in_trouble(scraped: Scraped, alert: Alert) -> None:
    wait_for(lambda: scraped.prometheus.has(alert.expr), f"{alert.name}: {alert.expr}", WITHIN_S)


@pytest.mark.parametrize("name", CERTAIN)
def test_a_healthy_appliance_wakes_nobody(scraped: Scraped, name: str) -> None:
    [alert] = [alert for alert in ALERTS if alert.name == name]
    here_only = f'({alert.expr}) and on (instance) pellucid_gateway_workers{{instance="{scraped.healthy}"}}'
    assert not scraped.prometheus.has(here_only)


def test_the_alerts_that_wait_for_nothing_are_firing(scraped: Scraped) -> None:
    """The rules are evaluated by Prometheus itself, not by us alone."""
    at_once = {alert.name for alert in ALERTS if alert.lasting == "0s"}
    assert len(at_once) >= 8

    def firing() -> set[str]:
        answer = scraped.prometheus.http.get("/api/v1/alerts").json()
        return {one["labels"]["alertname"] for one in answer["data"]["alerts"] if one["state"] == "firing"}

    wait_for(lambda: at_once <= firing(), f"firing: {sorted(at_once)}", WITHIN_S)
    rules = scraped.prometheus.http.get("/api/v1/rules").json()["data"]["groups"]
    assert [rule["lastError"] for group in rules for rule in group["rules"] if rule.get("lastError")] == []
