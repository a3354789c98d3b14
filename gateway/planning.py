"""
From a checked request to what engines are asked: one GenerateRequest per choice, with seeds of their own.

Choice c of a request with seed s uses seed s for c = 0 and the first 8 bytes of BLAKE2b(s, c), as a signed integer,
for the others: distinct, and the same each time.  Every prompt of a list uses the same seeds, as if it were sent alone.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from engine.api import GenerateRequest, Hello, Sampling, WeightFacts
from gateway import errors
from gateway.config import GatewayOptions
from gateway.decode import token_biases
from gateway.exchange import Exchange
from gateway.tokens import ModelText
from gateway.wire import PRIORITY_OF_TIER, ChatRequest, CompletionRequest
from telemetry.live import Attribute
from telemetry.records import NAME_SEPARATOR

Asked = ChatRequest | CompletionRequest
SEQUENCES_MAX = 128
"""Prompts times choices of one request."""


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
    names = f"{exchange.request_id}{NAME_SEPARATOR}{secrets.token_hex(4)}"
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
