"""Recording rules and alerts: promtool reads them, and each alert fires where it should and nowhere else."""
# long: one table of what makes each alert fire.

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]  # it brings no types

from dashboards.alerts import ALERTS, LAG_S
from dashboards.boards import BOARDS
from dashboards.files import alert_rules, render
from dashboards.objectives import FAST, OBJECTIVES, SLOW, WINDOWS
from dashboards.promql import Scope, check
from launch.options import OPTIONS
from telemetry.catalogue import CATALOGUE
from telemetry.vocabulary import FAULTS, OUTCOMES

NEEDS_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here; on Debian and Ubuntu: apt install prometheus"
)
GROUPS = [*(f"pellucid-{objective.slo}" for objective in OBJECTIVES), "pellucid-alerts"]
"""Recorded first: with long intervals what was recorded the time before is too old."""
CHAT = "/v1/chat/completions"
ONE = Scope("", 'job="pellucid", instance="a:1"')
Series = dict[str, str]


def one(name: str, **labels: str) -> str:
    """A series of one appliance, which the catalogue knows."""
    series = ONE.select(name, **labels)
    check(series)
    return series


class Case(NamedTuple):
    """What makes an alert fire, and what does not."""

    fires: Series
    silent: tuple[Series, ...]
    at: str = "20m"
    interval: str = "1m"
    also: tuple[str, ...] = ()
    """Alerts that fire with it."""


def first(good: int, every: int, minutes: int = 70) -> Series:
    name = "pellucid_request_time_to_first_token_seconds"
    return {
        one(f"{name}_bucket", route=CHAT, le="2.0"): f"0+{good}x{minutes}",
        one(f"{name}_count", route=CHAT): f"0+{every}x{minutes}",
    }


def gap(good: int, every: int, minutes: int = 70) -> Series:
    name = "pellucid_request_time_per_output_token_seconds"
    return {
        one(f"{name}_bucket", route=CHAT, le="0.2"): f"0+{good}x{minutes}",
        one(f"{name}_count", route=CHAT): f"0+{every}x{minutes}",
    }


def ended(fine: int, other: int, outcome: str, status_class: str, minutes: int = 70) -> Series:
    name = "pellucid_requests_total"
    return {
        one(name, route=CHAT, outcome="stop", status_class="2xx"): f"0+{fine}x{minutes}",
        one(name, route=CHAT, outcome=outcome, status_class=status_class): f"0+{other}x{minutes}",
    }


def states(**seconds: int) -> Series:
    return {
        one("pellucid_request_state_seconds_total", state=state): f"0+{spent}x30" for state, spent in seconds.items()
    }


def rows(**computed: int) -> Series:
    return {one("pellucid_engine_tokens_total", replica="0", work=work): f"0+{n}x30" for work, n in computed.items()}


def parts(**seconds: int) -> Series:
    name = "pellucid_engine_step_part_seconds_total"
    return {one(name, replica="0", part=part): f"0+{spent}x30" for part, spent in seconds.items()}


def lag(in_time: int, every: int) -> Series:
    name = "pellucid_event_loop_lag_seconds"
    return {one(f"{name}_bucket", le=str(LAG_S)): f"0+{in_time}x30", one(f"{name}_count"): f"0+{every}x30"}


def attempts(**results: int) -> Series:
    name = "pellucid_upstream_attempts_total"
    return {one(name, upstream="far", result=result): f"0+{n}x30" for result, n in results.items()}


def counted(name: str, values: str, **labels: str) -> Series:
    return {one(name, **labels): values}


