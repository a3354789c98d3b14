"""
What crosses the line between the gateway and the engine, and how it is framed.

    gateway -> engine    GenerateRequest, Abort, Ping, Look    one message a frame
    engine -> gateway    Hello, once; then one StepFrame per step: all deltas of that step and its record; Pong, Sight

A frame is a 4-byte little-endian length and that many bytes of msgpack.  The engine knows token ids, never text.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

# Part of the interface, because both sides must name prefixes alike.
from engine.prefix import indexed_names as indexed_names  # noqa: PLC0414 - exported again
from engine.prefix import indexed_tokens as indexed_tokens  # noqa: PLC0414 - exported again
from telemetry.records import KvBook, StepRecord

FRAME_BYTES_MAX = 64 * 1024 * 1024
WEIGHT_MAX = 1000

FinishReason = Literal["stop", "length", "abort", "deadline", "overloaded", "refused", "failed", "shutdown"]
FINISH_REASONS: tuple[FinishReason, ...] = (
    "stop",  # a stop id was sampled
    "length",  # tokens_max, or the end of the context
    "abort",  # the caller gave up
    "deadline",  # deadline_s passed first
    "overloaded",  # the queue is full; nothing was computed
    "refused",  # can never be served here; nothing was computed
    "failed",  # this request alone went wrong
    "shutdown",  # the engine is going down
)


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen.  Ranges are checked by the gateway and again at the engine's door."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as in CTRL (Keskar et al. 2019, section 4.1)
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = {}
    seed: int = 0  # together with the position it fixes every random choice
    logprobs: int | None = None  # alternatives reported beside each chosen token; None: no logprobs at all


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """One sequence to generate."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    tokens_max: int  # output tokens, those of `resume` included
    tokens_min: int = 0  # stop ids are not sampled before
    stop_ids: tuple[int, ...] = ()
    priority: int = 0  # lower goes first
    tenant: str = ""  # the prefix cache is salted by it
    share: str = ""  # whose turn it uses up, among requests of its priority
    weight: int = 1  # 1 to WEIGHT_MAX: so many times the tokens of a share of weight 1, while both wait
    deadline_s: float = 0.0  # from acceptance to the last token; 0: none
    traceparent: str = ""
    resume: int = 0  # how many tokens at the end of `prompt` are output of an earlier try


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop this request, in whatever state.  Unknown or finished ids are ignored."""

    request_id: str


Message = GenerateRequest | Abort


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Are you there?  Answered between two steps, by the server: the scheduler does not hear of it."""


class Look(msgspec.Struct, frozen=True, tag="look"):
    """What is before you?  Answered as a Ping is, by a Sight, unless something that was said before is still unread."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities at one position, before temperature and filters, after penalties and bias."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one sequence, for the bill."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Fault(msgspec.Struct, frozen=True):
    """Why a request was refused or failed, in words for the person who sent it."""

    code: str  # the `code` of the OpenAI error: context_length_exceeded, overloaded, ...
    message: str
    param: str | None = None


DEGENERATE = "degenerate_output"
"""The code of a fault whose message is about the model's numbers, and fit for the person who asked."""


class Finish(msgspec.Struct, frozen=True):
    """The end of a sequence."""

    reason: FinishReason
    usage: Usage
    stop_id: int | None = None
    fault: Fault | None = None


