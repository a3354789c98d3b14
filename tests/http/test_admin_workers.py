"""What is set over the admin interface, or by command, holds: at each level, in all workers, and in other gateways."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache.keys import FRESH_S
from engine.api import GenerateRequest
from launch.admin import FILE
from tests.cache import servers
from tests.conftest import ROOT
from tests.contract.telemetry.test_metrics import read, total
from tests.http.admin import ADMIN_KEY, AUDIT, KEYS, ORGANISATIONS, PRICES, TENANTS, end, surroundings
from tests.http.asking import COMPLETIONS_URL, prompt
from tests.http.fake_engine import FakeEngine, Job, greet_and_stop
from tests.http.guard import Guard, bearer, until
from tests.http.harness import WAIT_S
from tests.http.scripted_upstream import ScriptedUpstream
from tests.http.test_process import GatewayProcess
from tests.http.workers import Workers
from tests.launch.test_cli import clean_environ, pellucid

ADMIN_SAID = "API keys, tenants and limits: http://127.0.0.1:{}/admin/v1/keys, with the key in {}/admin-key\n"
ASKS = 12
"""So many connections that no worker is left out, but by a great chance."""
ONE = 16
"""Tokens, of which a request takes 14 when it comes, and 5 in the end: a second one does not fit behind it."""
HELD = "held"
"""So the ids of requests begin that go on until they are left."""


class Place:
    """Two workers, and another gateway on the same server."""

    def __init__(self, workers: Workers, other: GatewayProcess, guard: Guard, engine: FakeEngine) -> None:
        self.workers, self.guard, self.engine = workers, guard, engine
        self.urls = (workers.url, other.url)
        self.admin = httpx.Client(
            base_url=f"http://127.0.0.1:{workers.admin_port}", headers=bearer(ADMIN_KEY), timeout=WAIT_S
        )
        self.requests: list[GenerateRequest] = []
        engine.behaviour = self._behave

    async def _behave(self, job: Job) -> None:
        self.requests.append(job.request)
        if job.request.request_id.startswith(HELD):
            await job.accept()
            await job.emit([40])
            await job.until_aborted()
        else:
            await greet_and_stop(job)

    def create(self, **fields: Any) -> str:
        """A new key."""
        answer = self.admin.post(KEYS, json=fields)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["key"])

    def put(self, path: str, **fields: Any) -> None:
        """Make it, or change it."""
        answer = self.admin.put(path, json=fields)
        assert answer.status_code == 200, answer.text

    def ask(self, key: str, url: str = "", **fields: Any) -> httpx.Response:
        """A completion, of whichever worker takes the connection."""
        return httpx.post(
            (url or self.workers.url) + COMPLETIONS_URL, json=prompt(**fields), headers=bearer(key), timeout=WAIT_S
        )

    def statuses(self, key: str) -> set[int]:
        """What all workers and the other gateway say of a key."""
        paths = [f"{url}/v1/models" for url in self.urls for _ in range(ASKS)]
        return {httpx.get(path, headers=bearer(key), timeout=WAIT_S).status_code for path in paths}


@pytest.fixture(scope="module")
def place(model_dir: Path, vocab_size: int) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        home, guard, engine = stack.enter_context(surroundings(vocab_size))
        options: dict[str, Any] = {**guard.options, **PRICES}
        workers = Workers(model_dir, engine.path, home, 2, admin_key=ADMIN_KEY, **options)
        stack.callback(workers.stop)
        other = GatewayProcess(model_dir, engine.path, **options)
        stack.callback(end, other)
        other.wait_until_connected()
        found = Place(workers, other, guard, engine)
        stack.callback(found.admin.close)
        yield found


# ---- each limit at each level


def limited(place: Place, level: str, limits: dict[str, int]) -> str:
    """A key, in a tenant and an organisation of its own, one of which has these limits."""
    name = f"{level}-{'-'.join(limits)}"
    place.put(f"{ORGANISATIONS}/{name}", limits=limits if level == "organisation" else {})
    place.put(f"{TENANTS}/{name}", organisation=name, limits=limits if level == "tenant" else {})
    return place.create(tenant=name, limits=limits if level == "key" else {})


LEVELS = pytest.mark.parametrize("level", ["organisation", "tenant", "key"])


@LEVELS
@pytest.mark.parametrize(
    ("limits", "statuses", "kind", "code"),
    [
        ({"requests_per_minute": 1}, [200, 429], "requests", "rate_limit_exceeded"),
        ({"tokens_per_minute": ONE}, [200, 429], "tokens", "rate_limit_exceeded"),
        ({"spend_micros_per_day": ONE}, [200, 429], "insufficient_quota", "insufficient_quota"),
        ({"concurrent": 0}, [429], "insufficient_quota", "insufficient_quota"),
    ],
)
def test_limits(place: Place, level: str, limits: dict[str, int], statuses: list[int], kind: str, code: str) -> None:
    key = limited(place, level, limits)
    answers = [place.ask(key) for _ in statuses]
    assert [answer.status_code for answer in answers] == statuses
    error = answers[-1].json()["error"]
    assert (error["type"], error["code"]) == (kind, code)
    assert f"this {level}" in error["message"]


@LEVELS
def test_requests_at_the_same_time(place: Place, level: str) -> None:
    key = limited(place, level, {"concurrent": 1})
    headers = bearer(key) | {"x-request-id": f"{HELD}-{level}"}
    url = place.workers.url + COMPLETIONS_URL
    with httpx.stream("POST", url, json=prompt(stream=True), headers=headers, timeout=WAIT_S) as held:
        assert held.status_code == 200
        chunks = held.iter_bytes()
        next(chunks)
        error = place.ask(key).json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert f"this {level}" in error["message"]
    until(lambda: place.ask(key).status_code == 200, "it is held for ever")


def test_models_priority_weight_and_expiry_of_a_key(place: Place) -> None:
    refused = place.ask(place.create(models=["another"]))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
    assert place.ask(place.create(models=["another", "tiny"])).status_code == 200
    assert place.ask(place.create(tenant="green", priority="high", weight=7)).status_code == 200
    request = place.requests[-1]
    assert (request.tenant, request.priority, request.weight) == ("green", -1, 7)
    short = place.create(expires_in_s=1)
    until(lambda: place.statuses(short) == {401}, "it does not expire")


def test_what_a_command_has_set_is_what_holds(place: Place, tmp_path: Path) -> None:
    there = {"PELLUCID_REDIS_URL": place.guard.server.url, "PELLUCID_PEPPER_FILE": str(place.guard.pepper_file)}

    def keys(*words: str) -> str:
        done = pellucid(tmp_path, "keys", *words, **there)
        assert done.returncode == 0, done.stderr
        return done.stdout

    keys("organisation", "commanded", "--rpm", "2", "--spend-per-day", "5")
    keys("tenant", "commanded", "--organisation", "commanded", "--tpm", "300")
    key = keys("create", "--tenant", "commanded", "--concurrent", "4").split()[0]
    answers = [place.ask(key) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    limits = [answers[0].headers[f"x-ratelimit-limit-{kind}"] for kind in ("requests", "tokens")]
    assert limits == ["2", "300"]
    assert "this organisation" in answers[-1].json()["error"]["message"]
    (shown,) = (one for one in place.admin.get(TENANTS).json()["tenants"] if one["name"] == "commanded")
    assert (shown["organisation"], shown["limits"]) == ("commanded", {"tokens_per_minute": 300})
    lines = [line for line in place.admin.get(AUDIT).json()["lines"] if line["target"] == "commanded"]
    assert [(line["action"], line["actor"].partition(":")[0]) for line in lines] == [
        ("tenant", "cli"),
        ("organisation", "cli"),
    ]


# ---- all of them


def holds_everywhere(place: Place, changed_s: float, ask: Callable[[str], int], right: int) -> None:
    """All gateways say so in the end, and whoever says otherwise was asked within the time that is promised."""
    wrong: list[float] | None = None
    while wrong is None or wrong:
        asked = [(time.monotonic(), ask(url)) for url in place.urls for _ in range(ASKS)]
        wrong = [asked_s for asked_s, status in asked if status != right]
        assert all(asked_s <= changed_s + FRESH_S for asked_s in wrong)


def test_a_change_holds_everywhere_within_the_time_that_is_promised(place: Place) -> None:
    kept, revoked = place.create(tenant="changing"), place.create(tenant="changing")
    assert place.statuses(kept) == place.statuses(revoked) == {200}  # all know them now
    place.put(f"{TENANTS}/changing", limits={"requests_per_minute": 0})
    assert place.admin.post(f"{KEYS}/{revoked.split('-')[1]}/revoke").json()["state"] == "revoked"
    changed_s = time.monotonic()

    def looks(url: str) -> int:
        return httpx.get(f"{url}/v1/models", headers=bearer(revoked), timeout=WAIT_S).status_code

    holds_everywhere(place, changed_s, looks, 401)
    holds_everywhere(place, changed_s, lambda url: place.ask(kept, url).status_code, 429)
    assert place.statuses(kept) == {200}


def gateways(parent: int) -> set[int]:
    """Process ids of its gateways."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if b"\0gateway\0" in words and (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(parent):
                found.add(int(entry.name))
    return found


