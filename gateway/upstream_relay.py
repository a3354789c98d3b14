"""
One request in the hands of upstreams.

    ask      sends it, to another one where that is safe, until an answer has begun: till then a failure is a status
    whole    the answer as a whole;  events  the answer as a stream, passed on as it comes

There is one piece of the answer in memory at a time: while the client does not read, the upstream is not read either.
What ends the request (the client leaves, a drain, a deadline) closes the connection, and that tells the upstream.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import aiohttp
import structlog

from gateway import errors
from gateway.exchange import Exchange
from gateway.stream import DONE, Tokens, event
from gateway.upstream import Pool, Upstream
from gateway.upstream_answer import EVENT_BYTES_MAX, WHOLE_BYTES_MAX, Garbage, Refusal, Translator
from gateway.upstream_errors import (
    Failure,
    bad_gateway,
    broken,
    error_in,
    hung_up,
    of_connecting,
    of_error,
    of_status,
    retry_after_ms,
)
from gateway.upstream_events import EventReader, TooLarge
from gateway.upstream_request import Asked
from telemetry import clock

ATTEMPTS_MAX = 3
ERROR_BYTES_MAX = 64 * 1024
"""Read of an answer that is none."""
LINGER_S = 1.0
"""How long the end of an answer may lie behind its `[DONE]`, for its connection to be used again."""
KEEP_ALIVE = b":\n\n"
"""What the comments of an upstream become, which keep connections open that carry nothing for long."""

_log = structlog.get_logger("pellucid.gateway")


class Desk(Protocol):
    """Where requests are under way: all the upstreams."""

    @property
    def session(self) -> aiohttp.ClientSession:
        """For sending."""

    @property
    def relays(self) -> "dict[Relay, None]":
        """Those whose deadlines are watched."""


class Relay:
    """From the choice of an upstream to the end of its answer."""

    def __init__(self, exchange: Exchange, pool: Pool, asked: Asked, desk: Desk) -> None:
        self.reused = False
        """Whether the present connection was open before."""
        self._exchange = exchange
        self._relayed = exchange.relayed
        self._pool = pool
        self._asked = asked
        self._desk = desk
        self._translator = Translator(
            exchange.relayed,
            request_id=exchange.request_id,
            model=pool.model,
            include_usage=asked.include_usage,
            choices=asked.choices,
            prompts=asked.prompts,
        )
        self._reader = EventReader(event_bytes_max=EVENT_BYTES_MAX)
        self._upstream: Upstream | None = None
        self._trial = 0
        self._posting: asyncio.Task[aiohttp.ClientResponse] | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._began_ns = 0
        self._sent_ns = 0
        self._waiting_ns = 0  # since when the upstream has been silent; 0: it is not its turn
        self._heard = False  # anything of the present answer
        self._overdue: Failure | None = None
        self._suspects: list[tuple[Upstream, Failure]] = []  # could not do what another one may be able to
        self._hung_up = False  # somebody closed the connection on this request: who is asked next is the last
        self._begun = False  # the client has been, or is being, sent something
        self._ready = b""  # what it will be sent first
        self._done = False
        self._failure: Failure | None = None  # behind what came before it
        live = exchange.live
        live.model, live.stream, live.choices = pool.model, asked.stream, asked.choices
        live.parameters, live.prompt_tokens = asked.parameters, asked.prompt_tokens
        exchange.on_close.append(self._end)

    # ---- asking

    async def ask(self) -> dict[str, str]:
        """Until an answer has begun.  Returns headers that say what that took.  Raises ApiError."""
        self._began_ns = clock.now_ns()
        self._desk.relays[self] = None
        self._exchange.flight.on_interrupt.append(self._cut)
        tried: list[Upstream] = []
        failure: Failure | None = None
        for _ in range(ATTEMPTS_MAX):
            try:
                upstream = self._pool.choose(self._asked.affinity, tried, clock.now_ns())
            except errors.ApiError as error:
                raise (failure.error if failure is not None else error) from None
            try:
                await self._attempt(upstream)
                return self._exchange.book.overhead(self._began_ns)
            except Failure as caught:
                failure = caught
            self._fail(failure)
            if not failure.elsewhere:
                break
            if failure.verdict != "none" or len(self._pool.upstreams) > 1:
                tried.append(upstream)  # else it was the connection, and a new one may do
        assert failure is not None, "there is at least one attempt"
        raise failure.error

    async def _attempt(self, upstream: Upstream) -> None:
        """Raises Failure."""
        exchange, now_ns = self._exchange, clock.now_ns()
        exchange.book.enter("dispatch", now_ns)
        self._relayed.upstream = upstream.name
        self._trial = upstream.breaker.began(now_ns)
        self._upstream = upstream
        upstream.in_flight += 1
        self._response = None
        self.reused = self._heard = False
        response = await self._post(upstream)
        if response.status != 200:
            raise await self._refused(response, upstream)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise broken("compresses its answer, which nobody asked for")
        wanted = "text/event-stream" if self._asked.stream else "application/json"
        if response.content_type != wanted:
            raise await self._other_type(response, upstream, wanted)
        while self._asked.stream and not (self._ready or self._done):
            self._ready = self._translate(await self._read())
            if self._failure is not None and not self._ready:
                raise self._failure
        if self._asked.stream:
            self._answered(upstream)

    async def _post(self, upstream: Upstream) -> aiohttp.ClientResponse:
        trace = self._exchange.live.trace
        headers = {
            "accept": "text/event-stream" if self._asked.stream else "application/json",
            "x-request-id": self._exchange.request_id,
            "traceparent": trace.traceparent(),
        }
        if trace.state and trace.state.isascii() and trace.state.isprintable():  # it is the client's
            headers["tracestate"] = trace.state
        body = self._asked.body(upstream.model)
        self._posting = upstream.post(self._desk.session, self._asked.kind, body, headers, self)
        try:
            response = self._response = await self._posting
            self._posting = None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._exchange.flight.error is None or (task is not None and task.cancelling()):
                raise  # We are cancelled, and not only what we wait for.
            raise self._interruption() from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._failure_of(error) from None
        finally:
            self._waiting_ns = 0
        return response

    def sent(self) -> None:
        """The connection is there and the request on its way."""
        now_ns = clock.now_ns()
        self._exchange.book.enter("upstream", now_ns)
        self._sent_ns = self._waiting_ns = now_ns

    async def _refused(self, response: aiohttp.ClientResponse, upstream: Upstream) -> Failure:
        body = await self._words()
        headers = {name.lower(): value for name, value in response.headers.items()}
        return of_status(response.status, body, rest_ms=retry_after_ms(headers), secrets=upstream.secrets)

    async def _other_type(self, response: aiohttp.ClientResponse, upstream: Upstream, wanted: str) -> Failure:
        """Some servers refuse a stream with an error object under a 200, which is no stream."""
        if response.content_type == "application/json" and (error := error_in(await self._words())):
            return of_error(error, secrets=upstream.secrets)
        return broken(f"answers with another content type than {wanted}")

    async def _words(self) -> bytes:
        """The beginning of an answer that is none, or as much of it as comes.  Raises Failure: all is over."""
        body = bytearray()
        try:
            while len(body) < ERROR_BYTES_MAX and (piece := await self._read()):
                body += piece
        except Failure:
            if self._exchange.flight.error is not None:
                raise
        return bytes(body)

    # ---- the answer

    async def whole(self) -> bytes:
        """All of it.  Raises ApiError."""
        body = bytearray()
        try:
            while piece := await self._read():
                body += piece
                if len(body) > WHOLE_BYTES_MAX:
                    raise broken(f"its answer is over {WHOLE_BYTES_MAX} bytes")
            answer = self._translator.whole(bytes(body))
        except (Failure, Garbage, Refusal) as error:
            failure = error if isinstance(error, Failure) else self._failure_of(error)
            self._fail(failure)
            raise failure.error from None
        self._succeed()
        return answer

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events.  Never raises an error: it becomes the last event."""
        self._begun = True
        try:
            yield self._ready
            while not self._done:
                if self._failure is not None:
                    raise self._failure
                data = self._translate(await self._read())
                if data:
                    yield data
        except Failure as failure:
            self._fail(failure)
            self._exchange.outcome = failure.error.outcome
            self._exchange.live.error = failure.error.code or ""
            yield event(failure.error.body())
        except Exception:  # noqa: BLE001  After the first byte nobody else can tell the client.
            _log.exception("stream crashed")
            self._exchange.outcome = "error"
            yield event(errors.internal().body())
        finally:
            self._end()

    async def _read(self) -> bytes:
        """The next piece, nothing at the end.  Raises Failure."""
        assert self._response is not None
        now_ns = clock.now_ns()
        self._waiting_ns = now_ns if self._heard else self._sent_ns  # a head alone is no beginning
        self._exchange.book.enter("upstream", now_ns)
        try:
            piece = await self._response.content.readany()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._failure_of(error) from None
        finally:
            self._waiting_ns = 0
        if self._exchange.flight.error is not None:
            raise self._interruption()
        self._heard = True
        return piece

    def _translate(self, piece: bytes) -> bytes:
        """What the client gets of a piece of a stream; a failure is kept for after it."""
        now_ns = clock.now_ns()
        found: list[bytes] = []
        try:
            if not piece:
                raise Garbage("ended its stream without [DONE]")
            for data in self._reader.feed(piece):
                if data is None:
                    found.append(KEEP_ALIVE if self._begun else b"")
                elif data.strip() == b"[DONE]":
                    if not self._begun and not any(found):
                        raise Garbage("ended its stream without a word")
                    self._done = True
                    self._succeed()
                    found.append(DONE)
                    break
                else:
                    found.append(self._translator.event(data, now_ns))
        except (Garbage, Refusal, TooLarge) as error:
            self._failure = self._failure_of(error)
        live, usage = self._exchange.live, self._relayed.usage
        live.output_tokens = self._relayed.output_tokens
        if usage is not None:
            live.prompt_tokens, live.cached_tokens = usage.prompt, usage.cached
            self._exchange.ticket.recount(usage.prompt)
        first_ns = self._relayed.first_token_ns
        if first_ns and not live.first_token_ns:
            live.first_token_ns = first_ns - self._exchange.book.opened_ns
            self._relayed.first_token_states = self._exchange.book.close(first_ns, None)
        return b"".join(found)

    # ---- the end

    def keep_deadlines(self, now_ns: int, *, total_s: float) -> None:
        """End it where it, or the upstream, takes too long."""
        if self._upstream is None or self._exchange.flight.error is not None:
            return
        options = self._upstream.options
        silent_s = (now_ns - self._waiting_ns) / 1e9 if self._waiting_ns else 0.0
        awaited = self._asked.stream or self._upstream.lost  # the first byte: that of a whole answer is almost its last
        if now_ns - self._began_ns > total_s * 1e9:
            error = errors.engine_timeout(f"The request took longer than {total_s:g} s.")
            self._overdue = Failure("took too long", error, verdict="none")
        elif not self._heard and awaited and silent_s > options.first_byte_timeout_s:
            error = errors.engine_timeout("The server of this model did not begin to answer in time.")
            self._overdue = Failure(f"did not begin within {options.first_byte_timeout_s:g} s", error)
        elif self._heard and silent_s > options.idle_timeout_s:
            error = errors.engine_timeout("The server of this model fell silent in the middle of its answer.")
            self._overdue = Failure(f"was silent for {options.idle_timeout_s:g} s", error)
        if self._overdue is not None:
            self._exchange.flight.interrupt(self._overdue.error)

    def _succeed(self) -> None:
        exchange, relayed = self._exchange, self._relayed
        assert self._upstream is not None
        exchange.bill = relayed.usage or Tokens(
            prompt=self._asked.prompt_tokens, cached=0, output=relayed.output_tokens
        )
        exchange.ticket.recount(exchange.bill.prompt)
        exchange.outcome = "length" if relayed.cut_short else "stop"
        exchange.answered = True
        self._answered(self._upstream)
        self._upstream.breaker.completed()
        self._leave("complete")
        if self._response is not None and not self._response.closed:
            asyncio.get_running_loop().call_later(LINGER_S, self._response.close)
        self._response = None

    def _answered(self, upstream: Upstream) -> None:
        """An answer has begun.  So whoever could not do it before is not well: it was not the request."""
        upstream.answered()
        for suspect, failure in self._suspects:
            suspect.blamed(failure)
        self._suspects.clear()

    def _fail(self, failure: Failure) -> None:
        upstream = self._upstream
        assert upstream is not None
        upstream.failed(failure, self._trial)
        if failure.verdict == "suspect":
            self._suspects.append((upstream, failure))
        if failure.verdict in ("fault", "suspect"):
            _log.warning("upstream failed", upstream=upstream.name, reason=failure.reason)
        refused = "rate_limited" if failure.rest_ms else "refused"
        results = {"fault": "failed", "suspect": "failed", "sound": refused, "none": "abandoned"}
        self._leave(results[failure.verdict])
        self._cut()

    def _leave(self, result: str) -> None:
        if self._upstream is not None:
            self._upstream.in_flight -= 1
            self._upstream.results[result] += 1
            self._upstream = None

    def _cut(self) -> None:
        """Hang up.  Who waits for the upstream wakes up with an error."""
        posting, response = self._posting, self._response
        if posting is not None and not posting.cancel() and not posting.cancelled() and posting.exception() is None:
            response = posting.result()
        if response is not None:
            response.close()
        self._posting = None

    def _end(self) -> None:
        """Whatever has happened, nothing of it is left."""
        self._desk.relays.pop(self, None)
        if self._upstream is not None:
            self._upstream.breaker.abandoned(self._trial)
            self._leave("abandoned")
        if not self._done:
            self._cut()

    def _interruption(self) -> Failure:
        assert self._exchange.flight.error is not None
        return self._overdue or Failure("was interrupted", self._exchange.flight.error, verdict="none")

    def _failure_of(self, error: Exception) -> Failure:
        """The library's errors, and our readers'."""
        if self._exchange.flight.error is not None:
            return self._interruption()
        assert self._upstream is not None
        match error:
            case Refusal():
                return of_error(error.error, secrets=self._upstream.secrets)
            case Garbage() | TooLarge():
                return broken(str(error))
            case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
                return of_connecting(error, connect_timeout_s=self._upstream.options.connect_timeout_s)
            case aiohttp.ServerDisconnectedError() | OSError() if self._response is None:
                first, self._hung_up = not self._hung_up, True
                return hung_up(reused=self.reused, elsewhere=first)
            case _:
                return Failure(f"broke off or is no HTTP: {type(error).__name__}", bad_gateway())
