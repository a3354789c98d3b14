"""
The live view: what this gateway and its engines are doing now, as server-sent events, for as long as somebody looks.

    first viewer -> ticks begin: engines are asked what is before them, a snapshot is made -> each viewer's newest one
    last viewer gone -> no tick, no question to an engine, nothing kept

One snapshot serves all viewers: workers are asked, and it is encoded, once for each tenant that looks.  A viewer has
no queue: who reads slowly gets the newest snapshot when it is ready for one, and that as a whole, since it has missed
news.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

import msgspec
import structlog

from engine.api import Sight
from gateway import errors
from gateway.admission import Ticket
from gateway.backend import Backend
from gateway.exchange import Exchange
from gateway.generation import Event
from gateway.siblings import Siblings, silent_json
from telemetry import clock
from telemetry.hub import Hub, Json, JsonObject
from telemetry.records import STEP_PARTS, StepRecord
from telemetry.served import Served, summary
from telemetry.vocabulary import STATES

_log = structlog.get_logger("pellucid.gateway")

TICK_S = 0.5
VIEWERS_MAX = 16
STREAM_S_MAX = 900.0
"""A stream ends after so long, and a page opens another one: a key that was revoked shows nothing for ever."""
STEPS_MAX = 240
"""In one event."""

_Name = tuple[str, str, str]
"""Of one request: ids are chosen by clients, who may choose those of others, or one again."""


class Snapshot:
    """One moment.  Encoded when somebody wants it, once for all who may see the same of it."""

    def __init__(
        self,
        common: JsonObject,
        *,
        number: int,
        requests: Mapping[str | None, Sequence[JsonObject]],
        steps: Sequence[StepRecord] = (),
        fresh: int = 0,
        ended_before: frozenset[_Name] = frozenset(),
    ) -> None:
        """
        Args:
            common: what each event has.
            number: of those before, one more.
            requests: in flight, or ended, for the eyes of each tenant that looks.
            steps: newest first; the first `fresh` of them are news.
            fresh: see there.
            ended_before: those that are no news.
        """
        self.number = number
        self._common, self._steps, self._fresh = common, steps, fresh
        self._requests, self._ended_before = requests, ended_before
        self._encoded: dict[tuple[str | None, bool], bytes] = {}

    def event(self, ticket: Ticket, *, whole: bool) -> bytes:
        """For the owner of this ticket: all that there is, or what is new since the snapshot before."""
        key = (ticket.eyes, whole)
        if key not in self._encoded:
            self._encoded[key] = b"data: " + msgspec.json.encode(self._seen(ticket, whole=whole)) + b"\n\n"
        return self._encoded[key]

    def _seen(self, ticket: Ticket, *, whole: bool) -> JsonObject:
        requests: list[Json] = [
            ticket.shown(one) for one in self._requests[ticket.eyes] if whole or _name(one) not in self._ended_before
        ]
        return (
            self._common
            | (_VOCABULARY if whole else {})
            | {
                "number": self.number,
                "whole": whole,
                "requests": requests,
                "steps": [_step_json(one) for one in (self._steps if whole else self._steps[: self._fresh])],
                "sights": [_without_others(one, ticket) for one in _objects(self._common["sights"])],
            }
        )


class Viewer:
    """Somebody who looks."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self._newest: Snapshot | None = None
        self._changed = asyncio.Event()
        self._ended = False

    def show(self, snapshot: Snapshot) -> None:
        """There is a newer one."""
        self._newest = snapshot
        self._changed.set()

    def end(self) -> None:
        """There will be no more."""
        self._ended = True
        self._changed.set()

    async def events(self) -> AsyncIterator[Event]:
        """The newest snapshot, whenever it is new, until `end`."""
        seen = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._ended:
                break
            snapshot = self._newest
            assert snapshot is not None, "something has changed"
            yield snapshot.event(self.ticket, whole=not seen or snapshot.number != seen + 1), True
            seen = snapshot.number
        yield b"", False


