"""
What a dashboard is made of, and its JSON as Grafana reads it.

A board is rows of panels; where each panel lies follows from their order and width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dashboards.objectives import RECORDED
from dashboards.promql import PromqlError, Scope, check, labels_of

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
JsonObject = dict[str, Json]

SCHEMA_VERSION = 39
"""Of Grafana 10.4 and 11; newer ones read it and bring it up to date."""
WIDTH = 24
"""Of Grafana's grid."""
HEIGHT = 8
SHORT_HEIGHT = 4
HERE = Scope("$__rate_interval", 'instance=~"$instance"')
"""Of the instances that are chosen above the dashboard, for as long as its resolution shows."""
REPLICA = ("instance", "replica")
"""Engines of several appliances have the same numbers."""
REPLICA_LEGEND = "{{instance}} replica {{replica}}"
UNITS = frozenset({"s", "short", "reqps", "percentunit", "bytes", "Bps", "none"})
"""Those of Grafana's that are used here."""
_SOURCE: JsonObject = {"type": "prometheus", "uid": "${datasource}"}
_INSTANCES = "pellucid_gateway_workers"
"""A gauge that every appliance shows, with nothing but its address."""


@dataclass(frozen=True, slots=True)
class Line:
    """One expression and the name of what it shows, with labels in {{}}."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    description: str
    unit: str
    lines: tuple[Line, ...]
    width: int = 8
    kind: Literal["timeseries", "stat"] = "timeseries"
    stacked: bool = False
    most: float | None = None
    """The end of the axis, where it has one."""

    @property
    def height(self) -> int:
        """In Grafana's units."""
        return SHORT_HEIGHT if self.kind == "stat" else HEIGHT


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    uid: str
    """In its address, and the name of its file."""
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> Iterator[Panel]:
        """All of them."""
        return (panel for row in self.rows for panel in row.panels)

    def metrics(self) -> frozenset[str]:
        """Those of the catalogue that it shows.  Raises PromqlError."""
        return frozenset().union(*(_checked(line) for panel in self.panels for line in panel.lines))

    def json(self) -> JsonObject:
        """As Grafana reads it.  Raises PromqlError for what the catalogue does not have."""
        self.metrics()
        return {
            "uid": self.uid,
            "title": f"Pellucid / {self.title}",
            "description": self.description,
            "tags": ["pellucid"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "annotations": {"list": []},
            "links": [
                {"type": "dashboards", "title": "Pellucid", "tags": ["pellucid"], "asDropdown": True,
                 "includeVars": True, "keepTime": True, "targetBlank": False, "icon": "external link", "url": ""},
            ],
            "templating": {"list": [_source_variable(), _instance_variable()]},
            "panels": list(_placed(self.rows)),
        }  # fmt: skip


def _checked(line: Line) -> frozenset[str]:
    found = check(line.expr, RECORDED)
    named = {part.partition("}}")[0] for part in line.legend.split("{{")[1:]}
    if unknown := named - labels_of(line.expr):
        raise PromqlError(f"the legend {line.legend!r} names {', '.join(sorted(unknown))}, not in: {line.expr}")
    return found


def _placed(rows: tuple[Row, ...]) -> Iterator[JsonObject]:
    """Headings and panels from left to right, and down."""
    number, y = 1, 0
    for row in rows:
        place: JsonObject = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place}
        number, y, x, tallest = number + 1, y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": panel.height})
            number, x, tallest = number + 1, x + panel.width, max(tallest, panel.height)
        y += tallest


def _panel(panel: Panel, number: int, place: JsonObject) -> JsonObject:
    defaults: JsonObject = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 60 if panel.stacked else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _STAT_OPTIONS if panel.kind == "stat" else _SERIES_OPTIONS,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "editorMode": "code",
                "expr": line.expr,
                "legendFormat": line.legend,
                "range": True,
            }
            for index, line in enumerate(panel.lines)
        ],
    }


_SERIES_OPTIONS: JsonObject = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
    "tooltip": {"mode": "multi", "sort": "desc"},
}
_STAT_OPTIONS: JsonObject = {
    "colorMode": "value",
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    "textMode": "auto",
}


def _source_variable() -> JsonObject:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
        "skipUrlSync": False,
    }


def _instance_variable() -> JsonObject:
    check(_INSTANCES)
    query = f"label_values({_INSTANCES}, instance)"
    return {
        "name": "instance",
        "label": "Instance",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": "instance"},
        "definition": query,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "allValue": ".*",
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "skipUrlSync": False,
        "sort": 1,
    }
