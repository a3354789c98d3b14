"""
The JSON of answers as types: what `gateway.stream` writes, and what the document says of it.

The answers about the state of the gateway and its engines are made elsewhere; their types here name what is part of the
interface, and more fields may stand beside those.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.wire import AnyJson, TokenId

FinishReason = Literal["stop", "length"]


class PromptDetails(msgspec.Struct, frozen=True):
    """Where the tokens of a prompt came from."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """What a request cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token and its natural-log probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob, frozen=True):
    """The token that was chosen, and the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of the tokens of a message."""

    content: list[ChosenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """More of a message; the role comes once."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """More of one of `n` answers; the last one has the reason why there is no more."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class TextLogprobs(msgspec.Struct, frozen=True):
    """Of the tokens of a text, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True):
    """One of the texts, or more of it; the last one has the reason why there is no more."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


Metrics = dict[str, AnyJson] | UnsetType
"""With `include_metrics`: the request as `/debug/requests` will show it, up to here."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same in all that a request gets."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(Envelope, frozen=True, kw_only=True):
    """The whole answer to a conversation."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics = UNSET


class ChatChunk(Envelope, frozen=True, kw_only=True):
    """Part of it; without choices, the bill."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    metrics: Metrics = UNSET


class Completion(Envelope, frozen=True, kw_only=True):
    """The whole continuation of one or more texts."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage
    metrics: Metrics = UNSET


class CompletionChunk(Envelope, frozen=True, kw_only=True):
    """Part of it; without choices, the bill."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | UnsetType = UNSET
    metrics: Metrics = UNSET


class Weights(msgspec.Struct, frozen=True):
    """In which numbers the weights are held."""

    scheme: str
    method: str
    bits: int | None
    group_size: int | None
    origin: str


class Model(msgspec.Struct, frozen=True):
    """A model that is served; null is what no engine has said yet, and upstreams never say."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    quantization: Weights | None


class Models(msgspec.Struct, frozen=True):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(msgspec.Struct, frozen=True):
    """A text as token ids; `max_model_len` is null while no engine has said how long a context may be."""

    count: int
    max_model_len: int | None
    tokens: list[TokenId]


class Detokenized(msgspec.Struct, frozen=True):
    """Token ids as text."""

    prompt: str


class Engine(msgspec.Struct, frozen=True):
    """An engine that is connected."""

    replica: int
    fingerprint: str
    reproducible: bool
    context_max: int
    weights: str
    details: dict[str, AnyJson]


class Upstream(msgspec.Struct, frozen=True):
    """A server that answers for other models."""

    name: str
    model: str
    status: Literal["ok", "trouble"]
    reason: str | None
    requests_in_flight: int


class Health(msgspec.Struct, frozen=True):
    """`degraded`: the server for keys and limits is away, or an engine, or an upstream; which, and why."""

    status: Literal["ok", "degraded"]
    degraded: str | None
    model: str
    reproducible: bool | None
    engines: list[Engine]
    upstreams: list[Upstream] | UnsetType = UNSET


class Ready(msgspec.Struct, frozen=True):
    """Whether requests would be served; by engine and by upstream, what is wrong with it."""

    status: Literal["ready", "not ready"]
    reason: str | None
    engines: dict[str, str]
    degraded: str | None
    upstreams: dict[str, str] | UnsetType = UNSET


class DebugRequest(msgspec.Struct, frozen=True):
    """Where the time of a request went; `outcome` is null while it runs."""

    request_id: str
    tenant: str
    outcome: str | None
    e2e_ns: int
    states: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class DebugRequests(msgspec.Struct, frozen=True):
    """The newest requests first."""

    requests: list[DebugRequest]


class ExchangeBook(msgspec.Struct, frozen=True):
    """All exchanges of one kind in a step, as rank 0 met them."""

    calls: int
    wait_ns: int
    transfer_ns: int
    bytes: int
    bytes_per_s: float


class Interconnect(msgspec.Struct, frozen=True):
    """What the ranks of an engine waited for each other."""

    kind: str
    wait_ns: int
    transfer_ns: int
    bubble_ns: int
    bytes: int
    straggler: int
    exchanges: dict[str, ExchangeBook]
    rank_wait_ns: list[int]
    clock_error_ns: int


class DebugStep(msgspec.Struct, frozen=True):
    """Where the time of an engine's step went."""

    step_id: int
    replica: int
    step_ns: int
    parts: dict[str, int]
    tokens: int
    sequences: int
    interconnect: Interconnect


class DebugSteps(msgspec.Struct, frozen=True):
    """The newest steps first."""

    steps: list[DebugStep]


class Slots(msgspec.Struct, frozen=True):
    """All slots of the KV pool: the places sum to the total."""

    total: int
    free: int
    cached_idle: int
    filled: int
    tail: int
    lookahead: int
    fenced: int


class DebugKv(msgspec.Struct, frozen=True):
    """Where the KV slots are."""

    slots: Slots
    blocks: dict[str, int]
    utilization: float
    token_occupancy: float
    internal_fragmentation: float