class Live:
    """All viewers of this worker, and the ticks for them."""

    def __init__(self, hub: Hub, backend: Backend, siblings: Siblings, model: str) -> None:
        self.viewers: set[Viewer] = set()
        self.ticking: asyncio.Task[None] | None = None
        self._hub, self._backend, self._siblings, self._model = hub, backend, siblings, model
        self._closed = False
        self._number = 0
        self._steps_told = 0
        self._ended: frozenset[_Name] = frozenset()

    def open(self, exchange: Exchange) -> AsyncIterator[Event]:
        """A new viewer's events.  Raises ApiError: there are too many, or this is the end."""
        if self._closed:
            raise errors.draining()
        if len(self.viewers) >= VIEWERS_MAX:
            raise errors.overloaded(f"{VIEWERS_MAX} viewers look already: close one of their pages, or try later.")
        viewer = Viewer(exchange.ticket)
        self.viewers.add(viewer)
        exchange.answered = True  # to stop looking is no disconnect
        leaving = asyncio.create_task(_until_gone(exchange), name="a viewer looks")
        leaving.add_done_callback(lambda _: viewer.end())
        limit = asyncio.get_running_loop().call_later(STREAM_S_MAX, viewer.end)

        def leave() -> None:
            limit.cancel()
            leaving.cancel()
            self._leave(viewer)

        exchange.on_close.append(leave)
        if self.ticking is None:
            self._look_away()
            self.ticking = asyncio.create_task(self._tick_for_ever(), name="live view")
        return viewer.events()

    def close(self) -> None:
        """End all streams, and let no new one begin."""
        self._closed = True
        for viewer in self.viewers:
            viewer.end()

    def _leave(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)
        if not self.viewers and self.ticking is not None:
            self.ticking.cancel()
            self.ticking = None
            self._look_away()

    def _look_away(self) -> None:
        """Of what engines have shown nothing is kept, or shown to who looks later."""
        for replica in self._backend.replicas:
            replica.look_away()

    async def _tick_for_ever(self) -> None:
        while True:
            try:
                await self._tick()
            except Exception:  # noqa: BLE001  whatever it is, viewers see that nothing comes, and no request suffers.
                _log.exception("a tick of the live view failed")
            await asyncio.sleep(TICK_S)

    async def _tick(self) -> None:
        for replica in self._backend.replicas:
            replica.look(clock.now_ns())
        eyes = {viewer.ticket.eyes for viewer in self.viewers}
        snapshot = await self._snapshot(eyes)
        for viewer in self.viewers:
            if viewer.ticket.eyes in eyes:  # else it came meanwhile, and gets the next one
                viewer.show(snapshot)

    async def _snapshot(self, eyes: Collection[str | None]) -> Snapshot:
        newest, served = await asyncio.gather(
            asyncio.gather(*(self._siblings.requests(tenant) for tenant in eyes)), self._siblings.served()
        )
        requests = {tenant: found for tenant, (found, _) in zip(eyes, newest, strict=True)}
        silent = sorted({number for _, numbers in newest for number in numbers})
        steps, seen = self._hub.steps(STEPS_MAX)
        self._number += 1
        snapshot = Snapshot(
            self._common(served) | silent_json(silent),
            number=self._number,
            requests=requests,
            steps=steps,
            fresh=min(STEPS_MAX, seen - self._steps_told),
            ended_before=self._ended,
        )
        self._steps_told = seen
        self._ended = frozenset(
            _name(one) for found in requests.values() for one in found if one["outcome"] is not None
        )
        return snapshot

    def _common(self, served: Sequence[Served]) -> JsonObject:
        now_ns = clock.now_ns()
        troubles = self._backend.troubles()
        engines: list[Json] = [
            {"replica": one.number, "trouble": troubles.get(str(one.number))} for one in self._backend.replicas
        ]
        sights: list[Json] = [
            _sight_json(one.number, one.sight, now_ns - one.seen_ns)
            for one in self._backend.replicas
            if one.sight is not None
        ]
        return {
            "now_ns": now_ns,
            "model": self._model,
            "viewers": len(self.viewers),
            "engines": engines,
            "served": summary(served),
            "sights": sights,
        }


_VOCABULARY: JsonObject = {"vocabulary": {"states": list(STATES), "parts": list(STEP_PARTS)}}


async def _until_gone(exchange: Exchange) -> None:
    while (await exchange.receive())["type"] != "http.disconnect":
        pass


def _name(request: JsonObject) -> _Name:
    return str(request["tenant"]), str(request["request_id"]), str(request["accepted_ns"])


def _step_json(step: StepRecord) -> JsonObject:
    """As much of a step as is shown; it names nobody."""
    parts: JsonObject = {part: spent_ns for part, spent_ns in step.parts.items() if spent_ns}
    return {
        "step_id": step.step_id,
        "replica": step.replica,
        "ended_ns": step.ended_ns,
        "step_ns": step.step_ns,
        "parts": parts,
        "sequences": step.sequences,
        "tokens": step.tokens,
        "emitted_tokens": step.emitted_tokens,
        "preemptions": step.preemptions,
        "interconnect": {
            "kind": step.interconnect.kind,
            "straggler": step.interconnect.straggler,
            "rank_wait_ns": list(step.interconnect.rank_wait_ns),
        },
    }


def _sight_json(replica: int, sight: Sight, age_ns: int) -> JsonObject:
    shown: JsonObject = msgspec.structs.asdict(sight)
    del shown["book"]
    return shown | {
        "replica": replica,
        "age_ns": age_ns,
        "slots": msgspec.structs.asdict(sight.book),
        "sequences": [msgspec.structs.asdict(one) for one in sight.sequences],
    }


def _without_others(sight: JsonObject, ticket: Ticket) -> JsonObject:
    """Sequences of other tenants are there, and nameless."""
    if ticket.identity is None:
        return sight
    sequences: list[Json] = [
        one if ticket.sees(str(one["tenant"])) else one | {"request_id": None, "tenant": None}
        for one in _objects(sight["sequences"])
    ]
    return sight | {"sequences": sequences}


def _objects(value: Json) -> list[JsonObject]:
    assert isinstance(value, list)
    return [one for one in value if isinstance(one, dict)]
