"""
The document of our HTTP interface (OpenAPI 3.1), made from what the gateway itself goes by: the types and rules of
bodies (gateway.wire), the types of answers (gateway.answers), the tables of errors and of headers, and the handlers.

What is here and nowhere else are words.  Litestar's own generator reads the annotations of handlers; ours take bytes,
because bodies are decoded by hand, so it would have nothing to say.
"""

import re
from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from cache import accounts, key_records
from diagnosis import doctor, why
from gateway import admin_wire, answers, errors, headers, wire
from gateway.config import GatewayOptions, elsewhere
from gateway.errors import ErrorBody, Row, Where
from gateway.wire import NEUTRAL, PROMPTS, RULES, UNSUPPORTED, CompletionRequest, Json

Schema = dict[str, Json]
JSON = "application/json"
EVENTS = "text/event-stream"
_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+):\w+\}")
_UNSUPPORTED = "Not supported yet: only values that ask for nothing are accepted."
_BODIES = (
    "Bodies are JSON in UTF-8: no name twice in one object, no halves of surrogate pairs, at most {depth} levels, at "
    "most {size} bytes, which arrive within {wait_s:g} s.  Fields that are not described are refused.\n\n"
)
_DESCRIPTION = (
    "Some of what the document allows is refused with a 400 because of the model: token ids outside its vocabulary, "
    "prompts that are empty or do not fit its context, messages that its chat template refuses; so are prompts times "
    "`n` over {sequences}.\n\n"
    "An API key is needed as soon as there is one.  Every failure has the same shape; `x-request-id` names the request."
)
_ADMIN_DESCRIPTION = (
    "The admin key is always needed.  Limits hold for a key, for all keys of a tenant, and for all tenants of an "
    "organisation; null or absent: no limit, 0: nothing at all.  Times are Unix times in seconds; what may be spent is "
    "in millionths of the currency of the prices, on a day of UTC.  Each change leaves a line in the audit."
)
_TYPES = (wire, answers, errors, admin_wire, key_records, accounts, why, doctor)
"""Modules that have them."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler says of itself, beside its path, its method and its docstring."""

    answer: type[msgspec.Struct] | None
    """None: an object of which nothing more is said."""
    statuses: tuple[int, ...] = (200,)
    """Those with such an answer."""
    texts: tuple[str, ...] = ()
    """Media types of an answer that is text, and no JSON."""
    body: type[msgspec.Struct] | None = None
    events: type[msgspec.Struct] | None = None
    """What a stream is made of."""
    queries: dict[str, Json] = {}
    """Schemas of parameters in the URL's query; none is required."""
    fails: tuple[Where, ...] = ()


class Route(msgspec.Struct, frozen=True):
    """An operation and where it is found."""

    path: str
    """As litestar has it, with the types of its parameters."""
    method: str
    name: str
    summary: str
    operation: Operation


def document(routes: Sequence[Route], options: GatewayOptions, *, version: str, sequences_max: int) -> Schema:
    """The whole document."""
    words = _DESCRIPTION.format(sequences=sequences_max)
    return _document(routes, options, title="Pellucid", words=words, version=version)


def admin_document(routes: Sequence[Route], options: GatewayOptions, *, version: str) -> Schema:
    """That of the admin interface."""
    return _document(routes, options, title="Pellucid: keys and limits", words=_ADMIN_DESCRIPTION, version=version)


