"""dashboards/compose.yaml is what the settings, the Dockerfile and the file itself say it is."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any  # Any: a file of any shape, looked at.

import pytest
import yaml  # type: ignore[import-untyped]  # it brings no types
from click.testing import CliRunner

from dashboards.command import render
from launch.keys import keys
from launch.options import OPTIONS, OTHER_VARIABLES, read_options
from tests.tidy.imports import ROOT

FILE = ROOT / "dashboards/compose.yaml"
DOCKERFILE = (ROOT / "dashboards/Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVICE_KEYS = {
    "build", "command", "depends_on", "environment", "healthcheck", "image", "ports", "restart",
    "stop_grace_period", "volumes",
}  # fmt: skip


def test_it_has_what_a_person_was_promised() -> None:
    assert set(SERVICES) == {"pellucid", "redis", "jaeger", "dashboards", "prometheus", "grafana"}
    assert set(COMPOSE) == {"services", "volumes"}
    for name, service in SERVICES.items():
        assert set(service) <= SERVICE_KEYS, name
        assert "build" in service or re.fullmatch(r"[a-z/]+:v?[0-9.]+", service["image"]), (
            "an image without a version moves"
        )


def test_what_it_names_is_there() -> None:
    for service in SERVICES.values():
        assert {volume.partition(":")[0] for volume in service.get("volumes", ())} <= set(COMPOSE["volumes"])
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        for needed, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in SERVICES[needed]
    build = SERVICES["pellucid"]["build"]
    assert (FILE.parent / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_its_settings_exist_and_are_accepted() -> None:
    environ = SERVICES["pellucid"]["environment"]
    assert set(environ) <= {option.variable for option in OPTIONS} | OTHER_VARIABLES
    assert all(isinstance(value, str) for value in environ.values()), "YAML makes a number of an unquoted one"
    options = read_options({}, environ)
    assert (options.redis_url, options.otlp_endpoint) == ("redis://redis:6379/0", "http://jaeger:4318")
    assert options.host == "0.0.0.0" and not options.insecure_open, "it is for those who have keys"
    grace_s = int(SERVICES["pellucid"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > options.drain + 15, "it would be killed while it drains"
    inside = [str(port).rpartition(":")[2] for port in SERVICES["pellucid"]["ports"]]
    assert inside == [str(options.port)]
    assert f"EXPOSE {options.port}" in DOCKERFILE and f"VOLUME {options.data_dir}" in DOCKERFILE
    assert f"pellucid:{options.data_dir}" in SERVICES["pellucid"]["volumes"]


def test_dashboards_are_rendered_before_those_who_read_them_start(tmp_path: Path) -> None:
    """Nothing rendered is kept in the repository, so nothing can be of another version."""
    renderer = SERVICES["dashboards"]
    assert renderer["build"] == SERVICES["pellucid"]["build"] and renderer["image"] == SERVICES["pellucid"]["image"]
    group, command, place, *options = renderer["command"]
    assert (group, command, place) == ("dashboards", "render", "/dashboards")
    assert renderer["volumes"] == [f"dashboards:{place}"]
    assert f"chown pellucid /data {place}" in DOCKERFILE, "a new volume belongs to whom the folder belongs"
    done = CliRunner().invoke(render, [str(tmp_path), *options])
    assert done.exit_code == 0, done.output
    for reader in ("prometheus", "grafana"):
        assert f"dashboards:{place}:ro" in SERVICES[reader]["volumes"]
        assert SERVICES[reader]["depends_on"] == {"dashboards": {"condition": "service_completed_successfully"}}
    named = [word.partition("=")[2] for word in SERVICES["prometheus"]["command"] if f"={place}/" in word]
    named.append(SERVICES["grafana"]["environment"]["GF_PATHS_PROVISIONING"])
    assert len(named) == 2
    assert all((tmp_path / Path(path).relative_to(place)).exists() for path in named)
    config = yaml.safe_load((tmp_path / "prometheus/prometheus.yml").read_text())
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["pellucid:8000"]}]
    [source] = yaml.safe_load((tmp_path / "grafana/provisioning/datasources/pellucid.yml").read_text())["datasources"]
    assert source["url"] == f"http://prometheus:{str(SERVICES['prometheus']['ports'][0]).rpartition(':')[2]}"


def test_nothing_of_it_is_open_to_the_network_by_default() -> None:
    """Redis not at all: who reaches it can give themselves any limit."""
    for name, service in SERVICES.items():
        for port in service.get("ports", ()):
            assert name != "redis" and str(port).startswith("127.0.0.1:"), (name, port)


def test_redis_keeps_keys_and_evicts_no_limit() -> None:
    command = " ".join(SERVICES["redis"]["command"])
    assert "--appendonly yes" in command and "--maxmemory-policy noeviction" in command
    assert SERVICES["redis"]["volumes"] == ["redis:/data"]


def test_the_commands_in_its_comments_exist() -> None:
    comments = [line for line in FILE.read_text().splitlines() if line.startswith("#")]
    called = [line.partition(" pellucid keys ")[2].split() for line in comments if " pellucid keys " in line]
    assert called
    for command, *flags in called:
        known = {name for option in keys.commands[command].params for name in option.opts}
        assert {flag for flag in flags if flag.startswith("--")} <= known


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker here")
def test_docker_understands_it() -> None:
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("no docker compose here")
    done = subprocess.run(
        ["docker", "compose", "-f", FILE, "config", "-q"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_image_has_what_the_installation_needs() -> None:
    assert "g++" in DOCKERFILE and "requirements.lock" in DOCKERFILE
    ignored = Path(ROOT / ".dockerignore").read_text().split()
    tops = {path.split("/")[0] for path in ignored}
    assert not tops & {"pyproject.toml", "setup.py", "requirements.lock", "LICENSE", "README.md", "pellucid.py"}
