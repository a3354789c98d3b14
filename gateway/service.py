"""
What the routes do: the gateway's parts, and the way of a request through them.

    key -> place -> body -> whose model?
        ours:            decode -> template, tokens -> plan -> limits -> replica -> launch -> events | whole answer
        an upstream's:   check -> limits -> upstream -> events | whole answer, as they come
    -> limits settled
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from msgspec import UNSET

from engine.api import Hello
from gateway import errors
from gateway.admission import Admission, Ticket
from gateway.answers import Detokenized, Tokenized
from gateway.backend import Backend
from gateway.config import GatewayOptions
from gateway.decode import T, check_token_ids, decode, of_body, split_prompts
from gateway.exchange import Exchange
from gateway.explain import Explain
from gateway.generation import Event, Generation, to_the_end
from gateway.live import Live
from gateway.models import Models
from gateway.planning import Asked, parameters, plan, weight_attributes
from gateway.renderer import RendererBusy
from gateway.repeats import Repeats
from gateway.siblings import Siblings, silent_json
from gateway.stream import ChatWriter, CompletionWriter, Writer
from gateway.template import TemplateError
from gateway.tokens import ModelText
from gateway.upstream import Pool
from gateway.upstream_relay import Relay
from gateway.upstream_request import Kind, model_in, read
from gateway.upstreams import Upstreams
from gateway.wire import RESERVED, ChatMessage, ChatRequest, CompletionRequest, DetokenizeRequest, Json, TokenizeRequest
from telemetry import clock
from telemetry.hub import Hub

Answer = tuple[dict[str, str], bytes | AsyncIterator[Event]]
"""Headers, and the whole body or the events of a stream."""


class Gateway:
    """Everything that outlives a request."""

    def __init__(
        self,
        options: GatewayOptions,
        text: ModelText | None,
        backend: Backend,
        hub: Hub,
        admission: Admission,
        siblings: Siblings,
        upstreams: Upstreams,
    ) -> None:
        self.admission = admission
        self.siblings = siblings
        self.options = options
        self.upstreams = upstreams
        self._text = text
        self.backend = backend
        self.hub = hub
        self.draining = False
        self.running: set[Exchange] = set()  # the engine has been given them: a drain waits for these
        self._places: set[Exchange] = set()  # those, and what is still being read or tokenized
        self.live = Live(hub, backend, siblings, options.model_name)
        self.models = Models(options, backend, upstreams.pools)
        self._repeats = Repeats()
        self.explain = Explain(siblings)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def text(self) -> ModelText:
        """Of the model that is served here.  Raises ApiError: none is."""
        if self._text is None:
            raise errors.model_not_found(self.options.model_name)
        return self._text

    # ---- the routes

    async def authenticate(self, exchange: Exchange) -> None:
        """For all routes but those of the probes.  Raises ApiError."""
        exchange.book.enter("auth", clock.now_ns())
        exchange.ticket = await self.admission.admit(exchange.headers)
        exchange.book.enter("parse", clock.now_ns())
        exchange.live.tenant = exchange.ticket.tenant

    async def chat(self, exchange: Exchange) -> Answer:
        """POST /v1/chat/completions.  Raises ApiError."""
        body, pool = await self._take(exchange)
        if pool is not None:
            return await self._forward(exchange, "chat", pool, body)
        asked = await self._decode(body, ChatRequest)
        self._admit(exchange, asked)
        exchange.book.enter("tokenize", clock.now_ns())
        prompt = await self._chat_tokens(asked.messages, asked.chat_template_kwargs)
        generation, hello, headers = await self._launch(exchange, asked, [prompt])
        writer = ChatWriter(
            self.text,
            request_id=exchange.request_id,
            created=int(time.time()),
            model=self.options.model_name,
            fingerprint=hello.fingerprint,
            logprobs=asked.logprobs_top is not None,
        )
        return headers, await self._answer(exchange, asked, generation, writer)

    async def complete(self, exchange: Exchange) -> Answer:
        """POST /v1/completions.  Raises ApiError."""
        body, pool = await self._take(exchange)
        if pool is not None:
            return await self._forward(exchange, "completion", pool, body)
        asked = await self._decode(body, CompletionRequest)
        self._admit(exchange, asked)
        exchange.book.enter("tokenize", clock.now_ns())
        given = split_prompts(asked.prompt)
        prompts = [await self._prompt_tokens(one, _where(index, given, asked)) for index, one in enumerate(given)]
        generation, hello, headers = await self._launch(exchange, asked, prompts)
        texts = (
            [one if isinstance(one, str) else self.text.decode(one) for one in given]
            if asked.echo
            else [""] * len(given)
        )
        writer = CompletionWriter(
            self.text,
            request_id=exchange.request_id,
            created=int(time.time()),
            model=self.options.model_name,
            fingerprint=hello.fingerprint,
            logprobs=asked.logprobs_top is not None,
            echoes=[text for text in texts for _ in range(asked.n or 1)],
        )
        return headers, await self._answer(exchange, asked, generation, writer)

    async def tokenize(self, exchange: Exchange) -> Tokenized:
        """POST /tokenize.  Raises ApiError."""
        asked = await self._decode(await exchange.read_body(), TokenizeRequest)
        self._check_model(exchange, asked.model)
        if asked.messages is not None:
            wanted = asked.add_generation_prompt is not False
            tokens = await self._chat_tokens(asked.messages, asked.chat_template_kwargs, add_generation_prompt=wanted)
        else:
            special = asked.add_special_tokens is not False
            tokens = await self.text.encode(asked.prompt or "", add_special_tokens=special)
        context_max = min((hello.context_max for hello in self.backend.hellos()), default=None)
        return Tokenized(len(tokens), context_max, tokens)

    async def detokenize(self, exchange: Exchange) -> Detokenized:
        """POST /detokenize.  Raises ApiError."""
        asked = await self._decode(await exchange.read_body(), DetokenizeRequest)
        self._check_model(exchange, asked.model)
        check_token_ids(asked.tokens, self._vocab_size(), "tokens")
        return Detokenized(self.text.decode(asked.tokens))

    # ---- the way of a request

    async def _reserve(self, exchange: Exchange) -> None:
        """Take a place before any of the body is kept: reading, template and tokenizer all let others in between."""
        if len(self._places) >= self.options.requests_here_max:
            message = f"{self.options.requests_here_max} requests are in flight already; try again later."
            raise errors.overloaded(message)
        self._places.add(exchange)

    async def _take(self, exchange: Exchange) -> tuple[bytes, Pool | None]:
        """The body, and the fork: who answers for its model; None: engines of ours do, or nobody."""
        await self._reserve(exchange)
        body = await exchange.read_body()
        if not self.upstreams:
            return body, None
        model = await of_body(body, lambda: model_in(body))
        if self._text is None and model not in ("", *self.upstreams.pools):
            raise errors.model_not_found(model)
        return body, self.upstreams.pools.get(model)

    async def _decode(self, body: bytes, kind: type[T]) -> T:
        return await of_body(body, lambda: decode(body, kind, depth_max=self.options.depth_max))

    def _admit(self, exchange: Exchange, asked: Asked) -> None:
        self._check_model(exchange, asked.model)
        live = exchange.live
        live.model = self.options.model_name
        live.stream = bool(asked.stream)
        live.choices = asked.n or 1
        live.parameters = parameters(asked)
        if self.draining:
            raise errors.draining()

    def _check_model(self, exchange: Exchange, model: str | None) -> None:
        if model in self.upstreams.pools:
            raise errors.invalid(f"The model {model[:100]!r} is served elsewhere, and so is its tokenizer.", "model")
        if model is not None and model != self.options.model_name:
            raise errors.model_not_found(model)
        exchange.ticket.check_model(self.options.model_name)

    def _vocab_size(self) -> int:
        return max([hello.vocab_size for hello in self.backend.hellos()] or [self.text.vocab_size])

    async def _chat_tokens(
        self, messages: Sequence[ChatMessage], extra: dict[str, object] | None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        if len(messages) > self.options.messages_max:
            raise errors.invalid(f"At most {self.options.messages_max} messages are allowed.", "messages")
        for name in extra or ():
            if name in RESERVED:
                raise errors.invalid(f"'{name}' is set by the server.", f"chat_template_kwargs.{name}")
        try:
            prompt = await self.text.render(messages, add_generation_prompt=add_generation_prompt, extra=extra)
        except TemplateError as error:
            raise errors.invalid(str(error), "messages") from None
        except RendererBusy:
            raise errors.overloaded("Too many conversations wait to be made into prompts; try again later.") from None
        tokens = await self.text.encode(prompt, add_special_tokens=False)
        if not tokens:
            raise errors.invalid("The messages make an empty prompt.", "messages")
        return tokens

    async def _prompt_tokens(self, prompt: str | list[int], where: str) -> list[int]:
        if isinstance(prompt, str):
            tokens = await self.text.encode(prompt, add_special_tokens=True)
        else:
            tokens = prompt
            check_token_ids(tokens, self._vocab_size(), where)
        if not tokens:
            raise errors.invalid("The prompt is empty: at least one token is needed.", where)
        return tokens

    async def _launch(
        self, exchange: Exchange, asked: Asked, prompts: list[list[int]]
    ) -> tuple[Generation, Hello, dict[str, str]]:
        exchange.watch()
        self._check_wanted(exchange)
        planned = plan(asked, prompts, exchange, self.backend.facts(), self.text, self.options)
        if any(self.backend.poison.refuses(message, clock.now_ns()) for message in planned.messages):
            raise errors.poisonous()
        with self.backend.choosing(planned.messages, key=asked.prompt_cache_key or asked.user or "") as chosen:
            exchange.book.enter("limit", clock.now_ns())
            await self.admission.reserve(
                exchange.ticket,
                prompt_tokens=sum(map(len, prompts)),
                sequences=len(planned.messages),
                tokens_max=asked.tokens_max,
            )
            exchange.book.enter("route", clock.now_ns())
            placed = await chosen()
        self._check_wanted(exchange)
        hello = placed.hello
        exchange.live.placed(hello.replica, placed.reason, placed.promised_tokens)
        exchange.live.prompt_tokens = sum(len(message.prompt) for message in planned.messages)
        exchange.live.choices = len(planned.messages)
        exchange.live.parameters |= weight_attributes(hello.weights)
        self._runs(exchange)
        exchange.on_close.append(lambda: self._repeats.note(exchange.live, planned, hello.block_slots))
        generation = Generation(exchange, planned, self.text, self.options)
        return generation, hello, await generation.launch(placed)

    def _check_wanted(self, exchange: Exchange) -> None:
        """Nothing is sent for a client that has left, or into a drain, while something was awaited."""
        if exchange.flight.error is not None:
            raise exchange.flight.error
        if self.draining:
            raise errors.draining()

    def _runs(self, exchange: Exchange) -> None:
        self.running.add(exchange)
        self._idle.clear()

    async def _answer(
        self, exchange: Exchange, asked: Asked, generation: Generation, writer: Writer
    ) -> bytes | AsyncIterator[Event]:
        if asked.stream:
            options = asked.stream_options
            usage = bool(options and options.include_usage)
            return generation.events(writer, usage=usage, metrics=bool(asked.include_metrics))
        choices, tokens = await generation.collect()
        return writer.whole(choices, tokens, exchange.metrics() if asked.include_metrics else UNSET)

    # ---- the way of a request whose model is served elsewhere

    async def _forward(self, exchange: Exchange, kind: Kind, pool: Pool, body: bytes) -> Answer:
        exchange.live.model = pool.model
        exchange.ticket.check_model(pool.model)
        asked = await of_body(body, lambda: read(body, kind, self.options))
        relay = Relay(exchange, pool, asked, self.upstreams)
        self._check_wanted(exchange)
        exchange.book.enter("limit", clock.now_ns())
        await self.admission.reserve(
            exchange.ticket, prompt_tokens=asked.prompt_tokens, sequences=asked.choices, tokens_max=asked.tokens_max
        )
        exchange.book.enter("route", clock.now_ns())
        self._check_wanted(exchange)
        self._runs(exchange)
        exchange.watch()
        headers = await relay.ask()
        return headers, to_the_end(relay.events()) if asked.stream else await relay.whole()

    # ---- the end

    def finished(self, exchange: Exchange) -> None:
        """Its record is written."""
        self._places.discard(exchange)
        self.running.discard(exchange)
        if not self.running:
            self._idle.set()

    async def drain(self) -> None:
        """Refuse what is new, let the rest run up to `drain_s`, then end it with an error."""
        self.draining = True
        self.live.close()
        if not await self._idle_within(self.options.drain_s):
            self.cut_off()
            await self._idle_within(self.options.record_timeout_s + 1)

    def cut_off(self) -> None:
        """End what runs, now."""
        for exchange in list(self.running):
            exchange.flight.interrupt(errors.draining())

    async def _idle_within(self, limit_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        return self._idle.is_set()

    # ---- what the gateway says of itself

    def ready(self) -> tuple[bool, dict[str, Json]]:
        """Whether a new request would be served, and why not."""
        troubles, others = self.backend.troubles(), self.upstreams.troubles()
        reason = "draining" if self.draining else ""
        if not reason and len(troubles) == len(self.backend.replicas) and not self.upstreams.ready():
            reasons = [f"engine {number} {trouble}" for number, trouble in troubles.items()]
            reason = "; ".join([*reasons, *(f"upstream {name} {trouble}" for name, trouble in others.items())])
        state: dict[str, Json] = {"status": "not ready" if reason else "ready", "reason": reason or None}
        state["engines"] = dict(troubles)
        state["degraded"] = self._degraded()
        return not reason, state | ({"upstreams": dict(others)} if self.upstreams else {})

    def _degraded(self) -> str | None:
        """What is not there, or not well, though requests may be served without it."""
        engines, upstreams = self.backend.troubles(), self.upstreams.troubles()
        found = [
            self.admission.trouble,
            *(f"Engine {number}: {trouble}." for number, trouble in engines.items()),
            *(f"Upstream {name}: {trouble}." for name, trouble in upstreams.items()),
        ]
        return " ".join(filter(None, found)) or None

    def health(self) -> dict[str, Json]:
        """That the process is alive, what it serves, and what of it is missing."""
        hellos = self.backend.hellos()
        engines: list[Json] = [
            {
                "replica": hello.replica,
                "fingerprint": hello.fingerprint,
                "reproducible": hello.reproducible,
                "context_max": hello.context_max,
                "weights": hello.weights.label,
                "details": dict(hello.details),
            }
            for hello in hellos
        ]
        reproducible = all(hello.reproducible for hello in hellos) if hellos else None
        degraded = self._degraded()
        state: dict[str, Json] = {
            "status": "degraded" if degraded else "ok",
            "degraded": degraded,
            "model": self.options.model_name,
            "reproducible": reproducible,
            "engines": engines,
        }
        return state | ({"upstreams": self.upstreams.health()} if self.upstreams else {})

    async def debug_requests(self, ticket: Ticket) -> dict[str, Json]:
        """The newest requests of all workers, as far as they are for these eyes."""
        requests, silent = await self.siblings.requests(ticket.eyes)
        shown: list[Json] = [ticket.shown(one) for one in requests]
        return {"requests": shown} | silent_json(silent)

    async def debug_request(self, request_id: str, ticket: Ticket) -> dict[str, Json]:
        """The newest request of that name, whichever worker had it.  Raises ApiError: none for these eyes."""
        found, silent = await self.siblings.find(request_id)
        for one in found:
            if ticket.sees(str(one["tenant"])):
                return ticket.shown(one)
        raise errors.not_remembered(silent)


def _where(index: int, given: Sequence[str | list[int]], asked: CompletionRequest) -> str:
    several = isinstance(asked.prompt, list) and (len(given) > 1 or isinstance(asked.prompt[0], str | list))
    return f"prompt[{index}]" if several else "prompt"