def _document(routes: Sequence[Route], options: GatewayOptions, *, title: str, words: str, version: str) -> Schema:
    paths: dict[str, Json] = {}
    for route in routes:
        item = cast(Schema, paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {}))
        item[route.method.lower()] = _operation(route.operation, route, options)
    bounds = {"depth": options.depth_max, "size": options.body_bytes_max, "wait_s": options.body_timeout_s}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": version,
            "description": _BODIES.format(**bounds) + words,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": cast(Schema, _components([route.operation for route in routes], options)),
            "headers": {header.name: _header(header) for header in headers.TABLE},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation, route: Route, options: GatewayOptions) -> Schema:
    queries: list[Json] = [
        {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in operation.queries.items()
    ]
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": _parameter(name)}
        for name in _PARAMETER.findall(route.path)
    ]
    found: Schema = {"operationId": route.name, "summary": route.summary, "parameters": [*parameters, *queries]}
    if operation.body is not None:
        schema: Schema = {"$ref": _REF.format(name=operation.body.__name__)}
        if operation.events is not None:
            schema = _or_upstreams(schema, options)
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    if "key" in operation.fails:
        found["security"] = [{}, {"bearer": []}, {"x-api-key": []}]  # {}: while there are no keys
    if "admin" in operation.fails:
        found["security"] = [{"bearer": []}, {"x-api-key": []}]
    return found | {"responses": _responses(operation, options)}


def _parameter(name: str) -> Schema:
    """The name of a tenant or organisation, or any other text that no slash ends."""
    if name == "name":
        return cast(Schema, _in_ecma(cast(Json, msgspec.json.schema(key_records.Name))))
    return {"type": "string", "minLength": 1}


def _or_upstreams(own: Schema, options: GatewayOptions) -> Schema:
    """Or a body for a model of an upstream: all else in it is for the upstream to judge."""
    models: list[Json] = [*elsewhere(options)]
    if not models:
        return own
    theirs: Schema = {
        "type": "object",
        "description": "For a model of an upstream, which judges all other fields.",
        "properties": {"model": {"enum": models}},
        "required": ["model"],
    }
    return {"anyOf": [own, theirs]} if options.engines else theirs


# ---- answers


def _responses(operation: Operation, options: GatewayOptions) -> Schema:
    found: Schema = {}
    rows = [row for row in errors.TABLE if not {"every", *operation.fails}.isdisjoint(row.where)]
    for status in sorted({row.status for row in rows} - set(operation.statuses)):
        found[str(status)] = _failure([row for row in rows if row.status == status], operation)
    for status in operation.statuses:
        found[str(status)] = {
            "description": operation.answer.__doc__ if operation.answer is not None else "As it is.",
            "headers": _headers(operation, ()),
            "content": _content(operation, relayed=bool(elsewhere(options))),
        }
    return dict(sorted(found.items()))


def _content(operation: Operation, *, relayed: bool) -> Schema:
    """What an upstream answers is passed on as it is: nothing is promised of it."""
    if operation.texts:
        return {text: {"schema": {"type": "string"}} for text in operation.texts}
    schema: Schema = {"type": "object"}
    if operation.answer is not None:
        schema = {"$ref": _REF.format(name=operation.answer.__name__)}
    if operation.events is None:
        return {JSON: {"schema": schema}}
    theirs: list[Json] = [{"type": "object", "description": "What an upstream says."}] if relayed else []
    alternatives: list[Json] = [schema, *theirs]
    whole: Schema = {"anyOf": alternatives} if relayed else schema
    return {JSON: {"schema": whole}, EVENTS: {"schema": _event(operation.events, theirs)}}


def _event(kind: type[msgspec.Struct], theirs: list[Json]) -> Schema:
    """One server-sent event."""
    parts: list[Json] = [{"$ref": _REF.format(name=name)} for name in (kind.__name__, ErrorBody.__name__)]
    parts += theirs
    chunk: Schema = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": parts}}
    end: Schema = {"type": "string", "const": "[DONE]"}
    words = "With `stream`: events with nothing but data, the last of which is `[DONE]`, or an error and the end."
    return {
        "type": "object",
        "description": words,
        "properties": {"data": {"anyOf": [end, chunk]}},
        "required": ["data"],
    }


def _failure(rows: Sequence[Row], operation: Operation) -> Schema:
    codes: list[Json] = [row.code for row in rows]
    types: list[Json] = list(dict.fromkeys(kind for row in rows for kind in row.types))
    narrowed: Schema = {"properties": {"error": {"properties": {"code": {"enum": codes}, "type": {"enum": types}}}}}
    schema: Schema = {"allOf": [{"$ref": _REF.format(name=ErrorBody.__name__)}, narrowed]}
    return {
        "description": "  ".join(f"`{row.code}`: {row.when}" for row in rows),
        "headers": _headers(operation, rows),
        "content": {JSON: {"schema": schema}},
    }


