"""The admin interface of a real gateway process: what it changes, what it refuses, and what it never tells."""

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.admin import BODY_BYTES_MAX, HANDLERS, admin_only
from gateway.config import ADMIN_KEY_RULE, ADMIN_KEY_VARIABLE
from tests.cache import servers
from tests.http.admin import ADMIN_KEY, AUDIT, KEYS, ORGANISATIONS, TENANTS, Place, place_for
from tests.http.asking import COMPLETIONS_URL, prompt
from tests.http.guard import bearer, until
from tests.http.test_process import GatewayProcess

SECURITY = ("x-content-type-options", "content-security-policy", "referrer-policy", "x-request-id")


@pytest.fixture(scope="module")
def place(model_dir: Path, vocab_size: int) -> Iterator[Place]:
    """One for all tests that leave it as it is."""
    with place_for(model_dir, vocab_size, body_timeout_s=1.0, log_level="info") as found:
        yield found


def error_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The error, whose shape and headers have been checked."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == code and set(error) == {"message", "type", "param", "code"}
    assert all(name in answer.headers for name in SECURITY) and answer.headers["cache-control"] == "no-store"
    assert "server" not in answer.headers and "access-control-allow-origin" not in answer.headers
    return error


# ---- what it changes


def test_a_life_of_a_key(place: Place) -> None:
    body = {
        "tenant": "search",
        "label": "for the test",
        "limits": {"requests_per_minute": 600, "tokens_per_minute": 10_000, "concurrent": 4},
        "models": ["tiny"],
        "priority": "high",
        "weight": 3,
        "expires_in_s": 3600,
    }
    answer = place.admin.post(KEYS, json=body)
    assert answer.status_code == 201 and answer.headers["cache-control"] == "no-store"
    issued = answer.json()
    assert set(issued) == {"key_id", "key"} and issued["key_id"] in issued["key"]
    used = place.data.post(COMPLETIONS_URL, json=prompt(), headers=bearer(issued["key"]))
    assert (used.status_code, used.headers["x-ratelimit-limit-requests"]) == (200, "600")
    shown = place.admin.get(f"{KEYS}/{issued['key_id']}").json()
    assert {name: shown[name] for name in body if name != "expires_in_s"} == {
        name: value for name, value in body.items() if name != "expires_in_s"
    }
    assert shown["state"] == "active" and shown["expires_s"] - shown["created_s"] in (3600, 3601)
    assert shown in place.admin.get(KEYS).json()["keys"]
    rotated = place.admin.post(f"{KEYS}/{issued['key_id']}/rotate", json={"grace_s": 60}).json()
    assert rotated["key_id"] == issued["key_id"] and rotated["key"] != issued["key"]
    for key in (issued["key"], rotated["key"]):
        assert place.data.get("/v1/models", headers=bearer(key)).status_code == 200
    revoked = place.admin.post(f"{KEYS}/{issued['key_id']}/revoke")
    assert (revoked.status_code, revoked.json()["state"]) == (200, "revoked")
    until(lambda: place.data.get("/v1/models", headers=bearer(rotated["key"])).status_code == 401, "it is still let in")
    actions = [(line.action, line.actor) for line in place.guard.audit() if line.target == issued["key_id"]]
    assert actions == [(action, "admin:127.0.0.1") for action in ("revoke", "rotate", "create")]


def test_nobody_writes_another_name_into_the_audit(place: Place) -> None:
    forged = {"x-forwarded-for": "203.0.113.7", "forwarded": "for=203.0.113.7", "x-real-ip": "203.0.113.7"}
    key_id = place.admin.post(KEYS, json={}, headers=forged).json()["key_id"]
    assert [line.actor for line in place.guard.audit() if line.target == key_id] == ["admin:127.0.0.1"]


def test_tenants_and_organisations(place: Place) -> None:
    made = place.admin.put(f"{TENANTS}/ads", json={"organisation": "acme", "limits": {"requests_per_minute": 5}})
    assert made.json() == {
        "name": "ads",
        "organisation": "acme",
        "limits": {"requests_per_minute": 5},
        "policy": "local",
    }
    changed = place.admin.put(f"{TENANTS}/ads", json={"policy": "closed"}).json()  # the rest stays
    assert changed == {**made.json(), "policy": "closed"}
    assert changed in place.admin.get(TENANTS).json()["tenants"]
    unlimited = place.admin.put(f"{TENANTS}/ads", json={"limits": {}}).json()
    assert unlimited["limits"] == {}
    limits = {"spend_micros_per_day": 10**6, "concurrent": 0}
    one = place.admin.put(f"{ORGANISATIONS}/acme", json={"limits": limits}).json()
    assert one == {"name": "acme", "limits": {"concurrent": 0, "spend_micros_per_day": 10**6}}
    assert one in place.admin.get(ORGANISATIONS).json()["organisations"]
    assert [line.action for line in place.guard.audit() if line.target in ("acme", "ads")] == [
        "organisation",
        "tenant",
        "tenant",
        "tenant",
    ]
    shown = place.admin.get(AUDIT).json()["lines"]
    assert [line["action"] for line in shown][:4] == ["organisation", "tenant", "tenant", "tenant"]


