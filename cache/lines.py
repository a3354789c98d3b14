"""
From a URL to the way to its server.

    one server, a socket, what sentinels call the master    a Link (cache.link)
    a cluster                                               redis-py's client for clusters (cache.cluster)
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

import hiredis

from cache.deadline import patience
from cache.errors import Misconfigured, Unavailable
from cache.link import Connect, Link, Wire, Words
from cache.redis_url import OPTION, RedisUrl

CONNECT_TIMEOUT_MS = 100
COMMAND_TIMEOUT_MS = 100
SLOW_CONNECT_TIMEOUT_MS = 800
"""For a handshake of TLS, and the way round dead sentinels; a request still waits no longer than for a command."""
CONNECTIONS_MAX = 32
"""To each node of a cluster."""
KEEPALIVE_IDLE_S = 30


class Line(Protocol):
    """A way to a server, which all share."""

    async def execute(self, words: Words, timeout_s: float) -> object:
        """The reply to a command, whose fourth word is a key.  Raises Unavailable.  May be cancelled at any time."""

    async def aclose(self) -> None:
        """Let what runs end, which deadlines bound, and disconnect."""


def line_of(url: RedisUrl, *, connections_max: int, connect_timeout_ms: int, command_timeout_ms: int) -> Line:
    """Connects when it is first used.  Raises Misconfigured: TLS without its files."""
    if url.kind == "cluster":
        from cache.cluster import ClusterLine  # noqa: PLC0415 - few need redis-py, which takes long to load

        return ClusterLine(url, connections_max, connect_timeout_ms, command_timeout_ms)
    greeting = []
    if url.password:
        greeting.append(("AUTH", *([url.username] if url.username else []), url.password))
    if url.db:
        greeting.append(("SELECT", str(url.db)))
    slow = url.tls or url.kind == "sentinel"
    timeout_s = max(connect_timeout_ms, SLOW_CONNECT_TIMEOUT_MS if slow else 0) / 1000
    return Link(_connect_of(url, connect_timeout_ms / 1000), greeting=greeting, connect_timeout_s=timeout_s)


def _connect_of(url: RedisUrl, sentinel_timeout_s: float) -> Connect:
    if url.kind == "unix":
        return lambda make: _connect_unix(make, url.path)
    context = _tls_of(url) if url.tls else None

    async def connect(make: Callable[[], Wire]) -> Wire:
        host, port = url.hosts[0]
        if url.kind == "sentinel":
            host, port = await _ask_sentinels(url, context, sentinel_timeout_s)
        return await _connect_tcp(make, host, port, context)

    return connect


async def _connect_unix(make: Callable[[], Wire], path: str) -> Wire:
    _, wire = await asyncio.get_running_loop().create_unix_connection(make, path)
    return wire


async def _connect_tcp(make: Callable[[], Wire], host: str, port: int, context: ssl.SSLContext | None) -> Wire:
    transport, wire = await asyncio.get_running_loop().create_connection(
        make, host, port, ssl=context, server_hostname=host if context is not None else None
    )
    inner = transport.get_extra_info("socket")
    inner.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    return wire


def _tls_of(url: RedisUrl) -> ssl.SSLContext:
    """One for all connections: making it reads the system's certificates, which takes a while."""
    files = dict(url.ssl)
    try:
        context = ssl.create_default_context(cafile=files.get("ssl_ca_certs"))
        if files.get("ssl_cert_reqs") == "none":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if "ssl_certfile" in files:
            context.load_cert_chain(files["ssl_certfile"], files.get("ssl_keyfile"))
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or error
        raise Misconfigured(f"{OPTION}: cannot use the files of its ssl_ parameters: {reason}") from error
    return context


async def _ask_sentinels(url: RedisUrl, context: ssl.SSLContext | None, timeout_s: float) -> tuple[str, int]:
    """Where the master is, by the first sentinel that knows.  Raises Unavailable."""
    for host, port in url.hosts:
        with contextlib.suppress(OSError, Unavailable):
            async with patience(timeout_s):
                return await _ask_sentinel(url, host, port, context, timeout_s)
    raise Unavailable(f"no sentinel knows a master named {url.service}")


async def _ask_sentinel(
    url: RedisUrl, host: str, port: int, context: ssl.SSLContext | None, timeout_s: float
) -> tuple[str, int]:
    wires: list[Wire] = []

    def make() -> Wire:
        wires.append(Wire(wires.remove))
        return wires[-1]

    try:
        wire = await _connect_tcp(make, host, port, context)
        if url.sentinel_password:
            answer = await wire.send(("AUTH", url.sentinel_password), timeout_s)
        answer = await wire.send(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", url.service), timeout_s)
    finally:
        for one in wires:
            one.abort()
    if isinstance(answer, hiredis.ReplyError) or not (isinstance(answer, list) and len(answer) == 2):
        raise Unavailable("this sentinel does not know it")
    return answer[0].decode(), int(answer[1])
