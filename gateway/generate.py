"""
From a checked request to its answer.

    plan      prompts and parameters -> one GenerateRequest per choice, seeds derived
    launch    send them, wait until the engine has accepted all: until then a failure is a plain HTTP status
    events    the answer as a stream;  collect  the answer as a whole

Choice c of a request with seed s uses seed s for c = 0 and the first 8 bytes of BLAKE2b(s, c), as a signed integer,
for the others: distinct, and the same each time.  Every prompt of a list uses the same seeds, as if it were sent alone.
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import structlog

from engine.api import GenerateRequest, Hello, Sampling, WeightFacts
from gateway import errors
from gateway.answers import FinishReason
from gateway.calls import Call
from gateway.config import GatewayOptions
from gateway.decode import token_biases
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.routing import Placement
from gateway.stream import DONE, Choice, Tokens, Writer, event
from gateway.text import Piece, TextStream
from gateway.tokens import ModelText
from gateway.wire import PRIORITY_OF_TIER, ChatRequest, CompletionRequest
from telemetry import clock
from telemetry.live import Attribute

Asked = ChatRequest | CompletionRequest
Event = tuple[bytes, bool]
"""Bytes of a stream, one or more events, and whether more will follow."""

News = list[tuple[int, Piece]]
"""What became certain of which choices."""

SEQUENCES_MAX = 128
"""Prompts times choices of one request."""

_log = structlog.get_logger("pellucid.gateway")


@dataclass(frozen=True, slots=True)
class Plan:
    """The sequences of a request: choice `i` belongs to prompt `i // choices`."""

    messages: tuple[GenerateRequest, ...]
    choices: int
    stops: tuple[str, ...]


def plan(
    asked: Asked,
    prompts: Sequence[list[int]],
    exchange: Exchange,
    hello: Hello,
    text: ModelText,
    options: GatewayOptions,
) -> Plan:
    """One message per choice.  Raises ApiError on what this model cannot do."""
    choices = asked.n or 1
    count = choices * len(prompts)
    if count > SEQUENCES_MAX:
        raise errors.invalid(f"Prompts times choices must not be over {SEQUENCES_MAX}.", "n")
    seed = asked.seed if asked.seed is not None else secrets.randbits(63)
    stop_ids = _stop_ids(asked, hello, text)
    # A client may choose its request id, and send it again at once, but never a name in the engine.
    names = f"{exchange.request_id}#{secrets.token_hex(4)}"
    messages: list[GenerateRequest] = []
    for prompt in prompts:
        tokens_max = _tokens_max(asked, len(prompt), hello.context_max)
        for choice in range(choices):
            number = len(messages)
            message = GenerateRequest(
                request_id=f"{names}-{number}",
                prompt=tuple(prompt),
                sampling=_sampling(asked, derived_seed(seed, choice), hello.vocab_size),
                tokens_max=tokens_max,
                tokens_min=min(asked.min_tokens or 0, tokens_max),
                stop_ids=stop_ids,
                priority=exchange.ticket.priority(PRIORITY_OF_TIER[asked.service_tier]),
                tenant=exchange.ticket.tenant,
                share=exchange.ticket.share,
                weight=exchange.ticket.weight,
                deadline_s=options.request_timeout_s,
                traceparent=exchange.live.trace.traceparent(),
            )
            messages.append(message)
    stops = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    return Plan(tuple(messages), choices, stops)


def derived_seed(seed: int, choice: int) -> int:
    """See the top of this file."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _stop_ids(asked: Asked, hello: Hello, text: ModelText) -> tuple[int, ...]:
    turn_ids = text.turn_ids if isinstance(asked, ChatRequest) else ()
    ends = () if asked.ignore_eos else (*hello.eos_ids, *text.eos_ids, *turn_ids)
    return tuple(dict.fromkeys((*ends, *(asked.stop_token_ids or ()))))


def _tokens_max(asked: Asked, prompt_tokens: int, context_max: int) -> int:
    """What the client named; else the rest of the context, for completions 16 as OpenAI has it."""
    room = context_max - prompt_tokens
    named = asked.tokens_max
    if named is None:
        named = min(room, COMPLETION_TOKENS_DEFAULT) if isinstance(asked, CompletionRequest) else room
    if named < 1 or named > room:
        where = "messages" if isinstance(asked, ChatRequest) else "prompt"
        raise errors.context_exceeded(
            prompt_tokens=prompt_tokens, tokens_max=max(named, 1), context_max=context_max, param=where
        )
    return named


COMPLETION_TOKENS_DEFAULT = 16


def _sampling(asked: Asked, seed: int, vocab_size: int) -> Sampling:
    return Sampling(
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=max(asked.top_k or 0, 0),
        min_p=asked.min_p or 0.0,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        logit_bias=token_biases(asked, vocab_size),
        seed=seed,
        logprobs=asked.logprobs_top,
    )


def parameters(asked: Asked) -> dict[str, Attribute]:
    """What was asked for, for the request span.  No text of the client's."""
    named: dict[str, Attribute | None] = {
        "max_tokens": asked.tokens_max,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "min_p": asked.min_p,
        "seed": asked.seed,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repetition_penalty": asked.repetition_penalty,
        "min_tokens": asked.min_tokens,
        "logprobs": asked.logprobs_top,
        "ignore_eos": asked.ignore_eos,
        "priority": PRIORITY_OF_TIER[asked.service_tier] if asked.service_tier else None,
    }
    return {name: value for name, value in named.items() if value is not None}


def weight_attributes(weights: WeightFacts) -> dict[str, Attribute]:
    """In which numbers the answer was computed, for the request span."""
    attributes: dict[str, Attribute] = {"weights_scheme": weights.label, "weights_origin": weights.origin}
    if weights.bits:
        attributes["weights_bits"] = weights.bits
    if weights.group_size > 0:
        attributes["weights_group_size"] = weights.group_size
    return attributes


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
        """Send, and wait until all are accepted.  Returns headers that say what that took.  Raises ApiError."""
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
        return _timing(exchange, sent_ns, accepted_ns)

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

    async def events(self, writer: Writer, *, include_usage: bool) -> AsyncIterator[Event]:
        """The answer as server-sent events.  Never raises an error: it becomes the last event."""
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
        last = writer.usage(self._tokens()) if include_usage else b""
        self._succeed()
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
                if writer is not None:
                    await self._push(writer)
                await self._exchange.flight.wait()
            except ApiError as error:
                interruption = error

    async def _push(self, writer: Writer) -> None:
        """Write tokens as they come, until there is something else to do."""
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
        exchange.flight.wake()  # for whoever is awake now

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


def _timing(exchange: Exchange, sent_ns: int, accepted_ns: int) -> dict[str, str]:
    """The gateway's own time before the engine had the request, and the phases up to its acceptance."""
    spent = exchange.book.shown.spent(accepted_ns)
    phases = (f"{state};dur={spent.get(state, 0) / 1e6:.3f}" for state in ("parse", "tokenize", "dispatch"))
    return {
        "x-pellucid-overhead-ms": f"{(sent_ns - exchange.book.opened_ns) / 1e6:.3f}",
        "server-timing": ", ".join(phases),
    }