class Delta(msgspec.Struct, frozen=True):
    """
    News of one request.  The first one, even if empty, means that the engine has accepted it.

    Two deltas of one request merge into one, so a reader who falls behind costs O(tokens_max) integers.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, where they were asked for
    finish: Finish | None = None

    def merge(self, newer: "Delta") -> "Delta":
        """This delta and the one after it, as one."""
        assert self.request_id == newer.request_id
        assert self.finish is None, f"{self.request_id}: a delta after the finish"
        return Delta(self.request_id, self.tokens + newer.tokens, self.logprobs + newer.logprobs, newer.finish)


class WeightFacts(msgspec.Struct, frozen=True):
    """In which numbers the weights of linear layers are held, and which weights they were made of."""

    method: str = "none"  # none: floats; int8, fp8, gptq, packed, nf4, llm-int8
    bits: int = 0
    group_size: int = -1  # weights that share a scale; -1: those of an output channel or of all
    label: str = "float"  # all of it in one word: gptq-4bit-g64
    origin: str = ""  # which float weights: a hash of their configuration, sizes and samples


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """What an engine says of itself when a gateway connects."""

    epoch: str  # new at each start: what a gateway knew of the cache before is void
    replica: int
    clock_id: str
    model: str
    fingerprint: str  # weights + precision + build: same fingerprint and seed, same output
    reproducible: bool  # the start-up probe found row-independent products: DESIGN 5 holds
    vocab_size: int
    context_max: int
    block_slots: int
    blocks_max: int
    sequences_max: int
    waiting_max: int
    eos_ids: tuple[int, ...]
    details: dict[str, str] = {}  # dtype, kernels, threads: for /health and logs
    weights: WeightFacts = WeightFacts()


class Load(msgspec.Struct, frozen=True):
    """What an engine has on its hands."""

    running: int = 0  # sequences in the batch
    waiting: int = 0
    owed_tokens: int = 0  # known and not computed, of all sequences; what the prefix cache will save is not known yet
    used_slots: int = 0  # of KV: those that a new request could not have


class PrefixNews(msgspec.Struct, frozen=True):
    """What has changed in the prefix cache, in the names that an index knows."""

    here: tuple[bytes, ...] = ()  # have come, or were used
    gone: tuple[bytes, ...] = ()  # have made room for others
    lost: int = 0  # news that did not fit


class StepFrame(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """All the news of one engine step."""

    deltas: tuple[Delta, ...] = ()
    step: StepRecord | None = None  # None: nothing was computed, only door decisions and aborts
    load: Load | None = None  # None: in a frame that is not about a step
    prefixes: PrefixNews | None = None  # for one of the gateways that are connected


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Yes."""


BLOCK_PLACES = ("free", "cached_idle", "fenced", "held")
"""Where a block may be.  Of a held one the slots are filled, tail or, where none of them is filled, lookahead."""
BlockRun = tuple[int, int, int, int, int]
"""So many blocks side by side: place (of BLOCK_PLACES), filled slots of each, number of an owner or -1, holders."""


class SeenSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that waits or runs; durations are of its whole life here."""

    number: int  # by which blocks name it
    request_id: str
    tenant: str
    state: str  # of ENGINE_STATES
    state_ns: int  # spent in that state
    age_ns: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    blocks: int


class Sight(msgspec.Struct, frozen=True, kw_only=True, tag="sight"):
    """What an engine has before it between two steps, all of one moment (see engine.sight)."""

    step_id: int  # the newest step that is done
    block_slots: int
    book: KvBook  # sums over the runs
    runs: tuple[BlockRun, ...]  # all blocks, in their order
    sequences: tuple[SeenSequence, ...]  # those that run, then those that wait
    spent_ns: int = 0  # that the engine has spent on this: who looks often should know


EngineFrame = Hello | StepFrame | Pong | Sight
Question = Ping | Look

_encoder = msgspec.msgpack.Encoder()
_message_decoder = msgspec.msgpack.Decoder(Message | Question)
_frame_decoder = msgspec.msgpack.Decoder(EngineFrame)


class FrameError(Exception):
    """The other side sent what is no frame: the connection is of no use any more."""


def encode(value: Message | Question | EngineFrame) -> bytes:
    """One frame, length included."""
    body = _encoder.encode(value)
    if len(body) > FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {FRAME_BYTES_MAX}")
    return len(body).to_bytes(4, "little") + body


class FrameReader:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take bytes as they come and yield each body that is whole.  Raises FrameError on an impossible length."""
        self._pending += data
        while len(self._pending) >= 4:
            length = int.from_bytes(self._pending[:4], "little")
            if length > FRAME_BYTES_MAX:
                raise FrameError(f"a frame of {length} bytes is over the limit of {FRAME_BYTES_MAX}")
            if len(self._pending) < 4 + length:
                return
            body = bytes(self._pending[4 : 4 + length])
            del self._pending[: 4 + length]
            yield body


def decode_message(body: bytes) -> Message | Question:
    """A message to the engine.  Raises FrameError."""
    try:
        message: Message | Question = _message_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(f"not a message: {error}") from error
    return message


def decode_frame(body: bytes) -> EngineFrame:
    """A frame from the engine.  Raises FrameError."""
    try:
        return _frame_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(f"not an engine frame: {error}") from error
