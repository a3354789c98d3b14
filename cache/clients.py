"""
From a URL to redis-py's client for it: no retries, and short waits for connecting.
"""

from typing import Any, cast  # Any: redis-py's constructors take dozens of keywords of many types.

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import ConnectionPool, RedisSSLContext, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from cache.redis_url import RedisUrl

CONNECT_TIMEOUT_MS = 100
COMMAND_TIMEOUT_MS = 100
TLS_CONNECT_TIMEOUT_MS = 800
"""A request still waits no longer than for a command: this is for the probe, when a handshake takes its time."""


class _TlsConnection(SSLConnection):
    """All connections share one context: making one reads the system's certificates and stops the event loop for it."""

    def __init__(self, *, shared: RedisSSLContext, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ssl_context = shared


def client_of(
    url: RedisUrl, connections_max: int, connect_timeout_ms: int = CONNECT_TIMEOUT_MS
) -> tuple[Redis | RedisCluster, Sentinel | None]:
    """
    A client without retries, and the sentinels that it asks.

    Protocol 2 and no driver's name: a new connection needs no round trip before its first command, but for a password.
    """
    timeout_s = connect_timeout_ms / 1000
    common: dict[str, Any] = {
        "username": url.username or None,
        "password": url.password or None,
        "max_connections": connections_max,
        "socket_connect_timeout": TLS_CONNECT_TIMEOUT_MS / 1000 if url.tls else timeout_s,
        "protocol": 2,
        "driver_info": None,
    }
    single: dict[str, Any] = {"retry": _no_retry(), "socket_timeout": None, "db": url.db}  # `_within` has the time
    if url.kind == "unix":
        pool = ConnectionPool(connection_class=UnixDomainSocketConnection, path=url.path, **common, **single)
        return Redis.from_pool(pool), None
    tls: dict[str, Any] = dict(url.ssl)
    if tls.get("ssl_cert_reqs") == "none":
        tls["ssl_check_hostname"] = False
    if url.kind == "single":
        host, port = url.hosts[0]
        if url.tls:
            single |= tls | {"shared": SSLConnection(**tls).ssl_context, "connection_class": _TlsConnection}
        pool = ConnectionPool(host=host, port=port, **common, **single)
        return Redis.from_pool(pool), None
    # These two must see a node's silence themselves, to look for another one.
    common["socket_timeout"] = COMMAND_TIMEOUT_MS / 1000
    if url.tls:
        tls["ssl"] = True
    if url.kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in url.hosts]
        return RedisCluster(startup_nodes=nodes, retry=_no_retry(), **common, **tls), None
    sentinel_kwargs = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "retry": _no_retry(), **tls}
    if url.sentinel_password:
        sentinel_kwargs["password"] = url.sentinel_password
    sentinel = Sentinel(url.hosts, sentinel_kwargs=sentinel_kwargs)
    master = sentinel.master_for(url.service, retry=_no_retry(), db=url.db, **common, **tls)
    return cast(Redis, master), sentinel


def _no_retry() -> Retry:
    return Retry(NoBackoff(), 0)
