"""The dashboards: of the catalogue alone, all of it, and as Grafana reads them."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any  # Any: JSON of any shape, looked at.

import pytest

from dashboards import promql
from dashboards.board import HERE, SCHEMA_VERSION, UNITS, WIDTH, Board, Line, Panel, Row
from dashboards.boards import BOARDS, NOT_SHOWN
from dashboards.files import render
from dashboards.objectives import RECORDED
from telemetry.catalogue import CATALOGUE

RENDERED = {
    path: text
    for path, text in render(Path("/d"), targets=["a:1"], prometheus_url="http://p:1").items()
    if path.endswith(".json")
}
SHOWN: dict[str, dict[str, Any]] = {path: json.loads(text) for path, text in RENDERED.items()}
TITLES = (
    "Overview",
    "Request latency",
    "KV memory",
    "Engine steps",
    "Tenants and limits",
    "Speculation and quantization",
)


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


PANELS = [(board["title"], panel) for board in SHOWN.values() for panel in panels(board)]
EVERY_PANEL = pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS], ids=[f"{b}-{p['title']}" for b, p in PANELS]
)
EVERY_BOARD = pytest.mark.parametrize("board", SHOWN.values(), ids=SHOWN)


def test_there_are_the_six() -> None:
    assert [board["title"] for board in SHOWN.values()] == [f"Pellucid / {title}" for title in TITLES]
    assert [f"grafana/dashboards/{board['uid']}.json" for board in SHOWN.values()] == list(SHOWN)


def test_every_metric_is_on_a_panel_or_said_not_to_be() -> None:
    """Both ways, and from the text, so that the check of expressions is not asked about itself."""
    named = set(re.findall(r"\b(?:pellucid|gen_ai)_[a-z0-9_]+", "".join(RENDERED.values())))
    series = {
        f"{metric.name}{suffix}": metric.name
        for metric in CATALOGUE
        for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
    }
    assert named - series.keys() == set()
    shown = {series[name] for name in named}
    assert {metric.name for metric in CATALOGUE} - shown == NOT_SHOWN.keys()
    assert shown == frozenset().union(*(board.metrics() for board in BOARDS))


@pytest.mark.parametrize(
    "metric", [metric for metric in CATALOGUE if metric.name not in NOT_SHOWN], ids=lambda m: m.name
)
def test_a_metric_with_another_name_is_an_error(metric: object, monkeypatch: pytest.MonkeyPatch) -> None:
    name = getattr(metric, "name")  # noqa: B009 - pytest hands it over as an object
    left = {series: one for series, one in promql._BY_SERIES.items() if one.name != name}
    monkeypatch.setattr(promql, "_BY_SERIES", left)
    with pytest.raises(promql.PromqlError, match=name):
        for board in BOARDS:
            board.json()


def test_a_legend_with_a_label_that_is_summed_away_is_an_error() -> None:
    line = Line(HERE.rate("pellucid_requests_total", "outcome"), "{{route}}")
    panel = Panel(title="x", description="x.", unit="reqps", lines=(line,))
    with pytest.raises(promql.PromqlError, match="names route"):
        Board("x", "x", "x", (Row("x", (panel,)),)).json()


@EVERY_BOARD
def test_it_follows_the_schema(board: dict[str, Any]) -> None:
    assert board["schemaVersion"] == SCHEMA_VERSION and board["description"]
    assert re.fullmatch(r"[a-z-]{1,40}", board["uid"])
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    assert variables["instance"]["datasource"]["uid"] == "${datasource}"
    assert len({panel["title"] for panel in board["panels"]}) == len(board["panels"])


@EVERY_BOARD
def test_no_panel_lies_on_another_or_beyond_the_grid(board: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in board["panels"]]
    for place in places:
        assert place["x"] >= 0 and place["x"] + place["w"] <= WIDTH and place["h"] > 0 and place["w"] > 0
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    for row in (panel for panel in board["panels"] if panel["type"] == "row"):
        under = [place for place in places if place["y"] == row["gridPos"]["y"] + 1]
        assert sum(place["w"] for place in under) == WIDTH, f"{row['title']}: its first line has a gap"


@EVERY_PANEL
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".") and len(panel["description"].split()) >= 2
    assert panel["type"] in ("timeseries", "stat")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert len({target["legendFormat"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"] and target["legendFormat"]


@EVERY_PANEL
def test_an_expression_follows_the_resolution_and_never_divides_by_nothing(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        expression = target["expr"]
        assert set(re.findall(r"\[([^\]]*)\]", expression)) <= {"$__rate_interval"}
        divisors = re.findall(r" / (?:ignoring \(\w+\) group_left \(\) )?(.)", expression)
        assert divisors == ["("] * len(divisors) and expression.count("> 0)") == len(divisors)
        assert expression.count("histogram_quantile") == expression.count(">= 0"), "none of nothing, not NaN"
        selectors = re.findall(r"\b(?:pellucid|gen_ai)_\w+(\{[^}]*\})?", expression)
        assert all('instance=~"$instance"' in selector for selector in selectors)
        assert promql.check(expression, RECORDED) or "pellucid:" in expression or "ALERTS" in expression