def _headers(operation: Operation, rows: Sequence[Row]) -> Schema:
    """Those that an answer may have, a failure where there are `rows`; what each of these always has is required."""
    kinds: set[str] = {"every", *operation.fails}
    if "generation" in kinds:
        kinds.add("limited")
    if rows:
        kinds.discard("generation")
    always = set.intersection(*(set(row.headers) for row in rows)) if rows else set()
    sometimes = {name for row in rows for name in (*row.headers, *row.headers_sometimes)}
    found: Schema = {}
    for header in headers.TABLE:
        if header.name in always:
            found[header.name] = _header(header) | {"required": True}
        elif header.kind in kinds or header.name in sometimes:
            found[header.name] = {"$ref": f"#/components/headers/{header.name}"}
    return found


def _header(header: headers.Header) -> Schema:
    schema: Schema = {"type": "string"}
    if header.pattern:
        schema["pattern"] = header.pattern
    return {"description": header.meaning, "required": header.kind == "every", "schema": schema}


# ---- types


def _components(operations: Iterable[Operation], options: GatewayOptions) -> dict[str, Schema]:
    named = {kind for one in operations for kind in (one.body, one.answer, one.events) if kind is not None}
    kinds = sorted(named | {ErrorBody}, key=lambda kind: kind.__name__)
    _, made = msgspec.json.schema_components(kinds, ref_template=_REF)
    components = cast(dict[str, Schema], _in_ecma(cast(Json, made)))
    for name, schema in components.items():
        kind: type[msgspec.Struct] = next(getattr(module, name) for module in _TYPES if hasattr(module, name))
        if kind.__struct_config__.forbid_unknown_fields:  # part of a body: of an answer there may be more
            _complete(schema, kind, options)
        else:
            schema["required"] = list(_always(kind))
    return dict(sorted(components.items()))


def _in_ecma(value: Json) -> Json:
    """A schema whose patterns mean the same to others: Python's anchors are letters to them, and surrogates nothing."""
    if isinstance(value, list):
        return [_in_ecma(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {name: _in_ecma(one) for name, one in value.items()}
    pattern = found.get("pattern")
    if isinstance(pattern, str):
        found["pattern"] = pattern.replace(r"\A", "^").replace(r"\Z", "$").replace(r"\ud800-\udfff", "")
    return found


def _always(kind: type[msgspec.Struct]) -> Iterable[str]:
    """Fields that are in each answer: those without a value are left out."""
    left_out = kind.__struct_config__.omit_defaults
    for field in msgspec.structs.fields(kind):
        if field.required or not (left_out or field.default is msgspec.UNSET):
            yield field.encode_name


def _complete(schema: Schema, kind: type[msgspec.Struct], options: GatewayOptions) -> None:
    """What the type of a body, or of a part of one, does not say."""
    rules = [rule.schema() for base in kind.__mro__ for rule in RULES.get(base, ())]
    if rules:
        schema["allOf"] = cast(list[Json], rules)
    properties = cast(dict[str, Schema], schema["properties"])
    for name, values in UNSUPPORTED.get(kind, {}).items():
        properties[name] = {"enum": [*NEUTRAL, *values], "description": _UNSUPPORTED}
    if kind is CompletionRequest:
        shapes, _ = msgspec.json.schema_components(PROMPTS, ref_template=_REF)
        properties["prompt"] = {"anyOf": [cast(Json, shape) for shape in shapes]}
    _narrow(properties.get("model"), "string", {"const": options.model_name})
    _narrow(properties.get("messages"), "array", {"maxItems": options.messages_max})


def _narrow(schema: Schema | None, kind: str, more: Schema) -> None:
    """Say more of the schema of a field, where that is of this type."""
    if schema is not None:
        for one in (schema, *cast(list[Schema], schema.get("anyOf", []))):
            if one.get("type") == kind:
                one.update(more)
