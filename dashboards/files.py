"""
All that is rendered, as files: for Prometheus and for Grafana.

    DIR/prometheus/prometheus.yml            whom to scrape
    DIR/prometheus/rules/pellucid-*.yml      recording rules, alerts
    DIR/grafana/provisioning/...             the data source, and where the dashboards are
    DIR/grafana/dashboards/pellucid-*.json   the dashboards
"""

import json
from collections.abc import Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # it brings no types

from dashboards.alerts import ALERTS, JOB, Alert
from dashboards.board import Json, JsonObject
from dashboards.boards import BOARDS
from dashboards.objectives import OBJECTIVES, RECORDED, recordings
from dashboards.promql import check

SCRAPE_S = 5
_RULES = "prometheus/rules"
_DASHBOARDS = "grafana/dashboards"
_PROVISIONING = "grafana/provisioning"
_HEAD = "# Rendered by `pellucid dashboards render`, which writes over it.\n"


def render(directory: Path, *, targets: Sequence[str], prometheus_url: str) -> dict[str, str]:
    """
    Every file's text, by its path under `directory`.

    Args:
        directory: where Grafana finds the files, absolute.
        targets: HOST:PORT of the gateways, as Prometheus reaches them.
        prometheus_url: of Prometheus, as Grafana reaches it.

    Raises PromqlError for what the metric catalogue does not have.
    """
    rendered: dict[str, Json] = {
        "prometheus/prometheus.yml": prometheus(targets),
        f"{_RULES}/pellucid-recording.yml": recording_rules(),
        f"{_RULES}/pellucid-alerts.yml": alert_rules(),
        f"{_PROVISIONING}/datasources/pellucid.yml": _data_source(prometheus_url),
        f"{_PROVISIONING}/dashboards/pellucid.yml": _provider(directory / _DASHBOARDS),
    }
    texts = {path: _HEAD + _yaml(value) for path, value in rendered.items()}
    texts |= {f"{_DASHBOARDS}/{board.uid}.json": json.dumps(board.json(), indent=2) + "\n" for board in BOARDS}
    return texts


def write(directory: Path, texts: dict[str, str]) -> None:
    """Write them, and take away what another version has written and this one has not.  Raises OSError."""
    for path, text in texts.items():
        place = directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    for folder, suffix in ((_RULES, ".yml"), (_DASHBOARDS, ".json")):
        for old in (directory / folder).glob(f"pellucid-*{suffix}"):
            if f"{folder}/{old.name}" not in texts:
                old.unlink()


def prometheus(targets: Sequence[str]) -> JsonObject:
    """Whom to scrape, and where the rules are: beside the file itself."""
    return {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": "15s"},
        "rule_files": ["rules/pellucid-*.yml"],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": list(targets)}]}],
    }


def recording_rules() -> JsonObject:
    """Burn rates, by objective and window.  Raises PromqlError."""
    groups: list[Json] = []
    for one in OBJECTIVES:
        rules: list[Json] = []
        for rule in recordings():
            if rule.slo == one.slo:
                check(rule.expr)
                rules.append({"record": rule.record, "expr": rule.expr, "labels": {"slo": rule.slo}})
        groups.append({"name": f"pellucid-{one.slo}", "rules": rules})
    return {"groups": groups}


def alert_rules() -> JsonObject:
    """All of them, in one group.  Raises PromqlError."""
    return {"groups": [{"name": "pellucid-alerts", "rules": [_alert(alert) for alert in ALERTS]}]}


def _alert(alert: Alert) -> JsonObject:
    check(alert.expr, RECORDED)
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.lasting,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.description, "action": alert.action},
    }


def _data_source(url: str) -> JsonObject:
    return {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "Prometheus",
                "type": "prometheus",
                "uid": "pellucid-prometheus",
                "access": "proxy",
                "url": url,
                "isDefault": True,
                # `$__rate_interval` is four times as long, so that a rate has samples enough.
                "jsonData": {"timeInterval": f"{SCRAPE_S}s", "httpMethod": "POST"},
            }
        ],
    }


def _provider(dashboards: Path) -> JsonObject:
    return {
        "apiVersion": 1,
        "providers": [
            {
                "name": "pellucid",
                "folder": "Pellucid",
                "type": "file",
                "allowUiUpdates": False,
                "disableDeletion": False,
                "options": {"path": str(dashboards)},
            }
        ],
    }


def _yaml(value: Json) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, width=118, allow_unicode=True)
    return text