def all_answer(url: str) -> bool:
    """Whether both workers do, one of which is asked."""
    series = read(httpx.get(f"{url}/metrics", timeout=WAIT_S).content)
    workers, silent = (total(series, f"pellucid_gateway_workers{name}") for name in ("", "_silent"))
    return (workers, silent) == (2, 0)


def test_a_worker_that_dies_does_not_take_the_admin_port_away(upstream: ScriptedUpstream, tmp_path: Path) -> None:
    """The real `pellucid serve`, before an upstream: no model is needed."""
    config, data, log, port = tmp_path / "c.toml", tmp_path / "data", tmp_path / "log", servers.free_port()
    config.write_text(f'[[upstream]]\nname = "up"\nurl = "{upstream.url}"\nmodel = "remote"\n')
    options = ("--config", str(config), "--replicas", "0", "--workers", "2", "--data-dir", str(data), "--drain", "1")
    command = [sys.executable, str(ROOT / "pellucid.py"), "serve", "--port", "0", "--admin-port", str(port), *options]
    environ = clean_environ(tmp_path, {})
    with (
        log.open("wb") as writing,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, text=True, env=environ) as served,
    ):
        try:
            assert served.stdout is not None
            said = "".join(iter(served.stdout.readline, ADMIN_SAID.format(port, data)))
            found = re.search(r"http://127\.0\.0\.1:\d+", said)
            assert found is not None, log.read_text()
            key = (data / FILE).read_text().strip()
            lost = lose_one_after_the_other(served.pid, found[0], f"http://127.0.0.1:{port}", key)
            served.send_signal(signal.SIGTERM)
            assert served.wait(WAIT_S) == 0
        finally:
            served.kill()
    assert log.read_text().count("was killed by SIGKILL") == 2
    assert key not in log.read_text() and lost not in log.read_text()


def lose_one_after_the_other(parent: int, url: str, admin_url: str, key: str) -> str:
    """Kill each of the two workers, and ask the one that is left.  The secret of a key that was made meanwhile."""
    until(lambda: all_answer(url), "the second worker is not there")
    with httpx.Client(base_url=admin_url, headers=bearer(key) | {"connection": "close"}, timeout=WAIT_S) as admin:
        made = admin.post(KEYS, json={}).json()
        for worker in sorted(gateways(parent)):
            os.kill(worker, signal.SIGKILL)
            shown = [admin.get(f"{KEYS}/{made['key_id']}").json()["state"] for _ in range(ASKS)]
            assert shown == ["active"] * ASKS
            until(lambda: len(gateways(parent)) == 2 and all_answer(url), "it does not come back")
    return str(made["key"])
