"""
Every way in which a request can fail, as the client sees it.

    TABLE                               status, code and type of each; the OpenAPI document is made from it
    ApiError                            an OpenAI error: status, type, code, param, message
      invalid(), missing(), unknown()   400, the client's fault, `param` names the field
      no_engine(), overloaded(), ...    503 and friends, ours, with retry-after where trying again may help

Foreign failures are mapped in two places: `of_finish` for what an engine says, `of_http` for what the framework says.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from engine.api import DEGENERATE, Finish

RETRY_AFTER_S = 1
DRAIN_RETRY_AFTER_S = 5

Where = Literal["every", "key", "body", "name", "model", "generation", "admin", "key_id", "live", "url"]
"""
Which requests can meet it: all, those that need a key, have a body, name something in their URL, name a model, have
something generated, need the admin key, name a key in their URL, are streams for those who look; those to no route.
"""
INVALID = "invalid_request_error"
SERVER = "server_error"
_AFTER = ("retry-after", "retry-after-ms")


class Row(msgspec.Struct, frozen=True):
    """One kind of error."""

    status: int
    code: str
    when: str
    where: tuple[Where, ...]
    types: tuple[str, ...] = (INVALID,)
    """The usual one first."""
    headers: tuple[str, ...] = ()
    """Those that it always has, beside those of every response."""
    headers_sometimes: tuple[str, ...] = ()


TABLE = (
    Row(400, "invalid_value", "A value is not acceptable; `param` names the field.", ("body", "every")),
    Row(400, "missing_required_parameter", "A field that must be there is not.", ("body",)),
    Row(400, "unknown_parameter", "A field that nobody knows.", ("body",)),
    Row(400, "context_length_exceeded", "Prompt and output do not fit the model's context.", ("generation",)),
    Row(400, "request_refused", "Engines have died of this request.", ("generation",)),
    Row(401, "invalid_api_key", "No API key, or none that is good.", ("key", "admin"), headers=("www-authenticate",)),
    Row(403, "model_not_allowed", "The key is not for this model.", ("model",), ("permission_error",)),
    Row(404, "model_not_found", "No such model is served.", ("model", "name")),
    Row(404, "not_found", "There is nothing at this URL.", ("name", "key_id", "url")),
    Row(405, "method_not_allowed", "The URL knows other methods.", ("url",), headers=("allow",)),
    Row(408, "request_timeout", "The body did not arrive in time.", ("body",), ("timeout_error",)),
    Row(413, "request_too_large", "The body is over the limit.", ("body",)),
    Row(415, "unsupported_media_type", "The content type is not JSON.", ("body",)),
    Row(429, "rate_limit_exceeded", "A limit is reached; wait.", ("generation",), ("requests", "tokens"), _AFTER),
    Row(
        429,
        "insufficient_quota",
        "Waiting does not help, or not today.",
        ("generation",),
        ("insufficient_quota",),
        ("x-should-retry",),
        _AFTER,
    ),
    Row(431, "request_too_large", "The headers are over the limit.", ("every",)),
    Row(500, "internal_error", "A fault of ours.", ("every",), (SERVER,)),
    Row(500, DEGENERATE, "The model's numbers are none, or one token repeats.", ("generation",), (SERVER,)),
    Row(
        502,
        "bad_gateway",
        "The engine, or the upstream, failed with the request in its hands.",
        ("generation",),
        (SERVER,),
    ),
    Row(503, "overloaded", "There are too many already.", ("generation", "live"), (SERVER,), _AFTER),
    Row(
        503,
        "no_healthy_engine",
        "No engine, or no upstream, could take the request.",
        ("generation",),
        (SERVER,),
        _AFTER,
    ),
    Row(503, "draining", "The server is shutting down.", ("generation", "live"), (SERVER,), _AFTER),
    Row(503, "keys_unavailable", "API keys cannot be checked at the moment.", ("key", "admin"), (SERVER,), _AFTER),
    Row(503, "limits_unavailable", "Limits cannot be checked at the moment.", ("generation",), (SERVER,), _AFTER),
    Row(
        504, "engine_timeout", "The engine, or the upstream, was silent, or took too long.", ("generation",), (SERVER,)
    ),
)
_TYPES = {(row.status, row.code): row.types[0] for row in TABLE}


class ErrorObject(msgspec.Struct, frozen=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The JSON of every failure, and of the last event of a stream that fails half-way."""

    error: ErrorObject


