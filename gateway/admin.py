"""
The admin interface: API keys, tenants and organisations over HTTP, on a port of its own, for who has the admin key.

It does what `pellucid keys` does, through the same functions: each change is an audit line on the server that keeps the
keys, written with it or not at all.  Requests pass the same bounds and the same decoder as all others, and are counted
as `/admin`; they are no part of the interface for applications, so browsers are told nothing.

Each worker serves it, on a socket that all of them inherit: none of them is needed for it.
"""

import hashlib
import hmac
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import structlog
from litestar import Litestar, Response, get, post, put
from litestar.datastructures import State
from litestar.di import NamedDependency, Provide
from litestar.exceptions import HTTPException
from litestar.handlers.base import BaseRouteHandler
from litestar.params import FromPath

from cache.connection import Store
from cache.errors import Misconfigured, NotAllowed, Unavailable
from cache.key_records import NAME_RULE, Issued, Key, Name, Organisation, ShownKey, Tenant
from cache.keys import Keys
from cache.pepper import UNSET, pepper_for_digest
from cache.redis_url import parse_redis_url
from gateway import errors
from gateway.admin_wire import (
    AuditLines,
    KeyList,
    NewKey,
    OrganisationChange,
    OrganisationList,
    Rotation,
    TenantChange,
    TenantList,
)
from gateway.admission import presented_key
from gateway.config import GatewayOptions
from gateway.decode import T, decode
from gateway.errors import ApiError, Where
from gateway.exchange import Exchange, exchange_of
from gateway.front import Front
from gateway.openapi import Operation, admin_document
from gateway.routes import (
    OPERATION,
    AnyConnection,
    AnyRequest,
    described,
    json_response,
    on_api_error,
    on_crash,
    on_http_error,
    provide_exchange,
)
from telemetry.hub import Hub

BODY_BYTES_MAX = 64 * 1024
CONNECTIONS_MAX = 64
COMMAND_TIMEOUT_MS = 2000
"""A person waits longer than a request."""
AUDIT_LINES = 100

_log = structlog.get_logger("pellucid.admin")


class Admin:
    """What the handlers share."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._key_digest = hashlib.sha256(options.admin_key).digest()
        self._pepper_file = Path(options.pepper_file)
        self._store = Store(
            parse_redis_url(options.redis_url),
            connect_timeout_ms=COMMAND_TIMEOUT_MS,
            command_timeout_ms=COMMAND_TIMEOUT_MS,
        )
        self.keys = Keys(self._store, UNSET)
        """For all that makes no digest."""

    def knows(self, presented: str) -> bool:
        """Whether that is the admin key.  It takes the same time whatever it is, for each length."""
        digest = hashlib.sha256(presented.encode(errors="replace")).digest()
        return hmac.compare_digest(digest, self._key_digest)

    async def keys_with_pepper(self) -> Keys:
        """For what makes a digest.  Raises NotAllowed, Unavailable, Misconfigured."""
        return Keys(self._store, await pepper_for_digest(self._pepper_file, os.environ, self.keys.count))

    async def read(self, exchange: Exchange, kind: type[T]) -> T:
        """A body of this kind.  Raises ApiError."""
        return decode(await exchange.read_body(), kind, depth_max=self._options.depth_max)

    async def find(self, key_id: str) -> ShownKey:
        """Raises ApiError: there is no such key."""
        found = await self.keys.get(key_id)
        if found is None:
            raise ApiError(404, "not_found", "There is no such key.", outcome="not_found")
        return shown(found)

    async def aclose(self) -> None:
        """Let the connection go."""
        await self._store.aclose()


def shown(key: Key) -> ShownKey:
    """A key, and what it is good for now."""
    return key.shown(int(time.time()))


def named(name: str) -> str:
    """The name in a URL.  Raises ApiError: it is none."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise errors.invalid(f"The name in the URL must be {NAME_RULE}.", "name") from None


def actor_of(request: AnyRequest, action: str, target: str) -> str:
    """Who asks, for the audit; that it was asked is in the log too."""
    actor = f"admin:{request.client.host if request.client is not None else 'nobody'}"
    _log.info("admin request", action=action, target=target, actor=actor)
    return actor


