"""
What one HTTP request has in the hands of engines, and what they have said of it.

    Call       one sequence: sent, accepted, tokens, finish, record.  News that nobody has read yet merge.
    Flight     the calls of one HTTP request, and whatever ends all of them at once (client gone, engine lost, drain)

A call keeps all that is needed to send it again: its message, and every token it has emitted.
"""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from engine.api import Delta, Finish, GenerateRequest, TokenLogprobs, Usage
from gateway.errors import ApiError
from telemetry.records import RequestRecord


class Engine(Protocol):
    """Who has a call: `gateway.replica.Replica`."""

    def abort(self, call: "Call") -> None:
        """Stop it; harmless when it has ended."""

    def release(self, call: "Call") -> None:
        """Nobody waits for news of it any more."""


class Flight:
    """The calls of one request.  One reader waits for news of any of them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.error: ApiError | None = None
        self._news = asyncio.Event()

    def interrupt(self, error: ApiError) -> None:
        """Something ends the whole request; the first such thing counts."""
        self.error = self.error or error
        self._news.set()

    def wake(self) -> None:
        """A call has news."""
        self._news.set()

    async def wait(self) -> None:
        """Until there is news.  Raises ApiError when the request is interrupted."""
        if self.error is None:
            await self._news.wait()
            self._news.clear()
        if self.error is not None:
            raise self.error


class Call:
    """One sequence in the hands of a replica."""

    def __init__(self, message: GenerateRequest, flight: Flight) -> None:
        self.message = message
        self.flight = flight
        self.engine: Engine | None = None
        """Who has it now; None: nobody."""
        self.one_clock = False
        """Whether that engine reads the clock that we read."""
        self.emitted: list[int] = []
        """All tokens so far: with the message, enough to go on elsewhere."""
        self.sent_ns = 0
        self.accepted_ns = 0  # when we heard of it; 0: not yet
        self.first_token_ns = 0
        self.finish: Finish | None = None
        self.finished_ns = 0  # when we heard of it
        self.record: RequestRecord | None = None
        self.record_came = asyncio.Event()
        self.stopped = False
        """We have what we wanted (a stop string), and whatever finish the engine reports is a good end."""
        self._read = 0  # of `emitted`
        self._logprobs: list[TokenLogprobs] = []  # of the unread tokens
        flight.calls.append(self)

    @property
    def request_id(self) -> str:
        """The engine's name of it."""
        return self.message.request_id

    def take(self, delta: Delta, now_ns: int) -> None:
        """News from the engine."""
        if self.finish is not None:
            return  # We gave up on it, or the engine repeats itself.
        refused = delta.finish is not None and delta.finish.reason in ("refused", "overloaded")
        if not refused:
            self.accepted_ns = self.accepted_ns or now_ns
        if delta.tokens:
            self.first_token_ns = self.first_token_ns or now_ns
            self.emitted.extend(delta.tokens)
            self._logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            self.finish, self.finished_ns = delta.finish, now_ns
        self.flight.wake()

    def unread(self) -> Iterable[tuple[int, TokenLogprobs | None]]:
        """Tokens since the last call of this."""
        tokens, logprobs = self.emitted[self._read :], self._logprobs
        self._read, self._logprobs = len(self.emitted), []
        if len(logprobs) != len(tokens):
            return [(token, None) for token in tokens]
        return list(zip(tokens, logprobs, strict=True))

    def end(self, record: RequestRecord) -> None:
        """The engine's book of it."""
        self.record = record
        self.record_came.set()

    def abort(self) -> None:
        """Stop it, whoever has it."""
        if self.engine is not None:
            self.engine.abort(self)

    def release(self) -> None:
        """Nobody waits for news of it any more."""
        if self.engine is not None:
            self.engine.release(self)
            self.engine = None

    def abandon(self, now_ns: int) -> None:
        """Stop waiting for the engine's last word."""
        if self.finish is None:
            self.finish = Finish("abort", Usage(len(self.message.prompt), 0, len(self.emitted)))
            self.finished_ns = now_ns
        self.record_came.set()
        self.flight.wake()