CASES = {
    "PellucidTimeToFirstTokenBurnsFast": Case(
        first(80, 100),
        (first(99, 100), {**first(0, 0), one("pellucid_engine_up", replica="0"): "1x70"}, first(100, 100)),
        at="66m",
        interval="2m",
        also=("PellucidTimeToFirstTokenBurnsSlowly",),
    ),
    "PellucidTimePerOutputTokenBurnsFast": Case(
        gap(80, 100), (gap(99, 100),), at="66m", interval="2m", also=("PellucidTimePerOutputTokenBurnsSlowly",)
    ),
    "PellucidErrorsBurnsFast": Case(
        ended(95, 5, "failed", "2xx"),
        (
            ended(95, 5, "invalid", "4xx"),
            ended(95, 5, "timeout", "4xx"),
            ended(95, 5, "client_gone", "4xx"),
            ended(100, 0, "failed", "5xx"),
        ),
        at="66m",
        interval="2m",
        also=("PellucidErrorsBurnsSlowly",),
    ),
    "PellucidTimeToFirstTokenBurnsSlowly": Case(first(98, 100, 20), (first(991, 1000, 20),), at="8h", interval="30m"),
    "PellucidTimePerOutputTokenBurnsSlowly": Case(gap(98, 100, 20), (gap(991, 1000, 20),), at="8h", interval="30m"),
    "PellucidErrorsBurnsSlowly": Case(
        ended(998, 2, "engine_lost", "5xx", 20), (ended(9995, 5, "engine_lost", "5xx", 20),), at="8h", interval="30m"
    ),
    "PellucidWaitingForKv": Case(
        states(queue_kv_full=2, decode=8), (states(queue_kv_full=1, queue_batch_full=8, decode=8), states(decode=0))
    ),
    "PellucidPreemptionThrash": Case(
        rows(recompute=20, decode=50, prefill=30),
        (rows(recompute=5, decode=50, prefill=50), rows(recompute=0, decode=0)),
    ),
    "PellucidStalled": Case(
        states(stalled=4, decode=5, prefill=1),
        (states(stalled=2, decode=8), states(stalled=4, queue_batch_full=3, decode=12)),
    ),
    "PellucidInterconnectWait": Case(
        parts(interconnect_wait=3, compute=7, idle=50),
        (parts(interconnect_wait=1, compute=7, idle=0), parts(interconnect_wait=0, compute=0, idle=60)),
    ),
    "PellucidEventLoopLag": Case(lag(970, 1000), (lag(995, 1000), lag(0, 0))),
    "PellucidUnreachable": Case({one("up"): "1x5 0x20"}, ({one("up"): "1x19 0 1x5"}, {one("up"): "1x30"})),
    "PellucidEngineDown": Case(
        counted("pellucid_engine_up", "1x5 0x20", replica="1") | counted("pellucid_engine_up", "1x30", replica="0"),
        (counted("pellucid_engine_up", "1x19 0 1x5", replica="1"), counted("pellucid_engine_up", "1x30", replica="0")),
    ),
    "PellucidEngineRestarts": Case(
        counted("pellucid_engine_restarts_total", "0x4 1x4 2x4 3x4 4x20", replica="0"),
        (counted("pellucid_engine_restarts_total", "0x10 1x20", replica="0"),),
    ),
    "PellucidWorkerSilent": Case(
        counted("pellucid_gateway_workers_silent", "0x5 1x20"),
        (counted("pellucid_gateway_workers_silent", "0x19 1 0x5"),),
    ),
    "PellucidUpstreamDown": Case(
        counted("pellucid_upstream_up", "1x5 0x20", upstream="far"),
        (counted("pellucid_upstream_up", "1x18 0x1 1x5", upstream="far"),),
    ),
    "PellucidUpstreamFailing": Case(
        attempts(failed=2, complete=8), (attempts(failed=0, refused=5, complete=5), attempts(failed=1, complete=19))
    ),
    "PellucidLimitsServerDown": Case(
        counted("pellucid_redis_up", "1x5 0x20"), (counted("pellucid_redis_up", "1x19 0 1x5"), {one("up"): "1x30"})
    ),
    "PellucidSettlementsForgotten": Case(
        counted("pellucid_limit_settlements_forgotten_total", "0x15 3x10"),
        (counted("pellucid_limit_settlements_forgotten_total", "0x30"),),
    ),
    "PellucidBookDoesNotClose": Case(
        counted("pellucid_book_mismatches_total", "0x15 1x10", book="kv"),
        (
            counted("pellucid_book_mismatches_total", "0x30", book="kv"),
            counted("pellucid_book_mismatches_total", "7x30", book="kv"),
        ),
    ),
    "PellucidTelemetryLost": Case(
        counted("pellucid_telemetry_drops_total", "0x15 1x10", reason="spans_queue_full"),
        (counted("pellucid_telemetry_drops_total", "5x30", reason="spans_queue_full"),),
    ),
    "PellucidDegenerateOutput": Case(
        counted("pellucid_degenerate_outputs_total", "0x15 1x10", kind="flat"),
        (counted("pellucid_degenerate_outputs_total", "0x30", kind="flat"),),
    ),
}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of Prometheus's files."""
    place = tmp_path_factory.mktemp("rendered")
    for path, text in render(place, targets=["a:1"], prometheus_url="http://p:1").items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    return place / "prometheus"


def promtool(*words: str | Path, folder: Path) -> str:
    """What it says; it is content."""
    done = subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@NEEDS_PROMTOOL
def test_promtool_accepts_the_configuration_and_the_rules(rendered: Path) -> None:
    said = promtool("check", "config", "--lint=all", "--lint-fatal", "prometheus.yml", folder=rendered)
    assert f"{len(ALERTS)} rules found" in said and said.count("SUCCESS") == 4, said


def test_there_is_a_case_for_each_alert() -> None:
    assert {alert.name for alert in ALERTS} == CASES.keys()
    assert len(ALERTS) == len(CASES)


@NEEDS_PROMTOOL
@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_where_it_should_and_nowhere_else(name: str, rendered: Path, tmp_path: Path) -> None:
    case = CASES[name]
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    tests = [
        {
            "interval": case.interval,
            "input_series": [{"series": series, "values": values} for series, values in given.items()],
            "promql_expr_test": [
                {
                    "expr": firing,
                    "eval_time": case.at,
                    "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in expected],
                }
            ],
        }
        for given, expected in [(case.fires, (name, *case.also)), *((silent, ()) for silent in case.silent)]
    ]
    rules = [str(path) for path in sorted((rendered / "rules").iterdir())]
    assert len(rules) == 2
    document = {"rule_files": rules, "evaluation_interval": case.interval, "group_eval_order": GROUPS, "tests": tests}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", "test.yml", folder=tmp_path)