def test_a_limit_of_a_tenant_holds_for_its_keys(place: Place) -> None:
    place.admin.put(f"{TENANTS}/strict", json={"limits": {"requests_per_minute": 0}})
    key = place.admin.post(KEYS, json={"tenant": "strict"}).json()["key"]
    refused = place.data.post(COMPLETIONS_URL, json=prompt(), headers=bearer(key))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")


# ---- what it refuses


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Basic YTpi"},
        bearer("x"),
        bearer(ADMIN_KEY[:-1]),
        bearer(ADMIN_KEY + "x"),
        bearer("x" * 10_000),
        {"x-api-key": ADMIN_KEY.upper()},
    ],
)
def test_without_the_key_nothing_is_told_or_changed(place: Place, headers: dict[str, str]) -> None:
    before = len(place.guard.audit())
    with httpx.Client(base_url=place.admin.base_url, headers=headers) as nobody:
        for handler in (one for one in HANDLERS if admin_only in (one.guards or ())):
            path = next(iter(handler.paths)).replace("{key_id:str}", "0" * 16).replace("{name:str}", "ads")
            answer = nobody.request(next(iter(handler.http_methods)), path, json={})
            error_of(answer, 401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
    assert len(place.guard.audit()) == before


def test_either_header_has_the_key_and_an_api_key_is_none(place: Place) -> None:
    key = place.admin.post(KEYS, json={}).json()["key"]
    with httpx.Client(base_url=place.admin.base_url) as nobody:
        assert nobody.get(KEYS, headers={"x-api-key": ADMIN_KEY}).status_code == 200
        error_of(nobody.get(KEYS, headers=bearer(key)), 401, "invalid_api_key")
        twice = [("authorization", f"Bearer {ADMIN_KEY}"), ("authorization", f"Bearer {key}")]
        error_of(nobody.get(KEYS, headers=twice), 400, "invalid_value")


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", KEYS, {"tenants": "x"}, "tenants"),
        ("POST", KEYS, {"tenant": "a b"}, "tenant"),
        ("POST", KEYS, {"tenant": "}"}, "tenant"),
        ("POST", KEYS, {"tenant": 5}, "tenant"),
        ("POST", KEYS, {"label": "x" * 201}, "label"),
        ("POST", KEYS, {"limits": {"requests_per_minute": -1}}, "limits.requests_per_minute"),
        ("POST", KEYS, {"limits": {"requests_per_minute": 10**16}}, "limits.requests_per_minute"),
        ("POST", KEYS, {"limits": {"rpm": 5}}, "limits.rpm"),
        ("POST", KEYS, {"limits": None}, "limits"),
        ("POST", KEYS, {"models": ["x"] * 101}, "models"),
        ("POST", KEYS, {"priority": "highest"}, "priority"),
        ("POST", KEYS, {"weight": 0}, "weight"),
        ("POST", KEYS, {"expires_in_s": 0}, "expires_in_s"),
        ("POST", KEYS, {"key": "pk-mine"}, "key"),
        ("POST", f"{KEYS}/{'0' * 16}/rotate", {"grace_s": -1}, "grace_s"),
        ("POST", f"{KEYS}/{'0' * 16}/rotate", {"grace_s": 10**9}, "grace_s"),
        ("PUT", f"{TENANTS}/ads", {"policy": "never"}, "policy"),
        ("PUT", f"{TENANTS}/ads", {"organisation": ""}, "organisation"),
        ("PUT", f"{TENANTS}/ads", {"name": "other"}, "name"),
        ("PUT", f"{TENANTS}/a b", {}, "name"),
        ("PUT", f"{TENANTS}/{'x' * 65}", {}, "name"),
        ("PUT", f"{TENANTS}/%FF", {}, "name"),
        ("PUT", f"{ORGANISATIONS}/acme", {"organisation": "x"}, "organisation"),
        ("PUT", f"{ORGANISATIONS}/acme", {"limits": {"weight": 1}}, "limits.weight"),
        ("PUT", f"{ORGANISATIONS}/acme", {"limits": {"concurrent": "5"}}, "limits.concurrent"),
        ("PUT", f"{ORGANISATIONS}/}}", {"limits": {}}, "name"),
        ("POST", KEYS, [], None),
    ],
)
def test_what_is_not_acceptable_changes_nothing(
    place: Place, method: str, path: str, body: object, param: str | None
) -> None:
    before = len(place.guard.audit())
    answer = place.admin.request(method, path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(place.guard.audit()) == before


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_value"),
        (b'{"a": 1, "a": 2}', "application/json", 400, "invalid_value"),
        (b'{"limits":' * 100 + b"1" + b"}" * 100, "application/json", 400, "invalid_value"),
        (b"\xff", "application/json", 400, "invalid_value"),
        (b"tenant=x", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b'{"label": "' + b"x" * BODY_BYTES_MAX + b'"}', "application/json", 413, "request_too_large"),
    ],
)
def test_bodies_are_bounded_as_everywhere(place: Place, content: bytes, kind: str, status: int, code: str) -> None:
    error_of(place.admin.post(KEYS, content=content, headers={"content-type": kind}), status, code)