class ApiError(Exception):
    """A failure that has words for the client.  Its text never holds a prompt, a key or a class name."""

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        kind: str = "",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        outcome: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.kind = kind or _TYPES.get((status, code or ""), INVALID if status < 500 else SERVER)
        self.param = param
        self.headers = dict(headers or {})
        self.outcome = outcome or ("invalid" if status < 500 else code or "failed")
        """What the request's record says of its end."""

    def body(self) -> bytes:
        """The JSON."""
        return msgspec.json.encode(ErrorBody(ErrorObject(self.message, self.kind, self.param, self.code)))


def invalid(message: str, param: str | None = None) -> ApiError:
    """A value that is not acceptable."""
    return ApiError(400, "invalid_value", message, param=param)


def missing(param: str) -> ApiError:
    """A field that must be there is not."""
    return ApiError(400, "missing_required_parameter", f"Missing required parameter: '{param}'.", param=param)


def unknown(param: str, nearest: str | None) -> ApiError:
    """A field that nobody knows."""
    hint = f" Did you mean '{nearest}'?" if nearest else ""
    return ApiError(400, "unknown_parameter", f"Unknown parameter: '{param}'.{hint}", param=param)


def unsupported(param: str, what: str = "") -> ApiError:
    """A field that OpenAI knows and we cannot honour: refused by name, never ignored in silence."""
    return invalid(f"'{param}' is not supported by this server yet{': ' + what if what else ''}.", param)


def context_exceeded(*, prompt_tokens: int, tokens_max: int, context_max: int, param: str) -> ApiError:
    """The prompt and what is to be generated do not fit the model's context."""
    message = (
        f"This model's maximum context length is {context_max} tokens. However, you requested "
        f"{prompt_tokens + tokens_max} tokens ({prompt_tokens} in the prompt, {tokens_max} for the output)."
    )
    return ApiError(400, "context_length_exceeded", message, param=param)


def not_remembered(silent: Sequence[int]) -> ApiError:
    """No worker that has answered knows that request; those in `silent` have not."""
    missing = f" Workers that do not answer: {list(silent)}." if silent else ""
    return ApiError(404, "not_found", f"No such request is remembered.{missing}", outcome="not_found")


def model_not_found(model: str) -> ApiError:
    """The name is none of ours."""
    return ApiError(
        404, "model_not_found", f"The model {model[:100]!r} does not exist.", param="model", outcome="not_found"
    )


def unauthorized(what: str = "A valid API key") -> ApiError:
    """No key, or none that is good: one text for all reasons."""
    message = f"{what} is needed: 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
    return ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"}, outcome="unauthorized")


def model_not_allowed(model: str) -> ApiError:
    """The key is not for this model."""
    message = f"This API key may not use the model {model[:100]!r}."
    return ApiError(403, "model_not_allowed", message, param="model", outcome="forbidden")


def too_large(limit_bytes: int) -> ApiError:
    """The body is over the limit."""
    message = f"The request body is over the limit of {limit_bytes} bytes."
    return ApiError(413, "request_too_large", message)


def head_too_large(limit_bytes: int) -> ApiError:
    """The headers are over the limit."""
    message = f"The request headers are over the limit of {limit_bytes} bytes."
    return ApiError(431, "request_too_large", message, headers={"connection": "close"})


def too_many_headers(limit: int) -> ApiError:
    """There are more headers than anybody needs."""
    message = f"The request has more than {limit} headers."
    return ApiError(431, "request_too_large", message, headers={"connection": "close"})


def no_http() -> ApiError:
    """Nobody can say where this request ends, or what it asks."""
    return ApiError(400, "invalid_value", "The request is not valid HTTP.", headers={"connection": "close"})


def header_twice(name: str) -> ApiError:
    """Two readers of this request might go by different ones of them."""
    return ApiError(
        400, "invalid_value", f"The header '{name}' must not be sent twice.", headers={"connection": "close"}
    )


