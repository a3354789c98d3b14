"""
From sequences to the answer that is made of them.

    launch    send them, wait until the engine has accepted all: until then a failure is a plain HTTP status
    events    the answer as a stream;  collect  the answer as a whole

A token in the middle of a stream is written by a callback: no task wakes up for it.  What is left for the task that
answers are the beginning, ends, failures, and a client that does not read.
"""

import asyncio
from collections.abc import AsyncIterator

import structlog
from msgspec import UNSET

from gateway import errors
from gateway.answers import FinishReason
from gateway.calls import Call
from gateway.config import GatewayOptions
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.planning import Plan
from gateway.routing import Placement
from gateway.stream import DONE, Choice, Tokens, Writer, event
from gateway.text import Piece, TextStream
from gateway.tokens import ModelText
from telemetry import clock

Event = tuple[bytes, bool]
"""Bytes of a stream, one or more events, and whether more will follow."""
News = list[tuple[int, Piece]]
"""What became certain of which choices."""

_log = structlog.get_logger("pellucid.gateway")


class _Running:
    """One choice on its way: the engine's call and the text that is made of it."""

    def __init__(self, call: Call, text: TextStream) -> None:
        self.call = call
        self.text = text
        self.finish_reason: FinishReason = "stop"
        self.done = False  # its last word is said, and that is its reason

    def read(self) -> Piece:
        """All that became certain since the last time.  Raises ApiError when the sequence failed."""
        piece = Piece()
        finish = self.call.finish
        unread = list(self.call.unread())
        if finish is not None and finish.stop_id is not None and unread and unread[-1][0] == finish.stop_id:
            unread.pop()  # It ends the text and is not part of it.
        for token, logprobs in unread:
            if self.text.stopped:
                break
            _join(piece, self.text.feed(token, logprobs))
        if finish is None:
            return piece
        if not self.text.stopped:
            self.raise_failure()
            _join(piece, self.text.finish())
        self.finish_reason = "length" if finish.reason == "length" and not self.text.stopped else "stop"
        self.done = True
        return piece

    def raise_failure(self) -> None:
        """Raise the ApiError that the engine's last word means, if it means one."""
        finish = self.call.finish
        error = errors.of_finish(finish) if finish is not None else None
        if finish is None or error is None:
            return
        if self.call.flight.error is not None:
            raise self.call.flight.error  # That came first; the engine's word is its consequence.
        fault = finish.fault.message if finish.fault else ""
        _log.warning("sequence failed", call=self.call.request_id, reason=finish.reason, fault=fault)
        raise error

    @property
    def ends(self) -> bool:
        """Whether the next time is the last."""
        return self.call.finish is not None

    @property
    def output_tokens(self) -> int:
        """Up to and including the token that completed a stop string, or the stop token."""
        assert self.call.finish is not None
        return self.text.tokens if self.text.stopped else self.call.finish.usage.output_tokens


def _join(piece: Piece, more: Piece) -> None:
    piece.text += more.text
    piece.entries += more.entries