async def admin_only(connection: AnyConnection, _: BaseRouteHandler) -> None:
    """A guard: the admin key.  It comes before the body is read."""
    exchange = exchange_of(connection.scope)
    if not provide_admin(connection.app.state).knows(presented_key(exchange.headers)):
        _log.warning("admin key refused", client=connection.client.host if connection.client is not None else "")
        raise errors.unauthorized("The admin key")


AdminIs = NamedDependency[Admin]
ExchangeIs = NamedDependency[Exchange]
_READS: tuple[Where, ...] = ("admin",)
_WRITES: tuple[Where, ...] = ("admin", "body")


@get("/openapi.json", opt={OPERATION: Operation(answer=None)})
async def openapi(state: State) -> Response[bytes]:
    """This document.  It needs no key: it is the same for all, and says nothing of what the server did."""
    return Response(state["document"], media_type="application/json")


@get("/admin/v1/keys", guards=[admin_only], opt={OPERATION: Operation(answer=KeyList, fails=_READS)})
async def list_keys(admin: AdminIs) -> Response[bytes]:
    """All keys, without their secrets."""
    return json_response(KeyList([shown(key) for key in await admin.keys.list_keys()]))


@get(
    "/admin/v1/keys/{key_id:str}",
    guards=[admin_only],
    opt={OPERATION: Operation(answer=ShownKey, fails=(*_READS, "key_id"))},
)
async def one_key(admin: AdminIs, key_id: FromPath[str]) -> Response[bytes]:
    """One key, without its secret."""
    return json_response(await admin.find(key_id))


@post(
    "/admin/v1/keys",
    guards=[admin_only],
    opt={OPERATION: Operation(answer=Issued, body=NewKey, statuses=(201,), fails=_WRITES)},
)
async def create_key(admin: AdminIs, exchange: ExchangeIs, request: AnyRequest) -> Response[bytes]:
    """A new key.  Its secret is shown this once."""
    asked = await admin.read(exchange, NewKey)
    keys = await admin.keys_with_pepper()
    issued = await keys.create(
        tenant=asked.tenant,
        actor=actor_of(request, "create", asked.tenant),
        label=asked.label,
        limits=asked.limits,
        models=asked.models,
        priority=asked.priority,
        weight=asked.weight,
        expires_s=None if asked.expires_in_s is None else int(time.time()) + asked.expires_in_s,
    )
    return json_response(issued, status=201)


@post(
    "/admin/v1/keys/{key_id:str}/revoke",
    guards=[admin_only],
    status_code=200,
    opt={OPERATION: Operation(answer=ShownKey, fails=(*_READS, "key_id"))},
)
async def revoke_key(admin: AdminIs, request: AnyRequest, key_id: FromPath[str]) -> Response[bytes]:
    """End a key; gateways follow within 3 seconds."""
    await admin.find(key_id)
    return json_response(shown(await admin.keys.revoke(key_id, actor=actor_of(request, "revoke", key_id))))


@post(
    "/admin/v1/keys/{key_id:str}/rotate",
    guards=[admin_only],
    status_code=200,
    opt={OPERATION: Operation(answer=Issued, body=Rotation, fails=(*_WRITES, "key_id"))},
)
async def rotate_key(
    admin: AdminIs, exchange: ExchangeIs, request: AnyRequest, key_id: FromPath[str]
) -> Response[bytes]:
    """A new secret for a key, shown this once; the old one may be good for a while."""
    asked = await admin.read(exchange, Rotation)
    await admin.find(key_id)
    keys = await admin.keys_with_pepper()
    actor = actor_of(request, "rotate", key_id)
    return json_response(await keys.rotate(key_id, actor=actor, grace_s=asked.grace_s))


@get("/admin/v1/tenants", guards=[admin_only], opt={OPERATION: Operation(answer=TenantList, fails=_READS)})
async def list_tenants(admin: AdminIs) -> Response[bytes]:
    """All tenants and their limits."""
    return json_response(TenantList(await admin.keys.list_tenants()))


@put(
    "/admin/v1/tenants/{name:str}",
    guards=[admin_only],
    opt={OPERATION: Operation(answer=Tenant, body=TenantChange, fails=_WRITES)},
)
async def change_tenant(
    admin: AdminIs, exchange: ExchangeIs, request: AnyRequest, name: FromPath[str]
) -> Response[bytes]:
    """Make a tenant, or change it; gateways follow within 3 seconds."""
    asked = await admin.read(exchange, TenantChange)
    actor = actor_of(request, "tenant", named(name))
    changed = await admin.keys.change_tenant(
        name, actor=actor, organisation=asked.organisation, limits=asked.limits, policy=asked.policy
    )
    return json_response(changed)