def too_slow(limit_s: float) -> ApiError:
    """The body did not arrive in time."""
    message = f"The request body did not arrive within {limit_s:g} s."
    return ApiError(408, "request_timeout", message, outcome="timeout")


def media_type() -> ApiError:
    """The body is not JSON, by its own account."""
    return ApiError(415, "unsupported_media_type", "The content type must be 'application/json'.")


def _unavailable(code: str, message: str, retry_after_s: int, **headers: str) -> ApiError:
    after = {"retry-after": str(retry_after_s), "retry-after-ms": str(retry_after_s * 1000)}
    return ApiError(503, code, message, headers=after | headers, outcome=code)


def overloaded(message: str) -> ApiError:
    """The queue is full."""
    return _unavailable("overloaded", message, RETRY_AFTER_S)


def keys_unavailable(message: str = "API keys cannot be checked at the moment; try again shortly.") -> ApiError:
    """Nobody can say whether the key is good."""
    return _unavailable("keys_unavailable", message, RETRY_AFTER_S)


def limits_unavailable() -> ApiError:
    """Nobody can say what is left, and this tenant is not to be served without."""
    return _unavailable(
        "limits_unavailable", "Limits cannot be checked at the moment; try again shortly.", RETRY_AFTER_S
    )


def no_engine(message: str = "No engine is available at the moment; try again shortly.") -> ApiError:
    """Nobody could take the request."""
    return _unavailable("no_healthy_engine", message, RETRY_AFTER_S)


def draining() -> ApiError:
    """This server is on its way out."""
    return _unavailable("draining", "The server is shutting down.", DRAIN_RETRY_AFTER_S, connection="close")


def engine_lost() -> ApiError:
    """The engine died with the request in its hands."""
    message = "The engine that served this request went away."
    return ApiError(502, "bad_gateway", message, outcome="engine_lost")


def poisonous() -> ApiError:
    """It has killed engines, and may not try it on the next one."""
    message = "Engines have died of this request; it is refused for some minutes."
    return ApiError(400, "request_refused", message, outcome="poisonous")


def engine_timeout(message: str) -> ApiError:
    """The engine was silent for too long, or the whole took too long."""
    return ApiError(504, "engine_timeout", message, outcome="timeout")


def internal() -> ApiError:
    """A fault of ours; the log says which."""
    message = "The server had an error while it processed your request."
    return ApiError(500, "internal_error", message, outcome="error")


def of_finish(finish: Finish) -> ApiError | None:
    """What an engine's last word means for the client; None: all is well."""
    if finish.reason in ("stop", "length"):
        return None
    fault = finish.fault
    message = fault.message if fault else "The engine gave up on this request."
    match finish.reason:
        case "overloaded":
            return overloaded(message)
        case "refused":
            code, param = (fault.code, fault.param) if fault else ("invalid_value", None)
            return ApiError(400, code, message, param=param, outcome="refused")
        case "failed" if fault is not None and fault.code == DEGENERATE:
            return ApiError(500, DEGENERATE, message, outcome="failed")
        case "deadline":
            return ApiError(504, "engine_timeout", message, outcome="deadline")
        case "shutdown":
            return no_engine("The engine is shutting down; try again shortly.")
        case _:
            failed = internal()
            failed.outcome = finish.reason
            return failed  # What a fault says is for the log: it may name parts of ours.


def client_gone() -> ApiError:
    """Nobody is there to read this; the status is for logs and metrics only."""
    return ApiError(499, None, "The client closed the connection.", outcome="client_gone")


def of_http(status: int, method: str, path: str) -> ApiError:
    """What the framework refused."""
    match status:
        case 404:
            return ApiError(404, "not_found", f"Unknown request URL: {method} {path[:200]}.", outcome="not_found")
        case 405:
            return ApiError(405, "method_not_allowed", f"Method {method} is not allowed for {path[:200]}.")
        case _ if 400 <= status < 500:
            return ApiError(400, "invalid_value", "The request is not acceptable.")
        case _:
            return internal()
