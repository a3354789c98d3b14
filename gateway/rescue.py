"""
Calls whose engine is gone, on their way to another one, or to the same one when it has been started again.

    lost --a healthy engine with the same weights--> sent: it goes on where it stood
     |--> resume_deadline_s passed, RESUMES_MAX reached, the client gone: ended with an error
     |--> it has killed too many: refused, and remembered (gateway.poison)

Those that may be the reason (nothing had come of them yet) go one at a time, so that the next death has one suspect.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from engine.api import GenerateRequest
from gateway import errors
from gateway.calls import Call
from gateway.errors import ApiError
from gateway.poison import Poison
from gateway.routing import Placement
from telemetry import clock

RESUMES_MAX = 3
POLL_S = 0.05
"""How often the healthy engines are looked through while calls wait for one."""

_log = structlog.get_logger("pellucid.gateway")

Choose = Callable[[Sequence[GenerateRequest], str], Awaitable[Placement]]
"""An engine for these messages, with that fingerprint.  Raises ApiError when there is none."""


class Rescue:
    """The lost calls.  `run` sends them on."""

    def __init__(self, poison: Poison, choose: Choose, *, deadline_s: float) -> None:
        """`deadline_s`: how long a lost call waits for an engine; 0: not at all."""
        self._poison = poison
        self._choose = choose
        self._deadline_s = deadline_s
        self._lost: dict[Call, ApiError] = {}  # and what the client gets in the end, if nothing helps
        self._on_trial: Call | None = None
        self._wake = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Calls that no engine has."""
        return len(self._lost)

    def strand(self, calls: Sequence[Call], error: ApiError, *, died: bool) -> None:
        """Implements `Losses`."""
        now_ns = clock.now_ns()
        self._end_trial()
        if died and self._deadline_s:  # Without another try nobody can be told from its neighbours.
            self._poison.suspect([call.first_message for call in self._suspects(calls)], now_ns)
        for call in calls:
            verdict = self._verdict(call, error, now_ns)
            if verdict is None:
                self._lost[call] = error
            else:
                self._give_up(call, verdict, now_ns)
        self._wake.set()

    def _suspects(self, calls: Sequence[Call]) -> list[Call]:
        """Who may be the reason: the one on trial, if it was there; else all that had not come any further."""
        if self._on_trial is not None and self._on_trial in calls:
            return [self._on_trial]
        return [call for call in calls if not call.lives[-1].progressed]

    def _verdict(self, call: Call, error: ApiError, now_ns: int) -> ApiError | None:
        """Why a lost call is not to be sent again; None: it is."""
        if call.flight.error is not None:
            return call.flight.error
        if self._poison.refuses(call.first_message, now_ns):
            return errors.poisonous()
        if len(call.lives) > RESUMES_MAX:
            self._poison.convict(call.first_message, now_ns)  # It was there each time.
            return error
        return None if self._deadline_s else error

    def _give_up(self, call: Call, error: ApiError, now_ns: int) -> None:
        self._lost.pop(call, None)
        call.flight.interrupt(error)
        call.abandon(now_ns)

    async def run(self) -> None:
        """Send on what is lost, until cancelled."""
        while True:
            self._wake.clear()
            for call, error in list(self._lost.items()):
                await self._rescue(call, error)
            if self._lost:
                await asyncio.sleep(POLL_S)
            else:
                await self._wake.wait()

    async def _rescue(self, call: Call, error: ApiError) -> None:
        now_ns = clock.now_ns()
        if call.finish is not None:  # Nobody waits for it any more.
            self._lost.pop(call, None)
            return
        if call.flight.error is not None:
            self._give_up(call, call.flight.error, now_ns)
            return
        waited_s = (now_ns - call.lives[-1].lost_ns) / 1e9
        if waited_s > self._deadline_s:
            _log.warning("call not resumed", call=call.request_id, waited_s=waited_s)
            self._give_up(call, error, now_ns)
            return
        suspected = self._poison.deaths(call.first_message, now_ns) > 0
        if suspected and not self._end_trial():
            return
        try:
            placed = await self._choose((call.message,), call.fingerprint)
            if call not in self._lost or call.flight.error is not None:
                return  # Its client has left, meanwhile.
            call.promised_tokens = placed.promised_tokens or 0
            placed.replica.send(call)
        except ApiError:
            return  # Nobody can take it now.
        self._lost.pop(call)
        self._on_trial = call if suspected else self._on_trial
        _log.info("call resumed", call=call.request_id, after=len(call.emitted), waited_s=waited_s)

    def _end_trial(self) -> bool:
        """Whether nobody is on trial any more: who has come further, or to an end, is acquitted."""
        one = self._on_trial
        if one is None:
            return True
        if one.progressed or (one.finish is not None and one.flight.error is None):
            self._poison.acquit(one.first_message)
        elif one.engine is not None and one.finish is None:
            return False
        self._on_trial = None
        return True