@get(
    "/admin/v1/organisations",
    guards=[admin_only],
    opt={OPERATION: Operation(answer=OrganisationList, fails=_READS)},
)
async def list_organisations(admin: AdminIs) -> Response[bytes]:
    """All organisations and their limits."""
    return json_response(OrganisationList(await admin.keys.list_organisations()))


@put(
    "/admin/v1/organisations/{name:str}",
    guards=[admin_only],
    opt={OPERATION: Operation(answer=Organisation, body=OrganisationChange, fails=_WRITES)},
)
async def change_organisation(
    admin: AdminIs, exchange: ExchangeIs, request: AnyRequest, name: FromPath[str]
) -> Response[bytes]:
    """Make an organisation, or change it; gateways follow within 3 seconds."""
    asked = await admin.read(exchange, OrganisationChange)
    actor = actor_of(request, "organisation", named(name))
    return json_response(await admin.keys.change_organisation(name, actor=actor, limits=asked.limits))


@get("/admin/v1/audit", guards=[admin_only], opt={OPERATION: Operation(answer=AuditLines, fails=_READS)})
async def audit(admin: AdminIs) -> Response[bytes]:
    """The last changes, newest first."""
    return json_response(AuditLines(await admin.keys.audit(lines=AUDIT_LINES)))


HANDLERS = (
    openapi,
    list_keys,
    one_key,
    create_key,
    revoke_key,
    rotate_key,
    list_tenants,
    change_tenant,
    list_organisations,
    change_organisation,
    audit,
)


def provide_admin(state: State) -> Admin:
    """The admin of this application."""
    admin = state["admin"]
    assert isinstance(admin, Admin)
    return admin


def on_not_allowed(request: AnyRequest, error: NotAllowed) -> Response[bytes]:
    """What the keys refuse, in their words."""
    return on_api_error(request, errors.invalid(str(error)))


def on_unavailable(request: AnyRequest, error: Unavailable) -> Response[bytes]:
    """The server is away.  What was asked for may have been done: a key that nobody has seen opens nothing."""
    _log.warning("the server for API keys does not answer", reason=str(error))
    if request.method == "GET" or not error.maybe_ran:
        return on_api_error(request, errors.keys_unavailable())
    return on_api_error(
        request, errors.keys_unavailable("Nobody knows whether this was done: look before you repeat it.")
    )


def on_misconfigured(request: AnyRequest, error: Misconfigured) -> Response[bytes]:
    """There is a pepper, and it cannot be used.  Who may ask may also know why: it says nothing of the pepper."""
    return on_api_error(request, errors.keys_unavailable(str(error)))


class AdminApplication:
    """The admin interface, ready to be served: `front` is the ASGI application."""

    def __init__(self, options: GatewayOptions, hub: Hub, knows_id: Callable[[str], bool], *, version: str) -> None:
        """`knows_id`: whether a request of the other interface has this id; `version`: ours."""
        options = msgspec.structs.replace(
            options, cors_origins=(), body_bytes_max=BODY_BYTES_MAX, connections_max=CONNECTIONS_MAX
        )
        self._admin = Admin(options)
        document = admin_document(described(HANDLERS), options, version=version)
        litestar = Litestar(
            route_handlers=list(HANDLERS),
            dependencies={
                "admin": Provide(provide_admin, sync_to_thread=False),
                "exchange": Provide(provide_exchange, sync_to_thread=False),
            },
            exception_handlers={
                ApiError: on_api_error,
                NotAllowed: on_not_allowed,
                Unavailable: on_unavailable,
                Misconfigured: on_misconfigured,
                HTTPException: on_http_error,
                Exception: on_crash,
            },
            lifespan=[self._lifespan],
            state=State({"admin": self._admin, "document": msgspec.json.encode(document)}),
            openapi_config=None,
            logging_config=None,
            request_max_body_size=None,  # Exchange.read_body has the limit.
            debug=False,
            signature_types=[Admin, Exchange],
        )
        self.front = Front(litestar, options, hub, knows_id, on_closed=lambda _: None)

    @asynccontextmanager
    async def _lifespan(self, _: Litestar) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.front.drained()
            await self._admin.aclose()
