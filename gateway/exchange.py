"""
One HTTP request from its first byte to its record, whatever happens in between.

Every response, also of a crash or an unknown URL, has a request id and CORS headers, and every request leaves exactly
one `RequestRecord`.  What a route needs to know of its request is in the `Exchange`, which `gateway.front` makes and
which the route finds in the scope.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import msgspec
import structlog
from litestar.types import HTTPScope, Message, Receive, ReceiveMessage, Scope, Send

from gateway import cors, errors, headers
from gateway.admission import Ticket
from gateway.book import Book
from gateway.calls import Flight
from gateway.config import GatewayOptions
from gateway.errors import ApiError
from gateway.protocol import flow_of
from gateway.spent import first_token, longest_gap, stalled_for, told_last
from gateway.stream import Tokens
from gateway.upstream_answer import Relayed
from telemetry import clock
from telemetry.hub import Hub
from telemetry.live import LiveRequest, accept_trace
from telemetry.records import RequestRecord
from telemetry.views import request_json
from telemetry.vocabulary import OTHER, ROUTES

_log = structlog.get_logger("pellucid.gateway")

_SCOPE_KEY = "pellucid.exchange"
_KNOWN_LATER = ("status", "repeated_tokens", "reserved_tokens", "charged_tokens", "charged_micros")
"""Of a record, what an answer cannot say of itself: it is so only once the answer is sent."""
_LINGER_S = 2.0  # how long the rest of a refused body is read, so that its sender gets to read our answer


class Exchange:
    """One request and its response."""

    def __init__(
        self,
        scope: HTTPScope,
        receive: Receive,
        send: Send,
        *,
        options: GatewayOptions,
        hub: Hub,
        choose_id: Callable[[str, str], str],
    ) -> None:
        """`choose_id` makes the request's name of what the client wants to call it and the path."""
        now_ns = clock.now_ns()
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.path = scope["path"]
        self.method = scope["method"]
        self.request_id = choose_id(self.headers.get("x-request-id", ""), self.path)
        self.book = Book(now_ns)
        self.live = LiveRequest(
            request_id=self.request_id,
            ledger=self.book.shown,
            route=route_of(self.path),
            method=self.method,
            path=self.path,
            trace=accept_trace(self.headers.get("traceparent"), self.headers.get("tracestate")),
        )
        self.flight = Flight()
        self.ticket = Ticket()
        self.outcome = ""  # as the route says; empty: the status says it
        self.answered = False  # the client has been sent all that there is: leaving now is no disconnect
        self.bill: Tokens | None = None  # once an answer is complete: what its usage says, shown or not
        self.relayed = Relayed()  # what an upstream has done for it
        self.on_close: list[Callable[[], None]] = []
        self.status = 0
        self._options = options
        self._hub = hub
        self._disturbed = hub.disturbed()
        self._receive = receive
        self._send = send
        self._flow = flow_of(scope)
        self._response_headers = [
            (b"x-request-id", self.request_id.encode()),
            *cors.response_headers(options.cors_origins, self.headers),
        ]
        self._body_read = not _has_body(self.headers)
        self._too_slow = False  # its body has been waited for long enough
        self._watching: asyncio.Task[None] | None = None

    # ---- the client's side

    async def receive(self) -> ReceiveMessage:
        """ASGI: what the client sends; a disconnect ends what is in flight."""
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.answered:
            self.flight.interrupt(errors.client_gone())
        elif message["type"] == "http.request":
            self._body_read = not message["more_body"]
        return message

    async def send(self, message: Message) -> None:
        """ASGI: what the client is sent.  Raises ApiError when it does not read."""
        self.settle()
        if self.outcome and not self.gone:  # the end is known here, and not yet to the client, who may ask again
            await self._settle_limits()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if not self._body_read and not self._too_slow:
                self.book.enter("parse", clock.now_ns())  # not what came before: keys, say, are not waited for
                await self._take_rest()
            more = [(b"server-timing", self._timing())]
            more += [(name.encode(), value.encode("latin-1")) for name, value in self.ticket.headers.items()]
            own = headers.missing(message["headers"])
            if not self._body_read and b"connection" not in dict(message["headers"]):
                more.append((b"connection", b"close"))  # nobody will read the rest: it must not hold the connection
            message["headers"] = [*message["headers"], *self._response_headers, *more, *own]
        began_ns = clock.now_ns()
        blocked = self._flow.write_paused
        if blocked:
            await self._send_to_slow(message)
        else:
            await self._send(message)
        self.settle()
        self.book.wrote(began_ns, clock.now_ns(), blocked=blocked)
        if message["type"] == "http.response.body" and not message["more_body"]:
            self.answered = True
            self.book.enter("finalize", clock.now_ns())

    async def _settle_limits(self) -> None:
        if self.ticket.held:
            before = self.book.shown.state
            self.book.enter("limit", clock.now_ns())
            await self.ticket.settle(output_tokens=self._output_tokens(), complete=self.bill is not None)
            self.book.enter(before, clock.now_ns())

    def _timing(self) -> bytes:
        """Where the time went so far, by the book if it is complete, as a header."""
        now_ns = clock.now_ns()
        states = (
            self.book.close(now_ns, told_last(self.flight.calls))
            if self.flight.finished
            else self.book.shown.spent(now_ns)
        )
        return ", ".join(f"{state};dur={spent_ns / 1e6:.3f}" for state, spent_ns in states.items()).encode()

    @property
    def blocked(self) -> bool:
        """Whether a write would have to wait for the client to read."""
        return self._flow.write_paused

    def write(self, data: bytes) -> None:
        """
        More of a stream, at once: what `send` does for a part in the middle, without a task that wakes up for it.

        Only while an engine has the request, whose time it is, and while the client reads: not when `blocked`.
        """
        sending = self._send({"type": "http.response.body", "body": data, "more_body": True})
        try:
            sending.send(None)  # type: ignore[attr-defined]  # the server's `send` is a coroutine
        except StopIteration:
            return
        raise AssertionError("the server's send waits although it is not paused")

    async def _send_to_slow(self, message: Message) -> None:
        """Only such a write waits, so no other needs a deadline."""
        try:
            async with asyncio.timeout(self._options.send_timeout_s):
                await self._send(message)
        except TimeoutError:
            self.flight.interrupt(errors.client_gone())
            raise errors.client_gone() from None

    def watch(self) -> None:
        """From now on a disconnect interrupts the flight.  The body has been read."""
        assert self._watching is None, "watched already"
        self._watching = asyncio.create_task(self._watch(), name=f"watch {self.request_id}")

    async def _watch(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def read_body(self) -> bytes:
        """The whole body.  Raises ApiError: not JSON, too large, too slow."""
        options = self._options
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise errors.media_type()
        declared = self.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > options.body_bytes_max:
            raise errors.too_large(options.body_bytes_max)
        body = bytearray()
        try:
            async with asyncio.timeout(options.body_timeout_s):
                while not self._body_read:
                    body += await self._chunk()
                    if len(body) > options.body_bytes_max:
                        raise errors.too_large(options.body_bytes_max)
        except TimeoutError:
            self._too_slow = True
            raise errors.too_slow(options.body_timeout_s) from None
        return bytes(body)

    async def _chunk(self) -> bytes:
        message = await self.receive()
        if message["type"] != "http.request":
            raise errors.client_gone()
        chunk: bytes = message["body"]
        return chunk

    async def _take_rest(self) -> None:
        """Of a body that nobody wanted, up to a moderate size: closing on a client that writes loses our answer."""
        taken = 0
        with contextlib.suppress(TimeoutError, ApiError):
            async with asyncio.timeout(_LINGER_S):
                while not self._body_read and taken < self._options.body_bytes_max:
                    taken += len(await self._chunk())

    # ---- the end

    @property
    def gone(self) -> bool:
        """Whether the client left before it was answered."""
        return self.flight.error is not None and self.flight.error.status == 499

    def settle(self) -> None:
        """Once the engine has said its last word, the time after it is the gateway's."""
        if self.flight.finished:
            self.book.engine_done(max(call.finished_ns for call in self.flight.calls))

    async def close(self) -> None:
        """Stop what is still running, and write the record.  Runs to its end, whoever is cancelled."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        for end in self.on_close:
            end()
        timeout_s = self._options.record_timeout_s
        running = [call for call in self.flight.calls if call.finish is None]
        for call in running:
            call.abort()
        closed_ns = clock.now_ns()
        waiting = [call.record_came.wait() for call in self.flight.calls if call.engine is not None]
        if waiting:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asyncio.gather(*waiting)
        if running:
            closed_ns = clock.now_ns()  # The engine had it until now; else the end was that of the response.
        for call in self.flight.calls:
            call.abandon(closed_ns)
            call.release()
        self.settle()
        closed_ns = max(closed_ns, self._last_ns())
        self.book.enter("finalize", closed_ns)
        record = self._record(closed_ns)
        ticket = self.ticket
        await ticket.close(record)
        self._hub.request(
            msgspec.structs.replace(
                record,
                reserved_tokens=ticket.reserved_tokens,
                charged_tokens=ticket.charged_tokens,
                charged_micros=ticket.charged_micros,
            )
        )

    def metrics(self) -> dict[str, object]:
        """The record as it would be if the request ended now."""
        self.settle()
        found = self.ticket.shown(request_json(self._record(clock.now_ns()), 0))
        return {name: value for name, value in found.items() if name not in _KNOWN_LATER}

    def _output_tokens(self) -> int:
        if self.bill is not None:
            return self.bill.output
        return sum(len(call.emitted) for call in self.flight.calls) + self.relayed.output_tokens

    def _last_ns(self) -> int:
        return max((call.finished_ns for call in self.flight.calls), default=0)

    def _record(self, closed_ns: int) -> RequestRecord:  # long: a line for each field
        calls = self.flight.calls
        disturbed = self._hub.disturbed()
        records = [call.record for call in calls if call.record is not None]
        told = told_last(calls)
        last = told.record if told is not None else None
        states = self.book.close(closed_ns, told)
        gap_ns, gap_states, gap_step = longest_gap(calls)
        bill, relayed = self.bill, self.relayed
        first_ns, first_states = first_token(calls, self.book)
        if not calls and relayed.first_token_ns:
            first_ns, first_states = relayed.first_token_ns - self.book.opened_ns, relayed.first_token_states
        return RequestRecord(
            request_id=self.request_id,
            tenant=self.live.tenant,
            outcome="client_gone" if self.gone else self.outcome or _outcome_of(self.status),
            accepted_ns=self.book.opened_ns,
            finished_ns=closed_ns,
            states=states,
            prompt_tokens=bill.prompt if bill else _sum(records, "prompt_tokens") or self.live.prompt_tokens,
            cached_tokens=bill.cached if bill else _sum(records, "cached_tokens"),
            computed_tokens=_sum(records, "computed_tokens"),
            recomputed_tokens=_sum(records, "recomputed_tokens"),
            output_tokens=bill.output if bill else _sum(records, "output_tokens") or self._output_tokens(),
            drafted_tokens=_sum(records, "drafted_tokens"),
            draft_accepted_tokens=_sum(records, "draft_accepted_tokens"),
            draft_rejected_tokens=_sum(records, "draft_rejected_tokens"),
            preemptions=_sum(records, "preemptions"),
            resumes=sum(call.resumes for call in calls),
            steps=_sum(records, "steps"),
            kv_block_ns=_sum(records, "kv_block_ns"),
            interconnect_wait_ns=_sum(records, "interconnect_wait_ns"),
            interconnect_transfer_ns=_sum(records, "interconnect_transfer_ns"),
            interconnect_wait_max_ns=max((record.interconnect_wait_max_ns for record in records), default=0),
            engine_ns=_sum(records, "engine_ns"),
            stalled_for=stalled_for(states, last),
            kv_at_admission=last.kv_at_admission if last else None,
            kv_worst=last.kv_worst if last else None,
            kv_at_end=last.kv_at_end if last else None,
            first_token_ns=first_ns,
            first_token_states=first_states,
            gap_max_ns=gap_ns or relayed.gap_max_ns,
            gap_states=gap_states or relayed.gap_states,
            gap_step=gap_step,
            degenerate=next((record.degenerate for record in records if record.degenerate), ""),
            model=self.live.model,
            route=self.live.route,
            status=499 if self.gone else self.status,
            stream=self.live.stream,
            choices=self.live.choices,
            trace_id=self.live.trace.trace_id,
            replica=self.live.replica,
            routing=self.live.routing,
            promised_tokens=self.live.promised_tokens,
            upstream=relayed.upstream,
            usage_estimated=relayed.estimated,
            unread_ns=self._disturbed.late_ns,
            repeated_tokens=self.live.repeated_tokens,
            gc_pause_ns=disturbed.gc_pause_ns - self._disturbed.gc_pause_ns,
            loop_lag_ns=max(0, disturbed.loop_lag_ns - self._disturbed.loop_lag_ns),
            starved_ns=disturbed.starved_ns - self._disturbed.starved_ns,
        )


def _has_body(given: Mapping[str, str]) -> bool:
    return "transfer-encoding" in given or given.get("content-length", "0").strip("0") != ""


def route_of(path: str) -> str:
    """The path as a label: one of a closed vocabulary."""
    if path in ROUTES:
        return path
    if path.startswith("/page/"):
        return "/page/{name}"
    for prefix in ("/v1/models/", "/debug/requests/", "/debug/why/"):
        if path.startswith(prefix):
            return prefix + "{id}"
    if path.startswith("/admin/"):
        return "/admin"
    return OTHER


def put_exchange(scope: HTTPScope, exchange: Exchange) -> None:
    """Into the scope of its request."""
    scope[_SCOPE_KEY] = exchange  # type: ignore[literal-required]  # ours, beside the keys of ASGI


def exchange_of(scope: Scope) -> Exchange:
    """The exchange of this scope."""
    exchange = scope[_SCOPE_KEY]  # type: ignore[literal-required]
    assert isinstance(exchange, Exchange)
    return exchange


def _sum(records: list[RequestRecord], field: str) -> int:
    return sum(getattr(record, field) for record in records)


def _outcome_of(status: int) -> str:
    if status < 400:
        return "ok"
    return "not_found" if status == 404 else "invalid" if status < 500 else "error"
