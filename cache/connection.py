"""
The one way to the server: a script, its keys and arguments in; a list of strings or `Unavailable` out.

Each command runs in a task of its own, which its caller cannot cancel and which ends within `command_timeout_ms`,
waiting for a connection and connecting included.  So a storm of disconnecting clients neither leaves replies behind for
the next user of a connection nor makes us reconnect; a caller that has left is told of what it left behind.  At the
deadline redis-py drops the connection, and the reply with it (tests/cache/test_cancellation.py holds it to that).

No retries: a request that has waited once is better served without the server.  A breaker (cache.breaker) remembers.
While it is open a probe writes one key a second; the first success closes it.  Reading would not do: a replica answers
PING and takes no writes.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import NoScriptError, RedisClusterException, RedisError

from cache.breaker import Breaker
from cache.clients import COMMAND_TIMEOUT_MS, CONNECT_TIMEOUT_MS, client_of
from cache.errors import Unavailable
from cache.redis_url import RedisUrl
from telemetry import clock
from telemetry.logs import get_logger

PROBE_INTERVAL_MS = 1000
PROBE_TIMEOUT_MS = 800
"""Longer than a command's: a probe also finds the way round a dead sentinel or cluster node."""
CONNECTIONS_MAX = 32
COMMANDS_MAX = 1024
"""Running and waiting for a connection."""
REASON_CHARS_MAX = 200
_PROBE = "pellucid:probe:"
_log = get_logger("pellucid.cache")


class Script:
    """A Lua script.  It answers a list of strings, takes all its keys in KEYS, and they share one hash tag."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the server."""

    state: Literal["closed", "open"]
    """Of the breaker: closed is well."""
    reason: str
    """Of the last failure; empty while all is well."""
    openings: int
    """How often the breaker has opened."""


class Store:
    """A server, a cluster, or what sentinels say is the master."""

    def __init__(
        self,
        url: RedisUrl,
        *,
        connections_max: int = CONNECTIONS_MAX,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        command_timeout_ms: int = COMMAND_TIMEOUT_MS,
        probe_interval_ms: int = PROBE_INTERVAL_MS,
        breaker: Breaker | None = None,
    ) -> None:
        self.up = asyncio.Event()
        """Set while the breaker is closed."""
        self.up.set()
        self._url = url
        self._client, self._sentinel = client_of(url, connections_max, connect_timeout_ms)
        self._command_timeout_s = command_timeout_ms / 1000
        self._probe_interval_s = probe_interval_ms / 1000
        self._breaker = breaker or Breaker()
        self._reason = ""
        self._connections = asyncio.Semaphore(connections_max)  # waits in order, alike for all kinds of servers
        self._commands: set[asyncio.Task[list[bytes]]] = set()
        self._probing: asyncio.Task[None] | None = None
        self._probe_key = _PROBE + "{pellucid}"

    @property
    def health(self) -> Health:
        """The breaker's state, why, and how often."""
        state: Literal["closed", "open"] = "open" if self._breaker.is_open else "closed"
        return Health(state=state, reason=self._reason, openings=self._breaker.openings)

    async def start(self) -> bool:
        """Ask once, so that no request is the first to find out.  Whether the server is there; it may come later."""
        try:
            await self._probe()
        except Unavailable as error:
            self._opened(str(error))
            return False
        return True

    async def run(
        self, script: Script, keys: Sequence[str], args: Sequence[str], *, left: Callable[[], None] | None = None
    ) -> list[bytes]:
        """
        Run a script.  Raises Unavailable; `maybe_ran` says whether the script may have run all the same.

        Args:
            script: what to run.
            keys: all of one hash tag.
            args: numbers as decimal text.
            left: called if the caller is cancelled, once the command has ended, however that was.
        """
        if self._breaker.is_open:
            raise Unavailable(self._reason)
        if len(self._commands) >= COMMANDS_MAX:
            raise Unavailable(f"{COMMANDS_MAX} commands are waiting already")
        task = asyncio.create_task(self._run(script, keys, args))
        self._commands.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if left is not None:
                task.add_done_callback(lambda _: left())
            raise

    async def aclose(self) -> None:
        """Let what runs end, which it does within its deadline, and disconnect."""
        if self._commands:
            await asyncio.wait(self._commands)
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing})
        await self._client.aclose()
        if isinstance(self._client, RedisCluster):  # its own aclose does nothing while a node has failed
            await self._client.nodes_manager.aclose()
            await self._client.nodes_manager.aclose("startup_nodes")
        if self._sentinel is not None:
            await self._sentinel.aclose()

    def _ended(self, task: asyncio.Task[list[bytes]]) -> None:
        self._commands.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not complain where the caller has left

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[str]) -> list[bytes]:
        words = (str(len(keys)), *keys, *args)
        try:
            reply = await self._within(self._command_timeout_s, self._evaluate(script, words))
        except Unavailable as error:
            self._probe_key = _PROBE + _tag(keys[0])
            if self._breaker.failed(clock.now_ns()):
                self._opened(str(error))
            raise
        assert isinstance(reply, list), "a script of ours answers with a list"
        return reply

    async def _evaluate(self, script: Script, words: Sequence[str]) -> object:
        async with self._connections:
            try:
                return await self._client.execute_command("EVALSHA", script.sha, *words)
            except NoScriptError:  # a new, restarted or flushed server
                return await self._client.execute_command("EVAL", script.source, *words)

    async def _probe(self) -> None:
        words = ("SET", self._probe_key, "1", "PX", str(PROBE_INTERVAL_MS))
        await self._within(PROBE_TIMEOUT_MS / 1000, self._client.execute_command(*words))

    async def _within(self, timeout_s: float, doing: Awaitable[object]) -> object:
        """The result; all that may go wrong with the server becomes Unavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                return await doing
        except TimeoutError:
            raise Unavailable(f"no answer within {timeout_s * 1000:.0f} ms", maybe_ran=True) from None
        except (RedisError, RedisClusterException, OSError) as error:
            reason = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
            raise Unavailable(reason, maybe_ran=True) from error

    def _opened(self, reason: str) -> None:
        self._breaker.open()
        self._reason = reason
        self.up.clear()
        _log.warning("redis unavailable", server=repr(self._url), reason=reason)
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe_until_up(), name="redis probe")

    async def _probe_until_up(self) -> None:
        opened_ns = clock.now_ns()
        while self._breaker.is_open:
            await asyncio.sleep(self._probe_interval_s)
            try:
                await self._probe()
            except Unavailable as error:
                self._reason = str(error)
                continue
            self._breaker.close()
            self._reason = ""
            self.up.set()
            _log.info("redis available again", server=repr(self._url), after_ms=(clock.now_ns() - opened_ns) // 10**6)


def _tag(name: str) -> str:
    """The hash tag of a key's name, braces included: on a cluster, the probe goes where the failure was."""
    return name[name.index("{") : name.index("}") + 1]
