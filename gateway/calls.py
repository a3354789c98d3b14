"""
What one HTTP request has in the hands of engines, and what they have said of it.

    Call       one sequence: sent, accepted, tokens, finish, record.  News that nobody has read yet merge.
    Flight     the calls of one HTTP request, and whatever ends all of them at once (client gone, engine lost, drain)

A call keeps all that is needed to send it again: its message, and every token it has emitted.  So it outlives its
engine: what it is sent as next is its prompt and its output so far, and the rest comes out as it would have (DESIGN 5).

    sent -> accepted -> tokens ... -> finish
     ^                     |
     +---- lost <----------+    a life ends with its engine; the next one begins where it stood
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context, copy_context
from typing import NamedTuple, Protocol

import msgspec

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
    """
    The calls of one request.  One reader hears of news of any of them.

    It either waits for them, or is called: a callback costs a third of waking a task, and most news are one token.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.running = 0
        """Of the calls, those that have not finished."""
        self.error: ApiError | None = None
        self.on_interrupt: list[Callable[[], None]] = []
        """For those who do not wait for news of calls, but for an upstream."""
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self._context: Context | None = None

    @property
    def finished(self) -> bool:
        """There were calls, and all have finished."""
        return not self.running and bool(self.calls)

    def interrupt(self, error: ApiError) -> None:
        """Something ends the whole request; the first such thing counts."""
        self.error = self.error or error
        self.wake()
        for tell in self.on_interrupt:
            tell()

    def wake(self) -> None:
        """A call has news.  What comes before the reader's turn it hears of at once."""
        if self._has_news:
            return
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif self._listener is not None:
            asyncio.get_running_loop().call_soon(self._tell, context=self._context)

    async def wait(self) -> None:
        """Until there is news.  Raises ApiError when the request is interrupted."""
        if self.error is None and not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._has_news = False
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def told(self, listener: Callable[[], None]) -> Iterator[None]:
        """Meanwhile `listener`, which must not raise, is called when there is news, in the context of its caller."""
        self._listener, self._context = listener, copy_context()
        if self._has_news:
            self._has_news = False
            self.wake()
        try:
            yield
        finally:
            self._listener = self._context = None

    def _tell(self) -> None:
        if self._listener is not None:
            self._has_news = False
            self._listener()


class Life(NamedTuple):
    """A call in the hands of an engine that is gone."""

    sent_ns: int
    accepted_ns: int
    """0: never."""
    lost_ns: int
    progressed: bool
    """Whether tokens had come."""


class Call:
    """One sequence, in the hands of one engine after the other."""

    def __init__(self, message: GenerateRequest, flight: Flight) -> None:
        self.message = message
        """As it is sent: for a later life the prompt goes on with what was emitted."""
        self.first_message = message
        self.flight = flight
        self.engine: Engine | None = None
        """Who has it now; None: nobody."""
        self.one_clock = False
        """Whether that engine reads the clock that we read."""
        self.fingerprint = ""
        """Of the weights that it was begun with; only those say the same again."""
        self.promised_tokens = 0
        """Of its prompt, what the prefix index says its engine has in its cache."""
        self.lives: list[Life] = []
        """Those that are over."""
        self.emitted: list[int] = []
        """All tokens so far."""
        self.sent_ns = 0
        self.accepted_ns = 0  # when we heard of it, in this life; 0: not yet
        self.first_token_ns = 0
        self.gap_max_ns = 0
        """The longest time between two tokens, as they came here."""
        self.gap_resumed = False
        """Whether the engine was lost in it."""
        self._token_ns = 0  # when the last one came
        self.progressed = False
        """Whether it has come further in this life."""
        self.finish: Finish | None = None
        self.finished_ns = 0  # when we heard of it
        self.record: RequestRecord | None = None
        self.record_came = asyncio.Event()
        self.stopped = False
        """We have what we wanted (a stop string), and whatever finish the engine reports is a good end."""
        self._read = 0  # of `emitted`
        self._logprobs: list[TokenLogprobs] = []  # of the unread tokens
        flight.calls.append(self)
        flight.running += 1

    @property
    def request_id(self) -> str:
        """The engine's name of it: another one in each life, for an engine may still know the one before."""
        return self.message.request_id

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt that was asked for."""
        return len(self.first_message.prompt)

    @property
    def opened_ns(self) -> int:
        """When it was sent for the first time; 0: not yet."""
        return self.lives[0].sent_ns if self.lives else self.sent_ns

    @property
    def resumes(self) -> int:
        """How often another engine was given it."""
        return sum(life.lost_ns <= self.sent_ns for life in self.lives)

    @property
    def lost(self) -> bool:
        """Whether it waits for another engine."""
        return bool(self.lives) and self.engine is None and self.finish is None

    def sent(self, engine: Engine, *, one_clock: bool, fingerprint: str, now_ns: int) -> None:
        """An engine has been given it."""
        self.engine, self.one_clock, self.fingerprint, self.sent_ns = engine, one_clock, fingerprint, now_ns

    def take(self, delta: Delta, now_ns: int) -> None:
        """News from the engine."""
        if self.finish is not None:
            return  # We gave up on it, or the engine repeats itself.
        refused = delta.finish is not None and delta.finish.reason in ("refused", "overloaded")
        if not refused:
            self.accepted_ns = self.accepted_ns or now_ns
        if delta.tokens:
            self.progressed = True
            self.first_token_ns = self.first_token_ns or now_ns
            if self._token_ns and now_ns - self._token_ns > self.gap_max_ns:
                self.gap_max_ns = now_ns - self._token_ns
                self.gap_resumed = bool(self.lives) and self.lives[-1].lost_ns >= self._token_ns
            self._token_ns = now_ns
            self.emitted.extend(delta.tokens)
            self._logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            self._finished(delta.finish, now_ns)
        self.flight.wake()

    def lose(self, now_ns: int) -> None:
        """Its engine is gone, and with it the book of this life."""
        assert self.finish is None, "it has ended: there is nothing to lose"
        self.lives.append(Life(self.sent_ns, self.accepted_ns, now_ns, self.progressed))
        self.engine, self.accepted_ns, self.progressed = None, 0, False
        deadline_s = self.first_message.deadline_s
        if deadline_s:
            deadline_s = max(1e-3, deadline_s - (now_ns - self.opened_ns) / 1e9)
        self.message = msgspec.structs.replace(
            self.first_message,
            request_id=f"{self.first_message.request_id}~{len(self.lives)}",
            prompt=(*self.first_message.prompt, *self.emitted),
            resume=len(self.emitted),
            deadline_s=deadline_s,
        )
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
            self._finished(Finish("abort", Usage(self.prompt_tokens, 0, len(self.emitted))), now_ns)
        self.record_came.set()
        self.flight.wake()

    def _finished(self, finish: Finish, now_ns: int) -> None:
        self.finish, self.finished_ns = finish, now_ns
        self.flight.running -= 1