class Generation:
    """A launched request."""

    def __init__(self, exchange: Exchange, planned: Plan, text: ModelText, options: GatewayOptions) -> None:
        self._exchange = exchange
        self._choices = planned.choices
        self._options = options
        self._running = [
            _Running(
                Call(message, exchange.flight),
                TextStream(
                    text,
                    stops=planned.stops,
                    tokens_min=message.tokens_min,
                    entries=message.sampling.logprobs is not None,
                ),
            )
            for message in planned.messages
        ]
        self._open = list(enumerate(self._running))
        """Those that are not complete."""

    async def launch(self, placed: Placement) -> dict[str, str]:
        """Send, and wait until all are accepted.  Returns headers that say what came before that.  Raises ApiError."""
        exchange = self._exchange
        sent_ns = clock.now_ns()
        exchange.book.dispatched(sent_ns)
        for one in self._running:
            one.call.promised_tokens = placed.promised_tokens or 0
            placed.replica.send(one.call)
        while not all(one.call.accepted_ns for one in self._running):
            self._raise_failures()
            await exchange.flight.wait()
        self._raise_failures()
        accepted_ns = max(one.call.accepted_ns for one in self._running)
        exchange.book.guess("prefill", accepted_ns)
        return exchange.book.overhead(sent_ns)

    def _raise_failures(self) -> None:
        """Nothing is sent yet, so what has already failed can still be a plain HTTP status."""
        for one in self._running:
            one.raise_failure()

    async def collect(self) -> tuple[list[Choice], Tokens]:
        """The whole answer.  Raises ApiError."""
        choices = [Choice() for _ in self._running]
        async for news in self._news():
            for index, piece in news:
                choices[index].add(piece)
        for choice, one in zip(choices, self._running, strict=True):
            choice.finish_reason = one.finish_reason
        self._succeed()
        return choices, self._tokens()

    async def events(self, writer: Writer, *, usage: bool, metrics: bool) -> AsyncIterator[Event]:
        """
        The answer as server-sent events.  Never raises an error: it becomes the last event.

        Args:
            writer: gives them their shape.
            usage: whether the bill is to be shown.
            metrics: whether the request's own record is, beside the bill.
        """
        try:
            if opening := b"".join(writer.opening(index) for index in range(len(self._running))):
                yield opening, True
            async for news in self._news(writer):
                if data := self._encoded(writer, news):
                    yield data, True
        except ApiError as error:
            self._exchange.outcome = error.outcome
            self._exchange.live.error = error.code or ""
            yield event(error.body()), False
            return
        except Exception:  # noqa: BLE001  After the first byte nobody else can tell the client.
            _log.exception("stream crashed")
            self._exchange.outcome = "error"
            yield event(errors.internal().body()), False
            return
        self._succeed()
        last = writer.usage(self._tokens(), self._exchange.metrics() if metrics else UNSET) if usage or metrics else b""
        yield last + DONE, False

    def _encoded(self, writer: Writer, news: News) -> bytes:
        parts: list[bytes] = []
        for index, piece in news:
            parts.append(writer.delta(index, piece))
            if self._running[index].done:
                parts.append(writer.ending(index, self._running[index].finish_reason))
        return b"".join(parts)

    async def _news(self, writer: Writer | None = None) -> AsyncIterator[News]:
        """
        What became certain of each choice, for all that have come further, until all are complete.

        With a `writer` most of it goes straight to the client; what is left are ends, and what a slow client is owed.
        Raises ApiError when a sequence fails or the request is interrupted, after what had come before.
        """
        interruption: ApiError | None = None
        while True:
            news, failure = self._read()
            if news:
                yield news
            if failure is not None:
                raise failure
            if not self._open:
                return
            if interruption is not None:
                raise interruption
            try:
                await (self._exchange.flight.wait() if writer is None else self._push(writer))
            except ApiError as error:
                interruption = error

    async def _push(self, writer: Writer) -> None:
        """Write tokens as they come, until there is something else to do.  Raises ApiError as `Flight.wait` does."""
        exchange = self._exchange
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def write() -> None:
            if over.done():
                return
            try:
                if exchange.flight.error is not None or exchange.blocked or any(one.ends for _, one in self._open):
                    over.set_result(None)
                elif data := self._encoded(writer, self._read()[0]):
                    exchange.write(data)
            except Exception as error:  # noqa: BLE001  It is the answer's, and not the event loop's.
                over.set_exception(error)

        with exchange.flight.told(write):
            await over
        if exchange.flight.error is not None:
            raise exchange.flight.error

    def _read(self) -> tuple[News, ApiError | None]:
        """What became certain of those that are not complete, up to the first that has failed, and why that has."""
        news: News = []
        for index, one in self._open:
            try:
                piece = one.read()
            except ApiError as error:
                return news, error
            self._note(one)
            if piece.text or piece.entries or one.done:
                news.append((index, piece))
        self._exchange.live.output_tokens = sum(len(one.call.emitted) for one in self._running)
        if any(one.done for _, one in self._open):
            self._open = [(index, one) for index, one in self._open if not one.done]
        return news, None

    def _note(self, one: _Running) -> None:
        """Stop the engine where a stop string is complete, and keep the live view true."""
        call, exchange = one.call, self._exchange
        if one.text.stopped and not call.stopped:
            call.stopped = True
            call.abort()
            loop = asyncio.get_running_loop()
            loop.call_later(self._options.record_timeout_s, lambda: call.abandon(clock.now_ns()))
        live = exchange.live
        if call.first_token_ns and not live.first_token_ns:
            live.first_token_ns = call.first_token_ns - exchange.book.opened_ns
            exchange.book.guess("decode", call.first_token_ns)
        if call.lost:
            exchange.book.guess("resume", call.lives[-1].lost_ns)
        elif live.ledger.state == "resume" and call.accepted_ns:
            exchange.book.guess("decode", call.accepted_ns)

    def _succeed(self) -> None:
        reasons = [one.finish_reason for one in self._running]
        self._exchange.outcome = "length" if "length" in reasons else "stop"
        self._exchange.answered = True
        self._exchange.bill = self._tokens()  # The record says what `usage` says, also where it is not shown.

    def _tokens(self) -> Tokens:
        """The bill: each prompt once, whatever the number of choices."""
        firsts = self._running[:: self._choices]
        cached = [one.call.finish.usage.cached_tokens for one in firsts if one.call.finish is not None]
        return Tokens(
            prompt=sum(one.call.prompt_tokens for one in firsts),
            cached=sum(cached),
            output=sum(one.output_tokens for one in self._running),
        )


async def to_the_end(events: AsyncIterator[bytes]) -> AsyncIterator[Event]:
    """Events of which nobody knows whether one is the last."""
    async for data in events:
        yield data, True
    yield b"", False
