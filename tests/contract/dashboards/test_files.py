"""What is written, and where."""

from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # it brings no types
from click.testing import CliRunner

from dashboards.command import render as command
from dashboards.files import render, write

OPTIONS = ("--target", "one:8000", "--target", "[::1]:8001", "--prometheus-url", "https://prometheus")


def test_the_command_writes_what_is_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command, ["a/b", *OPTIONS])
    assert (done.exit_code, done.output) == (0, f"11 files in {tmp_path / 'a/b'}\n")
    place = tmp_path / "a/b"
    texts = render(place, targets=["one:8000", "[::1]:8001"], prometheus_url="https://prometheus")
    assert {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()} == texts
    config = yaml.safe_load(texts["prometheus/prometheus.yml"])
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["one:8000", "[::1]:8001"]}]
    [provider] = yaml.safe_load(texts["grafana/provisioning/dashboards/pellucid.yml"])["providers"]
    assert provider["options"]["path"] == str(place / "grafana/dashboards"), "Grafana wants it whole"


def test_what_an_older_version_has_written_goes_and_nothing_else(tmp_path: Path) -> None:
    kept = ["prometheus/rules/mine.yml", "grafana/dashboards/mine.json", "grafana/pellucid-mine.json"]
    old = ["prometheus/rules/pellucid-old.yml", "grafana/dashboards/pellucid-old.json"]
    for path in kept + old:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("{}")
    texts = render(tmp_path, targets=["a:1"], prometheus_url="http://p:1")
    write(tmp_path, texts)
    write(tmp_path, texts)
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert there == {*texts, *kept}
