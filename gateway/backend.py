"""
The engines: all replicas, which of them gets a request, and the deadlines of what they have been given.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

from cache.prefix_index import PrefixIndex
from cache.suspects import Suspects
from engine.api import GenerateRequest, Hello
from gateway import errors
from gateway.calls import Call
from gateway.config import GatewayOptions
from gateway.errors import ApiError
from gateway.poison import Poison
from gateway.replica import Replica
from gateway.replica import Watcher as StepWatcher
from gateway.rescue import Rescue
from gateway.routing import Matched, Observer, Placement, Router
from telemetry import clock

PROBE_S = 1.0
"""How often an idle engine is asked whether it is there."""
DEADLINE_GRACE_S = 2.0  # the engine enforces the deadline itself; this is for one that does not


Chosen = Callable[[], Awaitable[Placement]]
"""Raises ApiError when there is no healthy replica."""


class Watcher(StepWatcher, Observer, Protocol):
    """The telemetry hub."""


class Backend:
    """All replicas."""

    def __init__(
        self,
        options: GatewayOptions,
        watcher: Watcher,
        index: PrefixIndex | None = None,
        suspects: Suspects | None = None,
    ) -> None:
        self._options = options
        self.poison = Poison(suspects)
        self._rescue = Rescue(self.poison, self.choose, deadline_s=options.resume_deadline_s)
        self._router = Router(options.routing, index, watcher)
        self.replicas = [
            Replica(number, address, watcher, self._rescue, self._router, options)
            for number, address in enumerate(options.engines)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to connect."""
        self._tasks = [
            asyncio.create_task(replica.run(), name=f"engine {replica.address}") for replica in self.replicas
        ]
        self._tasks.append(asyncio.create_task(self._watch(), name="engine deadlines"))
        self._tasks.append(asyncio.create_task(self._rescue.run(), name="engine losses"))
        self._tasks.append(asyncio.create_task(self.poison.run(), name="suspects"))

    async def stop(self) -> None:
        """Let all connections go."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._router.stop()

    def facts(self) -> Hello:
        """What a healthy engine says of itself: enough to plan a request.  Raises ApiError when there is none."""
        return self._healthy()[0][1]

    async def choose(self, messages: Sequence[GenerateRequest], fingerprint: str = "") -> Placement:
        """
        A healthy replica.  Raises ApiError when there is none.

        Args:
            messages: the sequences of one request; they stay together.
            fingerprint: only engines with these weights, if it is not empty.
        """
        matched = await self._router.look_up(self._healthy(fingerprint), messages)
        return self._router.place(self._healthy(fingerprint), messages, matched)

    @contextlib.contextmanager
    def choosing(self, messages: Sequence[GenerateRequest], *, key: str) -> Iterator[Chosen]:
        """
        The same while something else is waited for: the index is asked at once, the choice made when it is called for.

        `key` is what requests have in common that had better meet; empty: nothing is known of that.
        """
        connected = self._healthy()
        looking: asyncio.Task[Matched | None] | None = None
        if self._router.wants(connected):
            looking = asyncio.create_task(self._router.look_up(connected, messages), name="prefix look-up")

        async def chosen() -> Placement:
            matched = await looking if looking is not None else None
            return self._router.place(self._healthy(), messages, matched, key)

        try:
            yield chosen
        finally:
            if looking is not None:
                looking.cancel()

    def _healthy(self, fingerprint: str = "") -> list[tuple[Replica, Hello]]:
        now_ns = clock.now_ns()
        found = [
            (replica, replica.hello)
            for replica in self.replicas
            if replica.hello and not replica.trouble(now_ns) and fingerprint in ("", replica.hello.fingerprint)
        ]
        if not found:
            raise errors.no_engine()
        return found

    def hellos(self) -> Sequence[Hello]:
        """What the connected replicas said of themselves."""
        return [replica.hello for replica in self.replicas if replica.hello]

    def troubles(self) -> dict[str, str]:
        """What is wrong with which replica."""
        now_ns = clock.now_ns()
        found = {str(number): replica.trouble(now_ns) for number, replica in enumerate(self.replicas)}
        return {number: trouble for number, trouble in found.items() if trouble}

    def knows(self, request_id: str) -> bool:
        """Whether a call of this name is in flight."""
        return any(request_id in replica.calls for replica in self.replicas)

    async def _watch(self) -> None:
        """Look after engines that are silent, and after calls whose engine does not keep the deadline."""
        options = self._options
        tick_s = min(PROBE_S, options.silence_s / 4, options.first_frame_timeout_s / 4)
        while True:
            await asyncio.sleep(tick_s)
            now_ns = clock.now_ns()
            for replica in self.replicas:
                replica.probe(now_ns)
                for call in list(replica.calls.values()):
                    error = self._overdue(call, now_ns)
                    if error is not None:
                        call.abort()
                        call.flight.interrupt(error)

    def _overdue(self, call: Call, now_ns: int) -> ApiError | None:
        if call.finish is not None:
            return None
        limit_s = self._options.first_frame_timeout_s
        if not call.accepted_ns and (now_ns - call.sent_ns) / 1e9 > limit_s:
            return errors.engine_timeout(f"The engine did not take the request within {limit_s:g} s.")
        if (now_ns - call.opened_ns) / 1e9 > self._options.request_timeout_s + DEADLINE_GRACE_S:
            return errors.engine_timeout(f"The request took longer than {self._options.request_timeout_s:g} s.")
        return None
