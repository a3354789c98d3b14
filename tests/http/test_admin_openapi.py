"""The document of the admin interface says what it does, and nothing that is made from it brings it down."""

import contextlib
import copy
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.accounts import LIMIT_MAX
from cache.key_records import Name
from gateway.admin import HANDLERS, admin_only
from gateway.admin_wire import LIFE_S_MAX, NewKey, OrganisationChange, Rotation, TenantChange
from gateway.config import GatewayOptions
from gateway.decode import decode
from gateway.errors import ApiError
from gateway.openapi import admin_document
from gateway.routes import described
from tests.cache import servers
from tests.http.admin import ADMIN_KEY
from tests.http.fake_engine import FakeEngine
from tests.http.guard import Guard, bearer
from tests.http.harness import WAIT_S
from tests.http.model_files import EOS_ID
from tests.http.test_fuzz import CASES, Fuzzer, show
from tests.http.test_openapi import places
from tests.http.workers import Workers

OPTIONS = GatewayOptions(model="x", model_name="tiny", engines=("unix:x",))
DOCUMENT: Any = admin_document(described(HANDLERS), OPTIONS, version="1")
Kind = type[NewKey] | type[Rotation] | type[TenantChange] | type[OrganisationChange]
LIMITS = {"requests_per_minute": 5, "tokens_per_minute": LIMIT_MAX, "concurrent": None, "spend_micros_per_day": 0}
BODIES: dict[Kind, dict[str, Any]] = {
    NewKey: {
        "tenant": "search",
        "label": "for people",
        "limits": LIMITS,
        "models": ["m", "org/m:1"],
        "priority": "low",
        "weight": 1000,
        "expires_in_s": LIFE_S_MAX,
    },
    Rotation: {"grace_s": 5},
    TenantChange: {"organisation": "acme", "limits": LIMITS, "policy": "closed"},
    OrganisationChange: {"limits": LIMITS},
}
NUMBERS = (-1, 0, 1, 1000, 1001, LIMIT_MAX, LIMIT_MAX + 1, LIFE_S_MAX + 1, 30 * 86_400, 30 * 86_400 + 1, 1.5, 2.0)
WORDS = (
    "",
    "a",
    "A.b_c-1",
    "-a",
    "a b",
    "a\n",
    "\u00e9",
    "x" * 64,
    "x" * 65,
    "x" * 200,
    "x" * 201,
    "\x1b[2J",
    "\u202e",
)
CHOICES = ("low", "highest", "local", "open", "state", "requests_per_minute", "weight", "models")
VALUES = st.sampled_from(
    (None, True, *NUMBERS, *WORDS, *CHOICES, [], {}, ["a"], ["\n"], ["m"] * 100, ["m"] * 101, LIMITS)
)


def schema_of(kind: Kind) -> Any:
    return jsonschema_rs.Draft202012Validator(
        {"$ref": f"#/components/schemas/{kind.__name__}", "components": DOCUMENT["components"]}
    )


VALIDATORS = {kind: schema_of(kind) for kind in BODIES}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[Kind, Any]:
    """A good body, of which some fields are left out, and up to two things are changed anywhere."""
    kind = draw(st.sampled_from(list(BODIES)))
    body = copy.deepcopy(BODIES[kind])
    for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=4, unique=True)):
        del body[name]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.sampled_from(list(places(body))))
        value = copy.deepcopy(draw(VALUES))
        if isinstance(place, list):
            place.insert(0, value)
        else:
            place[draw(st.sampled_from(sorted({*place, *BODIES[kind], *CHOICES})))] = value
    return kind, body


@settings(max_examples=400, deadline=None)
@given(bodies())
def test_what_is_accepted_is_what_the_document_allows(given_body: tuple[Kind, Any]) -> None:
    kind, body = given_body
    accepted = True
    try:
        decode(json.dumps(body).encode(), kind, depth_max=64)
    except ApiError as error:
        accepted = False
        assert error.param, "it names the field"
        assert "regex" not in error.message
    assert accepted == VALIDATORS[kind].is_valid(body), list(VALIDATORS[kind].iter_errors(body))[:3]


@pytest.mark.parametrize("name", WORDS)
def test_names_in_urls_are_those_that_the_document_allows(name: str) -> None:
    (parameter,) = DOCUMENT["paths"]["/admin/v1/tenants/{name}"]["put"]["parameters"]
    accepted = True
    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError:
        accepted = False
    assert jsonschema_rs.Draft202012Validator(parameter["schema"]).is_valid(name) == accepted


def test_it_is_valid_and_names_every_handler() -> None:
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    found = described(HANDLERS)
    assert {route.name for route in found} == {handler.handler_name for handler in HANDLERS}
    for handler, route in zip(HANDLERS, found, strict=True):
        asks = admin_only in (handler.guards or ())
        assert ("admin" in route.operation.fails) is asks is (handler.handler_name != "openapi")
        (path,) = handler.paths
        said = DOCUMENT["paths"][path.replace(":str", "")][route.method.lower()]
        assert ("401" in said["responses"]) is ("security" in said) is asks
        assert str(handler.status_code) in said["responses"]


@pytest.mark.timeout(900)
def test_nothing_that_is_made_from_it_is_a_fault_of_ours(model_dir: Path, vocab_size: int) -> None:
    with TemporaryDirectory(prefix="pellucid") as name, contextlib.ExitStack() as stack:
        home = Path(name)
        guard = Guard(stack.enter_context(servers.embedded(home / "v")), home)
        engine = FakeEngine(str(home / "e.sock"), vocab_size=vocab_size, eos_id=EOS_ID)
        engine.start()
        stack.callback(engine.stop)
        options: dict[str, Any] = guard.options
        worker = Workers(model_dir, engine.path, home, 1, admin_key=ADMIN_KEY, **options)
        stack.callback(worker.stop)
        url = f"http://127.0.0.1:{worker.admin_port}"
        document = httpx.get(f"{url}/openapi.json", timeout=WAIT_S).json()
        assert document["paths"] == DOCUMENT["paths"]
        seen = Fuzzer(url, document, headers=bearer(ADMIN_KEY)).ask(CASES)
        show(seen)
        writes = ("POST /admin/v1/keys", "PUT /admin/v1/tenants/{name}", "PUT /admin/v1/organisations/{name}")
        good = {label for label, mode, status in seen if mode == "good" and status in (200, 201)}
        assert good >= {*writes, "GET /admin/v1/keys", "GET /admin/v1/audit"}
        assert {label for label, mode, status in seen if mode == "bad" and status == 400} >= {*writes}
        nobody = Fuzzer(url, document, headers={}, also=frozenset({401})).ask(CASES // 4)
        assert {status for label, _, status in nobody if "/admin/" in label} == {401}
