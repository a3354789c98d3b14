"""
The OpenAI JSON as frozen types: what is accepted, within which ranges.

What is not here is refused by name: fields of `UNSUPPORTED` are known to clients but cannot be honoured yet, all
others are unknown.  A neutral value of an unsupported field (null, an empty list, ...) asks for nothing: accepted.

`gateway.openapi` makes the document from the same types and tables.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gateway.rules import Rule, none_of, one_of

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

INT64_MAX = 2**63 - 1
TOKENS_MAX_MAX = 2**31 - 1
PROMPTS_MAX = 64

Count = Annotated[int, Meta(ge=1, le=TOKENS_MAX_MAX)]
CountOrZero = Annotated[int, Meta(ge=0, le=TOKENS_MAX_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=TOKENS_MAX_MAX)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
StopList = Annotated[list[Stop], Meta(max_length=4)]
Label = Annotated[str, Meta(max_length=512)]
AnyJson = Annotated[object, Meta(extra_json_schema={"description": "Any JSON value."})]
TOKEN_ID_KEY = r"^[0-9]{1,10}$"
"""Token ids as names of fields."""
Bias = Annotated[float, Meta(ge=-100, le=100)]
Biases = Annotated[dict[str, Bias], Meta(extra_json_schema={"propertyNames": {"pattern": TOKEN_ID_KEY}})]
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
"""Names that a client's `chat_template_kwargs` must not replace."""
TemplateArguments = Annotated[
    dict[str, AnyJson], Meta(extra_json_schema={"propertyNames": {"not": {"enum": list(RESERVED)}}})
]
Metadata = Annotated[dict[str, str], Meta(max_length=16)]
ServiceTier = Literal["auto", "default", "flex", "priority"]

PRIORITY_OF_TIER: dict[str | None, int] = {None: 0, "auto": 0, "default": 0, "flex": 1, "priority": -1}
"""`service_tier` as the engine's priority: lower goes first."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What else a stream should carry."""

    include_usage: bool | None = None


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that the model made earlier in the conversation."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of an assistant message of the past."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a message."""

    type: Literal["text"]
    text: str


Parts = Annotated[list[TextPart], Meta(min_length=1)]


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: Label | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Label | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[AnyJson], Meta(max_length=0)] | None = None


class Generation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_metrics: bool | None = None
    max_tokens: Count | None = None
    min_tokens: CountOrZero | None = None
    n: Annotated[int, Meta(ge=1, le=8)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=TOKENS_MAX_MAX)] | None = None  # -1 and 0: all, as vLLM has it
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    seed: Seed | None = None
    stop: Stop | StopList | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    user: Label | None = None
    service_tier: ServiceTier | None = None
    prompt_cache_key: Label | None = None
    safety_identifier: Label | None = None
    metadata: Metadata | None = None


class ChatRequest(Generation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: TemplateArguments | None = None
    parallel_tool_calls: bool | None = None  # harmless without tools

    @property
    def logprobs_top(self) -> int | None:
        """Alternatives beside each token; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tokens_max(self) -> int | None:
        """As the client named it."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Texts = Annotated[list[str], Meta(min_length=1, max_length=PROMPTS_MAX)]
TokenIdLists = Annotated[list[TokenIds], Meta(min_length=1, max_length=PROMPTS_MAX)]
PROMPTS: tuple[object, ...] = (str, Texts, TokenIds, TokenIdLists)


class CompletionRequest(Generation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[AnyJson]
    """One of `PROMPTS`, which decode.split_prompts sees to; msgspec allows one array type in a union."""
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def logprobs_top(self) -> int | None:
        """Alternatives beside each token; None: no logprobs."""
        return self.logprobs

    @property
    def tokens_max(self) -> int | None:
        """As the client named it."""
        return self.max_tokens


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize, in vLLM's shape: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize, in vLLM's shape."""

    tokens: list[TokenId]
    model: str | None = None


NEUTRAL: tuple[Json, ...] = (None, [], {}, False)
"""Values that ask for nothing, of fields that are not supported."""

_COMMON: dict[str, tuple[Json, ...]] = {
    "store": (),
    "best_of": (1,),
    "use_beam_search": (),
    "length_penalty": (1,),
    "include_stop_str_in_output": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "prompt_cache_retention": (),
}
_CHAT: dict[str, tuple[Json, ...]] = {
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "continue_final_message": (),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "echo": (),
    "suffix": (),
}

UNSUPPORTED: dict[type, dict[str, tuple[Json, ...]]] = {
    ChatRequest: _COMMON | _CHAT,
    CompletionRequest: _COMMON | {"suffix": ("",)},
}
"""Of each kind of request: field -> the values, beside `NEUTRAL`, that change nothing here."""

RULES: dict[type, tuple[Rule, ...]] = {
    Generation: (
        Rule(
            "stream_options",
            "'stream_options' is only allowed when 'stream' is true.",
            ({"stream_options": one_of(None)}, {"stream": one_of(True)}),
        ),
    ),
    ChatRequest: (
        Rule(
            "top_logprobs",
            "'top_logprobs' needs 'logprobs' to be true.",
            ({"top_logprobs": one_of(None)}, {"logprobs": one_of(True)}),
        ),
    ),
    CompletionRequest: (
        Rule(
            "echo",
            "'echo' together with 'logprobs' needs logprobs of the prompt, which are not supported yet.",
            ({"echo": one_of(None, False)}, {"logprobs": one_of(None)}),
        ),
    ),
    ChatMessage: (
        Rule(
            "content",
            "A message needs content, unless it is an assistant's with tool calls.",
            ({"content": none_of(None)}, {"role": one_of("assistant"), "tool_calls": none_of(None, [])}),
        ),
        Rule(
            "tool_calls",
            "Only assistant messages carry tool calls.",
            ({"tool_calls": one_of(None, [])}, {"role": one_of("assistant")}),
        ),
        Rule(
            "tool_call_id",
            "Only tool messages carry a tool call id.",
            ({"tool_call_id": one_of(None)}, {"role": one_of("tool")}),
        ),
    ),
    TokenizeRequest: (
        Rule(
            "prompt",
            "Either 'prompt' or 'messages' is needed.",
            ({"prompt": none_of(None)}, {"messages": none_of(None)}),
        ),
        Rule(
            "prompt",
            "Either 'prompt' or 'messages' is needed, not both.",
            ({"prompt": one_of(None)}, {"messages": one_of(None)}),
        ),
    ),
}
"""What the types cannot say; for a subclass, those of its bases hold too."""
