"""The document says what the gateway does: it allows exactly the bodies that are accepted, and names every handler."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import GatewayOptions, UpstreamOptions
from gateway.decode import decode, split_prompts, token_biases
from gateway.errors import TABLE, ApiError
from gateway.openapi import Schema, document
from gateway.routes import HANDLERS, authenticated, routes
from gateway.wire import (
    RESERVED,
    UNSUPPORTED,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from telemetry.vocabulary import ROUTES
from tests.http.golden import check_golden
from tests.http.guard import Guard
from tests.http.harness import LiveGateway

MESSAGES_MAX = 6
OPTIONS = GatewayOptions(model="x", model_name="tiny", engines=("unix:x",), messages_max=MESSAGES_MAX)
DOCUMENT: Any = document(routes(), OPTIONS, version="1", sequences_max=128)
Kind = type[ChatRequest] | type[CompletionRequest] | type[TokenizeRequest] | type[DetokenizeRequest]
KINDS: tuple[Kind, ...] = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
DECODE: Callable[..., object] = decode
VALIDATORS = {
    kind: jsonschema_rs.Draft202012Validator(
        {"$ref": f"#/components/schemas/{kind.__name__}", "components": DOCUMENT["components"]}
    )
    for kind in KINDS
}


def accepts(kind: Kind, body: object) -> bool:
    """Whether the gateway takes it, as far as that does not depend on the model."""
    try:
        asked = DECODE(json.dumps(body).encode(), kind, depth_max=64)
        if isinstance(asked, CompletionRequest):
            split_prompts(asked.prompt)
        if isinstance(asked, ChatRequest | CompletionRequest):
            token_biases(asked, 10**10)
    except ApiError:
        return False
    reserved = set(RESERVED) & set(getattr(asked, "chat_template_kwargs", None) or ())
    too_many = len(getattr(asked, "messages", None) or ()) > MESSAGES_MAX
    return not reserved and not too_many and getattr(asked, "model", None) in (None, "tiny")


# ---- bodies

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}, "type": "function"}
PART = {"type": "text", "text": "a"}
BODIES: dict[Kind, list[dict[str, Any]]] = {
    ChatRequest: [
        {"model": "tiny", "messages": [USER]},
        {"model": "tiny", "messages": [{"role": "system", "content": [PART, PART]}, USER], "stream": True},
        {
            "model": "tiny",
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "3", "tool_call_id": "1"},
            ],
            "logprobs": True,
            "top_logprobs": 3,
        },
    ],
    CompletionRequest: [
        {"model": "tiny", "prompt": "a"},
        {"model": "tiny", "prompt": [[1, 2], [3]], "echo": True},
        {"model": "tiny", "prompt": ["a"], "logprobs": 2, "stream": True, "stream_options": {"include_usage": True}},
    ],
    TokenizeRequest: [{"prompt": "a"}, {"messages": [USER]}],
    DetokenizeRequest: [{"tokens": [1, 2]}, {"tokens": [], "model": "tiny"}],
}
NUMBERS = (-1, 0, 1, 2, 3, 8, 9, 20, 21, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30)
FLOATS = (0.0, 1.0, -0.0, 0.5, 1.5, 2.0, 2.5, -2.0, -2.1, 100.0, 101.0, 1e18, 1e19, 1e300)
WORDS = ("", "a", "tiny", "other", "auto", "none", "flex", "text", "user", "tool", "assistant", "1", "12345678901")
LONG = ("x" * 512, "x" * 513, "x" * 1024, "x" * 1025, "\U0001f600" * 512)
PLAIN = (None, True, False, *NUMBERS, *FLOATS, *WORDS, *LONG)
KEYS = st.sampled_from(("1", "0007", "", "a", "1\n", "-1", "type", "text", "messages", "tools", "include_usage"))
VALUES = st.recursive(
    st.sampled_from((*PLAIN, USER, CALL, PART)),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=3) | st.just([USER] * 7),
    max_leaves=6,
)


def good(kind: Kind) -> dict[str, list[Any]]:
    """Of each field those plain values, and lists of one, that a good body may have there."""
    base = BODIES[kind][0]
    names = DOCUMENT["components"]["schemas"][kind.__name__]["properties"]
    values = (*PLAIN, *([one] for one in PLAIN), {"1": 1.5}, {"1": 101}, {})
    return {name: [one for one in values if VALIDATORS[kind].is_valid({**base, name: one})] for name in names}


GOOD = {kind: good(kind) for kind in KINDS}


def places(value: object) -> Iterator[Any]:
    """All lists and objects in it."""
    if isinstance(value, dict | list):
        yield value
        for child in value.values() if isinstance(value, dict) else value:
            yield from places(child)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[Kind, object]:
    """A good body, with more good fields, that need not fit together, and with others that are changed anywhere."""
    kind = draw(st.sampled_from(KINDS))
    body = copy.deepcopy(draw(st.sampled_from(BODIES[kind])))
    names = sorted(DOCUMENT["components"]["schemas"][kind.__name__]["properties"]) + sorted(
        ChatMessage.__struct_fields__
    )
    for name in draw(st.lists(st.sampled_from(sorted(GOOD[kind])), max_size=6)):
        if GOOD[kind][name]:
            body[name] = copy.deepcopy(draw(st.sampled_from(GOOD[kind][name])))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.sampled_from(list(places(body))))
        value = copy.deepcopy(draw(VALUES))
        if isinstance(place, list):
            place.insert(draw(st.integers(0, len(place))), value)
        elif place and draw(st.booleans()):
            name = draw(st.sampled_from(sorted(place)))
            place[name] = value
            if draw(st.integers(0, 4)) == 0:
                del place[name]
        else:
            place[draw(st.sampled_from(names))] = value
    return kind, body


@settings(max_examples=600, deadline=None)
@given(bodies())
def test_what_is_accepted_is_what_the_document_allows(given_body: tuple[Kind, object]) -> None:
    kind, body = given_body
    assert accepts(kind, body) == VALIDATORS[kind].is_valid(body), list(VALIDATORS[kind].iter_errors(body))[:3]


@pytest.mark.parametrize("kind", (ChatRequest, CompletionRequest))
def test_fields_that_are_not_supported(kind: Kind) -> None:
    good = BODIES[kind][0]
    for name, neutral in UNSUPPORTED[kind].items():
        for value in (None, [], {}, False, True, 0, 1, 1.0, "", "x", ["text"], {"type": "text"}, *neutral):
            body = {**good, name: value}
            assert accepts(kind, body) == VALIDATORS[kind].is_valid(body), (name, value)


# ---- routes


def test_it_is_valid() -> None:
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    assert len(json.dumps(DOCUMENT)) < 200_000


def test_every_handler_is_in_it_and_those_with_a_key_say_so() -> None:
    described = {route.name: route for route in routes()}
    assert set(described) == {handler.handler_name for handler in HANDLERS}
    for handler in HANDLERS:
        asks = authenticated in (handler.guards or ())
        assert ("key" in described[handler.handler_name].operation.fails) is asks, handler.handler_name
    shown = {path.replace("{model_id}", "{id}").replace("{request_id}", "{id}") for path in DOCUMENT["paths"]}
    assert shown == set(ROUTES) - {"/admin", "other"}


def test_every_error_is_in_it() -> None:
    shown = set()
    for item in DOCUMENT["paths"].values():
        for operation in item.values():
            for status, response in operation["responses"].items():
                schema = response["content"].get("application/json", {}).get("schema", {})
                if "allOf" in schema:
                    codes = schema["allOf"][1]["properties"]["error"]["properties"]["code"]["enum"]
                    shown |= {(int(status), code) for code in codes}
    assert shown == {(row.status, row.code) for row in TABLE if row.where != ("url",)}


def test_what_each_route_says() -> None:
    lines = []
    for path, item in DOCUMENT["paths"].items():
        for method, operation in item.items():
            lines.append(f"{method.upper()} {path}: {operation['summary']}")
            for status, response in operation["responses"].items():
                names = [name for name in response["headers"] if not name.startswith("x-ratelimit")]
                lines.append(f"  {status} {' '.join(response['content'])} [{' '.join(names)}]")
    check_golden("openapi.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("engines", [("unix:x",), ()])
def test_models_of_upstreams_are_in_it(engines: tuple[str, ...]) -> None:
    tables = [UpstreamOptions(name=name, url="http://h", model=name) for name in ("far", "tiny")]
    options = msgspec.structs.replace(OPTIONS, engines=engines, upstreams=tuple(tables))
    found: Any = document(routes(), options, version="1", sequences_max=128)
    schemathesis.openapi.from_dict(found).validate()
    for path, good in (("/v1/chat/completions", {"messages": [USER]}), ("/v1/completions", {"prompt": "a"})):
        schema = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        allows = jsonschema_rs.Draft202012Validator({**schema, "components": found["components"]}).is_valid
        assert allows({"model": "far", **good, "tools": [{"type": "function"}], "new": 1})
        assert allows({"model": "tiny", **good})
        assert allows({"model": "tiny", **good, "new": 1}) is not bool(engines), "what is served here is served here"
        assert not allows(good)
        assert not allows({"model": "another", **good})


def test_it_is_served_to_everybody(guard: Guard, custom: Any) -> None:
    guard.create()
    gateway: LiveGateway = custom(**guard.options)[0]
    answer = gateway.client.get("/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    found: Schema = answer.json()
    assert found == gateway.application.document()
    assert gateway.client.get("/v1/models").status_code == 401