def test_a_body_that_does_not_come(place: Place) -> None:
    head = (
        f"POST {KEYS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN_KEY}\r\n"
        "content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    )
    with socket.create_connection(("127.0.0.1", place.admin_port), timeout=20) as raw:
        raw.sendall(head.encode())
        answer = raw.makefile("rb").read()  # to the end: the server closes
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"request_timeout"' in answer


def test_what_is_not_there(place: Place) -> None:
    unknown = "f" * 16
    for method, path in (("GET", ""), ("POST", "/revoke"), ("POST", "/rotate")):
        error_of(place.admin.request(method, f"{KEYS}/{unknown}{path}", json={}), 404, "not_found")
    for path in ("/", "/admin", "/admin/v1", "/v1/models", "/metrics", "/debug/requests"):
        error_of(place.admin.get(path), 404, "not_found")
    assert error_of(place.admin.delete(KEYS), 405, "method_not_allowed") and place.admin.delete(KEYS).headers["allow"]
    assert place.data.get(KEYS, headers=bearer(ADMIN_KEY)).status_code == 404


def test_a_key_that_was_revoked_stays_so(place: Place) -> None:
    key_id = place.admin.post(KEYS, json={}).json()["key_id"]
    for _ in range(2):
        assert place.admin.post(f"{KEYS}/{key_id}/revoke").json()["state"] == "revoked"
    assert "revoked" in error_of(place.admin.post(f"{KEYS}/{key_id}/rotate", json={}), 400, "invalid_value")["message"]


def test_browsers_are_told_nothing(place: Place) -> None:
    headers = {"origin": "http://evil", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in place.admin.options(KEYS, headers=headers).headers
    assert "access-control-allow-origin" not in place.admin.get(KEYS, headers={"origin": "http://evil"}).headers


# ---- when something is missing


def test_while_the_server_is_away_and_after_it(model_dir: Path, vocab_size: int) -> None:
    with place_for(model_dir, vocab_size, log_level="debug") as place:
        _lose_the_server_and_the_pepper(place)


def _lose_the_server_and_the_pepper(place: Place) -> None:
    key = place.admin.post(KEYS, json={}).json()["key"]
    place.guard.server.freeze()
    message = error_of(place.admin.post(KEYS, json={}), 503, "keys_unavailable")["message"]
    assert "whether this was done" in message
    place.guard.server.thaw()
    until(lambda: place.admin.get(KEYS).status_code == 200, "it does not thaw")
    place.guard.server.kill()
    for method, path in (("GET", KEYS), ("POST", KEYS), ("PUT", f"{TENANTS}/ads"), ("GET", AUDIT)):
        answer = place.admin.request(method, path, json={})
        error_of(answer, 503, "keys_unavailable")
        assert answer.headers["retry-after"] == "1"
    place.guard.server.restart()
    until(lambda: place.admin.get(KEYS).status_code == 200, "it does not come back")
    place.guard.pepper_file.chmod(0o644)
    message = error_of(place.admin.post(KEYS, json={}), 503, "keys_unavailable")["message"]
    assert "others may read the pepper" in message
    place.guard.pepper_file.unlink()
    message = error_of(place.admin.post(KEYS, json={}), 400, "invalid_value")["message"]
    assert "the pepper that they were made with is not here" in message
    assert not place.guard.pepper_file.exists()
    _tells_no_secret(place, key)


def _tells_no_secret(place: Place, key: str) -> None:
    """Neither its own key nor that of others, whatever was asked."""
    told = [place.admin.get(path).text for path in (KEYS, TENANTS, ORGANISATIONS, AUDIT)]
    told += [place.data.get(path).text for path in ("/health", "/metrics", "/openapi.json")]
    place.process.process.send_signal(signal.SIGTERM)
    code, said = place.process.end()
    lines = [json.loads(line) for line in said.splitlines()]
    assert code == 0 and any(line.get("logger") == "pellucid.admin" for line in lines)
    secret = key.rpartition("-")[2]
    for text in (*told, said):
        assert ADMIN_KEY not in text and secret not in text and "digest" not in text


@pytest.mark.parametrize("key", ["", "short", "with a space in it", "umlaut-" + "\u00fc" * 16])
def test_a_key_that_cannot_be_used_is_one_line(model_dir: Path, key: str) -> None:
    options = {"redis_url": "unix:///nowhere", "admin_port": servers.free_port()}
    code, said = GatewayProcess(model_dir, "/nowhere", environ={ADMIN_KEY_VARIABLE: key}, **options).end()
    assert (code, said) == (2, f"gateway: the admin interface needs a key in {ADMIN_KEY_VARIABLE}: {ADMIN_KEY_RULE}\n")


def test_without_a_server_for_keys_there_is_no_admin_interface(model_dir: Path) -> None:
    code, said = GatewayProcess(model_dir, "/nowhere", admin_port=servers.free_port()).end()
    assert (code, said) == (2, "gateway: bad options: the admin interface needs a server that keeps keys\n")