@NEEDS_PROMTOOL
def test_an_alert_says_where_and_how_much(rendered: Path, tmp_path: Path) -> None:
    name = "PellucidInterconnectWait"
    [alert] = [alert for alert in ALERTS if alert.name == name]
    expected = {
        "exp_labels": {"severity": "warning", "instance": "a:1", "replica": "0"},
        "exp_annotations": {
            "summary": "Ranks of replica 0 of a:1 wait for each other",
            "description": "30% of its busy time rank 0 waits for ranks that come later.",
            "action": alert.action,
        },
    }
    document = {
        "rule_files": [str(rendered / "rules/pellucid-alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": key, "values": value} for key, value in CASES[name].fires.items()],
                "alert_rule_test": [{"eval_time": "20m", "alertname": name, "exp_alerts": [expected]}],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", "test.yml", folder=tmp_path)


@NEEDS_PROMTOOL
def test_a_few_requests_wake_nobody(rendered: Path, tmp_path: Path) -> None:
    """One bad one of four in an hour burns 25 times too fast, and is not worth it."""
    name = "pellucid_request_time_to_first_token_seconds"
    few = {one(f"{name}_bucket", route=CHAT, le="2.0"): "0x60 3x10", one(f"{name}_count", route=CHAT): "0x60 4x10"}
    document = {
        "rule_files": [str(path) for path in sorted((rendered / "rules").iterdir())],
        "evaluation_interval": "1m",
        "group_eval_order": GROUPS,
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": key, "values": value} for key, value in few.items()],
                "promql_expr_test": [
                    {"expr": "ALERTS", "eval_time": "63m"},
                    {
                        "expr": 'pellucid:slo_burn:rate1h{slo="time_to_first_token"} > bool 14.4',
                        "eval_time": "63m",
                        "exp_samples": [{"labels": '{job="pellucid", slo="time_to_first_token"}', "value": 1}],
                    },
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", "test.yml", folder=tmp_path)


@NEEDS_PROMTOOL
def test_the_stack_of_the_states_is_the_mean_duration_of_who_is_served(tmp_path: Path) -> None:
    """8 s and 2 s a minute, of four chats and one look for a model; probes and people who look change nothing."""
    [panel] = [panel for board in BOARDS for panel in board.panels if panel.title == "Where the time of a request goes"]
    count = "pellucid_request_duration_seconds_count"
    given = states(decode=8, send=2) | {
        one(count, route=CHAT, outcome="stop"): "0+4x30",
        one(count, route="/v1/models/{id}", outcome="ok"): "0+1x30",
        one(count, route="/metrics", outcome="ok"): "0+60x30",
        one(count, route="/page/{name}", outcome="ok"): "0+100x30",
    }
    shown = [{"labels": f'{{state="{state}"}}', "value": mean_s} for state, mean_s in (("decode", 1.6), ("send", 0.4))]
    expr = panel.lines[0].expr.replace("$__rate_interval", "5m").replace("$instance", "a:1")
    document = {
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": series, "values": values} for series, values in given.items()],
                "promql_expr_test": [{"expr": expr, "eval_time": "20m", "exp_samples": shown}],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", "test.yml", folder=tmp_path)


def test_objectives_are_exact_bounds_and_their_windows_are_recorded() -> None:
    bounds = {metric.name: metric.buckets for metric in CATALOGUE}
    for objective in OBJECTIVES:
        assert not objective.histogram or objective.bound_s in bounds[objective.histogram]
        assert 0.9 <= objective.target < 1
    assert LAG_S in bounds["pellucid_event_loop_lag_seconds"]
    assert {window for burn in FAST + SLOW for window in (burn.long, burn.short)} == set(WINDOWS)
    assert set(FAULTS) <= set(OUTCOMES)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_says_what_to_do_in_words_that_exist(alert: object) -> None:
    severity, summary, description, action = (
        getattr(alert, field) for field in ("severity", "summary", "description", "action")
    )
    assert severity in ("critical", "warning")
    assert summary and not summary.endswith(".")
    assert all(text.endswith(".") for text in (description, action))
    titles = {panel.title for board in BOARDS for panel in board.panels}
    assert set(re.findall(r"`([^`]+)`", action)) <= titles | {"pellucid serve"}
    for named in re.findall(r"dashboard ([A-Z].*)", action):
        assert named.startswith(tuple(board.title for board in BOARDS))
    flags = {option.flag for option in OPTIONS}
    assert set(re.findall(r"--[a-z-]+", action)) <= flags


def test_rules_are_written_in_full() -> None:
    groups = alert_rules()["groups"]
    assert isinstance(groups, list) and len(groups) == 1
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
