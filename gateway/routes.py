"""
URLs and methods.  All decisions are in `gateway.service`; here is only what HTTP needs, and what the
document says of it.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import msgspec
import structlog
from litestar import Request, Response, get, post
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.handlers.base import BaseRouteHandler
from litestar.params import FromPath, FromQuery
from litestar.types import ASGIApp, Receive, Scope, Send

from diagnosis.doctor import Report
from diagnosis.why import Why
from gateway import errors, page
from gateway.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    DebugKv,
    DebugRequest,
    DebugRequests,
    DebugSteps,
    Detokenized,
    Health,
    Model,
    Models,
    Ready,
    Tokenized,
)
from gateway.errors import ApiError, Where
from gateway.exchange import Exchange, exchange_of
from gateway.explain import SECONDS
from gateway.openapi import Operation, Route
from gateway.service import Answer, Gateway
from gateway.wire import ChatRequest, CompletionRequest, DetokenizeRequest, Json, TokenizeRequest

_log = structlog.get_logger("pellucid.gateway")

_STREAM_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}
_JSON = "application/json"

AnyConnection = ASGIConnection[Any, Any, Any, Any]  # Any: as litestar's own type of a guard has it
AnyRequest = Request[object, object, State]


def json_response(value: Json | msgspec.Struct, *, status: int = 200) -> Response[bytes]:
    """A value as JSON."""
    return Response(msgspec.json.encode(value), media_type=_JSON, status_code=status)


def _reply(answer: Answer) -> ASGIApp:
    """An answer as it is: litestar's own Stream makes two tasks more for each, and costs as much again per event."""
    headers, body = answer
    if isinstance(body, bytes):
        head = {"content-type": _JSON, "content-length": str(len(body)), **headers}
    else:
        head = {"content-type": "text/event-stream; charset=utf-8", **headers, **_STREAM_HEADERS}
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in head.items()]

    async def reply(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": encoded})
        if isinstance(body, bytes):
            await send({"type": "http.response.body", "body": body, "more_body": False})
            return
        async for data, more in body:
            await send({"type": "http.response.body", "body": data, "more_body": more})

    return reply


def _gateway_of(scope: Scope) -> Gateway:
    """For the routes that are in a hurry: two dependencies are two tasks, each time."""
    return provide_gateway(scope["litestar_app"].state)


OPERATION = "operation"


def routes() -> list[Route]:
    """All handlers, for the document."""
    return described(HANDLERS)


def described(handlers: Iterable[HTTPRouteHandler]) -> list[Route]:
    """What handlers say of themselves."""
    return [
        Route(path, method, handler.handler_name, inspect.getdoc(handler.fn) or "", handler.opt[OPERATION])
        for handler in handlers
        for path in sorted(handler.paths)
        for method in sorted(handler.http_methods)
    ]


async def authenticated(connection: AnyConnection, _: BaseRouteHandler) -> None:
    """A guard: a key, where keys are needed.  It comes before the body is read."""
    await provide_gateway(connection.app.state).authenticate(exchange_of(connection.scope))


_TEXT: tuple[Where, ...] = ("body", "key", "model")
_GENERATION: tuple[Where, ...] = (*_TEXT, "generation")


@post(
    "/v1/chat/completions",
    guards=[authenticated],
    status_code=200,
    opt={OPERATION: Operation(answer=ChatCompletion, body=ChatRequest, events=ChatChunk, fails=_GENERATION)},
)
async def chat_completions(scope: Scope) -> ASGIApp:
    """Answer a conversation."""
    return _reply(await _gateway_of(scope).chat(exchange_of(scope)))


@post(
    "/v1/completions",
    guards=[authenticated],
    status_code=200,
    opt={OPERATION: Operation(answer=Completion, body=CompletionRequest, events=CompletionChunk, fails=_GENERATION)},
)
async def completions(scope: Scope) -> ASGIApp:
    """Continue a text."""
    return _reply(await _gateway_of(scope).complete(exchange_of(scope)))


@post(
    "/tokenize",
    guards=[authenticated],
    status_code=200,
    opt={OPERATION: Operation(answer=Tokenized, body=TokenizeRequest, fails=_TEXT)},
)
async def tokenize(gateway: NamedDependency[Gateway], exchange: NamedDependency[Exchange]) -> Response[bytes]:
    """Text or messages as token ids."""
    return json_response(await gateway.tokenize(exchange))


@post(
    "/detokenize",
    guards=[authenticated],
    status_code=200,
    opt={OPERATION: Operation(answer=Detokenized, body=DetokenizeRequest, fails=_TEXT)},
)
async def detokenize(gateway: NamedDependency[Gateway], exchange: NamedDependency[Exchange]) -> Response[bytes]:
    """Token ids as text."""
    return json_response(await gateway.detokenize(exchange))


@get("/v1/models", guards=[authenticated], opt={OPERATION: Operation(answer=Models, fails=("key",))})
async def models(gateway: NamedDependency[Gateway]) -> Response[bytes]:
    """All models: ours, and those of upstreams."""
    return json_response({"object": "list", "data": gateway.models.all()})


@get(
    "/v1/models/{model_id:path}",
    guards=[authenticated],
    opt={OPERATION: Operation(answer=Model, fails=("key", "name"))},
)
async def model(gateway: NamedDependency[Gateway], model_id: FromPath[str]) -> Response[bytes]:
    """A model by its name, which may hold slashes."""
    return json_response(gateway.models.named(model_id.removeprefix("/")))


@get("/health", opt={OPERATION: Operation(answer=Health)})
async def health(gateway: NamedDependency[Gateway]) -> Response[bytes]:
    """The process is alive."""
    return json_response(gateway.health())


@get("/ready", opt={OPERATION: Operation(answer=Ready, statuses=(200, 503))})
async def ready(gateway: NamedDependency[Gateway], exchange: NamedDependency[Exchange]) -> Response[bytes]:
    """Whether requests would be served: 503 and the reason if not."""
    is_ready, state = gateway.ready()
    if not is_ready:
        exchange.outcome = "draining" if gateway.draining else "no_healthy_engine"
    return json_response(state, status=200 if is_ready else 503)


@get("/metrics", opt={OPERATION: Operation(answer=None, texts=("text/plain", "application/openmetrics-text"))})
async def metrics(gateway: NamedDependency[Gateway], exchange: NamedDependency[Exchange]) -> Response[bytes]:
    """The metric catalogue, for Prometheus."""
    text, media_type = await gateway.siblings.metrics(exchange.headers.get("accept", ""))
    return Response(text, media_type=media_type)


@get("/openapi.json", opt={OPERATION: Operation(answer=None)})
async def openapi(state: State) -> Response[bytes]:
    """This document.  It needs no key: it is the same for all, and says nothing of what the server did."""
    document: bytes = state["document"]
    return Response(document, media_type=_JSON)


@get("/debug/requests", guards=[authenticated], opt={OPERATION: Operation(answer=DebugRequests, fails=("key",))})
async def debug_requests(gateway: NamedDependency[Gateway], exchange: NamedDependency[Exchange]) -> Response[bytes]:
    """The newest requests and where their time went; with a key, those of its tenant."""
    return json_response(await gateway.debug_requests(exchange.ticket))


@get(
    "/debug/requests/{request_id:str}",
    guards=[authenticated],
    opt={OPERATION: Operation(answer=DebugRequest, fails=("key", "name"))},
)
async def debug_request(
    gateway: NamedDependency[Gateway], exchange: NamedDependency[Exchange], request_id: FromPath[str]
) -> Response[bytes]:
    """One request."""
    return json_response(await gateway.debug_request(request_id, exchange.ticket))


@get("/debug/steps", guards=[authenticated], opt={OPERATION: Operation(answer=DebugSteps, fails=("key",))})
async def debug_steps(gateway: NamedDependency[Gateway]) -> Response[bytes]:
    """The newest engine steps."""
    return json_response(gateway.hub.debug_steps())


@get(
    "/debug/why/{request_id:str}",
    guards=[authenticated],
    opt={OPERATION: Operation(answer=Why, fails=("key", "name"))},
)
async def debug_why(
    gateway: NamedDependency[Gateway], exchange: NamedDependency[Exchange], request_id: FromPath[str]
) -> Response[bytes]:
    """Why one request took as long as it did, in plain words."""
    return json_response(await gateway.explain.request(request_id, exchange.ticket))


@get(
    "/debug/doctor",
    guards=[authenticated],
    opt={OPERATION: Operation(answer=Report, fails=("key",), queries={"seconds": SECONDS})},
)
async def debug_doctor(
    gateway: NamedDependency[Gateway], exchange: NamedDependency[Exchange], seconds: FromQuery[str] = "300"
) -> Response[bytes]:
    """What carries the slow requests of the last seconds, and what would help."""
    return json_response(await gateway.explain.system(seconds, exchange.ticket))


@get("/debug/kv", guards=[authenticated], opt={OPERATION: Operation(answer=DebugKv, fails=("key",))})
async def debug_kv(gateway: NamedDependency[Gateway]) -> Response[bytes]:
    """Where the KV slots are."""
    return json_response(gateway.hub.debug_kv())


@get(
    "/debug/live",
    guards=[authenticated],
    opt={OPERATION: Operation(answer=None, texts=("text/event-stream",), fails=("key", "live"))},
)
async def debug_live(scope: Scope) -> ASGIApp:
    """All of that as it changes, for as long as somebody looks; with a key, the requests of its tenant."""
    return _reply(({}, _gateway_of(scope).live.open(exchange_of(scope))))


@get("/", opt={OPERATION: Operation(answer=None, texts=("text/html",))})
async def index(exchange: NamedDependency[Exchange], state: State) -> Response[bytes]:
    """The live page, which shows what `/debug/live` says."""
    return _file(state, page.INDEX, exchange)


@get(
    "/page/{name:str}",
    opt={OPERATION: Operation(answer=None, texts=("text/css", "text/javascript", "image/svg+xml"), fails=("name",))},
)
async def page_file(exchange: NamedDependency[Exchange], state: State, name: FromPath[str]) -> Response[bytes]:
    """A file that the live page needs."""
    return _file(state, name, exchange)


def _file(state: State, name: str, exchange: Exchange) -> Response[bytes]:
    files: dict[str, page.File] = state["page"]
    if name not in files:
        raise ApiError(404, "not_found", "The live page has no such file.", outcome="not_found")
    body, own = files[name]
    if exchange.headers.get("if-none-match") == own["etag"]:
        return Response(b"", status_code=304, headers=own)
    return Response(body, headers=own)


HANDLERS = (
    chat_completions,
    completions,
    tokenize,
    detokenize,
    models,
    model,
    health,
    ready,
    metrics,
    openapi,
    debug_requests,
    debug_request,
    debug_steps,
    debug_why,
    debug_doctor,
    debug_kv,
    debug_live,
    index,
    page_file,
)


def provide_gateway(state: State) -> Gateway:
    """The gateway of this application."""
    gateway = state["gateway"]
    assert isinstance(gateway, Gateway)
    return gateway


def provide_exchange(scope: Scope) -> Exchange:
    """The exchange that the request belongs to."""
    return exchange_of(scope)


def on_api_error(request: AnyRequest, error: ApiError) -> Response[bytes]:
    """An ApiError as its response."""
    exchange = exchange_of(request.scope)
    exchange.outcome = exchange.outcome or error.outcome
    exchange.live.error = error.code or ""
    return Response(error.body(), status_code=error.status, media_type=_JSON, headers=error.headers)


def on_crash(request: AnyRequest, error: Exception) -> Response[bytes]:
    """A fault of ours: the facts go to the log, the client gets an apology."""
    _log.error("request crashed", path=request.url.path[:200], exc_info=error)
    return on_api_error(request, errors.internal())


def on_http_error(request: AnyRequest, error: HTTPException) -> Response[bytes]:
    """What the framework refuses, in our words."""
    response = on_api_error(request, errors.of_http(error.status_code, request.method, request.url.path))
    allow = (error.headers or {}).get("allow") or (error.headers or {}).get("Allow")
    if allow:
        response.headers["allow"] = allow
    return response
