"""
The way to a cluster: redis-py's client for it, which knows where each slot is and follows it when it moves.

Each command runs in a task of its own, which its caller cannot cancel and which ends within its deadline, waiting for
a connection and connecting included.  So a storm of disconnecting clients neither leaves replies behind for the next
user of a connection nor makes us reconnect.  At the deadline redis-py drops the connection, and the reply with it
(tests/cache/test_cancellation.py holds it to that).

Its own timers do not know of cache.deadline: an event loop that is more than a deadline behind finds a cluster silent.
"""

import asyncio
from typing import Any  # Any: redis-py's constructor takes dozens of keywords of many types.

from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError

from cache.errors import ScriptMissing, Unavailable
from cache.link import COMMANDS_MAX, REASON_CHARS_MAX, Words
from cache.redis_url import RedisUrl


class ClusterLine:
    """All nodes, as one."""

    def __init__(self, url: RedisUrl, connections_max: int, connect_timeout_ms: int, command_timeout_ms: int) -> None:
        options: dict[str, Any] = dict(url.ssl) | ({"ssl": True} if url.tls else {})
        if options.get("ssl_cert_reqs") == "none":
            options["ssl_check_hostname"] = False
        self._client = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in url.hosts],
            username=url.username or None,
            password=url.password or None,
            max_connections=connections_max,
            socket_connect_timeout=connect_timeout_ms / 1000,
            socket_timeout=command_timeout_ms / 1000,  # it must see a node's silence itself, to look for another one
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            driver_info=None,  # a new connection needs no round trip before its first command, but for a password
            **options,
        )
        self._connections = asyncio.Semaphore(connections_max)  # of all nodes, and it waits in order
        self._tasks: set[asyncio.Task[object]] = set()

    async def execute(self, words: Words, timeout_s: float) -> object:
        """As Line has it."""
        if len(self._tasks) >= COMMANDS_MAX:
            raise Unavailable(f"{COMMANDS_MAX} commands are waiting already")
        task = asyncio.create_task(self._run(words, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not complain where the caller has left

    async def _run(self, words: Words, timeout_s: float) -> object:
        try:
            async with asyncio.timeout(timeout_s), self._connections:
                return await self._client.execute_command(*words)
        except TimeoutError:
            raise Unavailable(f"no answer within {timeout_s * 1000:.0f} ms", maybe_ran=True) from None
        except NoScriptError as error:
            raise ScriptMissing(str(error)) from error
        except Exception as error:
            raise Unavailable(f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX], maybe_ran=True) from error

    async def aclose(self) -> None:
        """As Line has it."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._client.aclose()  # does nothing while a node has failed
        await self._client.nodes_manager.aclose()
        await self._client.nodes_manager.aclose("startup_nodes")
