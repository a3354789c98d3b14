"""
The records: flat, frozen facts about one step and about one request, as they cross process boundaries.

A producer fills one record and forgets it.  All times are integer nanoseconds of `telemetry.clock`; all KV sizes are
slots (one slot holds keys and values of one token).  Each record carries its own book, and `imbalance()` says by how
much that book fails to close: zero, or a bug of ours.
"""

import msgspec

STEP_PARTS = (
    "publish",  # encode and write the frame of the step before
    "idle",  # nothing to do: waiting for a message
    "plan",  # take messages, choose slices
    "draft",  # a draft model guesses; before the slices are chosen
    "batch",  # the plan as arrays, and the answers from what came back
    "compute",  # forward pass
    "interconnect_wait",
    "interconnect_transfer",
    "bubble",  # the first stage of a pipeline has nothing to do: those behind it still compute
    "sample",
    "commit",
)
"""The parts of a step, in the order in which they happen.  They sum to the step."""

COMPUTE_PARTS = (
    "products",  # matrix products of the layers
    "attention",
    "elements",  # norms, rounding to 8 bits, positions, writing the cache
    "head",  # the last norm, the logits, the best of them
)
"""Where `compute` went, as the first thread of a native step sees it; a decoder that cannot tell says nothing."""

ENGINE_STATES = (
    "queue_batch_full",  # every sequence place of the batch is taken
    "queue_kv_full",  # too few free KV blocks
    "queue_token_budget",  # this step's tokens are spent
    "queue_fairness",  # held back so that the head of the queue is not bypassed for ever
    "prefill",
    "decode",
    "stalled",  # in the batch, but this step served others
    "preempted",  # KV taken away, waiting to come back
    "recompute",  # paying again for tokens that had been computed before a preemption
)
"""What a request may be doing while the engine has it: exactly one of these at any time."""

GATEWAY_STATES = (
    "auth",  # whose key it is
    "parse",  # read and validate the body
    "tokenize",  # chat template and tokenizer
    "limit",  # charge the limits of its key, and settle them at its end
    "route",  # choose a replica
    "dispatch",  # handed to the engine, which has not taken it yet: it takes messages between steps
    "lost",  # an engine had it that is gone, and its book with it
    "resume",  # waiting for another engine to take it up where it stood
    "upstream",  # an upstream has it, and we wait for what it says next; what it is doing, nobody can tell
    "deliver",  # the engine has finished, its last frame is on the way
    "detokenize",  # make text of what came last, and the answer of it
    "send",  # write it
    "send_blocked",  # the client does not read
    "finalize",
)
"""What a request may be doing while the gateway has it, before or after the engine."""


DEGENERATE_KINDS = (
    "not_a_number",  # NaN or infinite
    "flat",  # all logits are the same: any token is as good as another
    "repeated",  # one token, over and over from the start
)
"""In which ways the output of a model can be none: a broken checkpoint, or numbers too coarse for it."""


class KvBook(msgspec.Struct, frozen=True):
    """Where each KV slot of the pool is, at the end of a step.  Shared blocks count once."""

    total: int = 0
    free: int = 0
    cached_idle: int = 0  # nobody holds it, but a prefix may hit it
    filled: int = 0  # held, with keys and values in it
    tail: int = 0  # held, the unfilled rest of a sequence's last block
    lookahead: int = 0  # held, whole blocks ahead of what is computed
    fenced: int = 0  # given up, but a step in flight may still write it

    def imbalance(self) -> int:
        """Slots that the book has lost (positive) or invented (negative)."""
        known = self.free + self.cached_idle + self.filled + self.tail + self.lookahead + self.fenced
        return self.total - known

    def reading(self) -> "KvReading":
        """The book in three numbers."""
        return KvReading(self.utilization, self.token_occupancy, self.internal_fragmentation)

    @property
    def available(self) -> int:
        """Slots that a new request could have."""
        return self.free + self.cached_idle

    @property
    def utilization(self) -> float:
        """Share of the pool that is not available to a new request, 0..1."""
        return 1 - self.available / self.total if self.total else 0.0

    @property
    def token_occupancy(self) -> float:
        """Share of the pool that holds keys and values somebody uses now, 0..1."""
        return self.filled / self.total if self.total else 0.0

    @property
    def internal_fragmentation(self) -> float:
        """Share of the started blocks that is unfilled, 0..1."""
        used = self.filled + self.tail
        return self.tail / used if used else 0.0


class KvReading(msgspec.Struct, frozen=True):
    """How full the pool was when a request met it: shares, 0..1."""

    utilization: float
    token_occupancy: float
    internal_fragmentation: float


class MemoryReading(msgspec.Struct, frozen=True):
    """Memory of a process below its pools, in bytes; sampled, never by the token.  0: the system does not say."""

    resident_bytes: int = 0
    private_bytes: int = 0  # of those, what no other process shares
    heap_used_bytes: int = 0  # what the C library has handed out, large blocks included
    heap_free_bytes: int = 0  # what it keeps, in pieces between those


EXCHANGES = (
    "plan",  # what the step is to compute, as rank 0 tells the others
    "attention",  # the sum over ranks behind each layer's attention
    "mlp",  # the sum over ranks behind each layer's MLP
    "head",  # what each rank found in its part of the vocabulary
    "stage",  # rows that go on to the ranks of the next layers
)
"""What the ranks of one engine exchange in a step."""


class Exchange(msgspec.Struct, frozen=True):
    """All exchanges of one kind in one step, as rank 0 met them."""

    calls: int = 0
    wait_ns: int = 0  # until the last rank had come: somebody else was late
    transfer_ns: int = 0  # from then on: the wire, and the sum
    bytes: int = 0  # that rank 0 received; those of a plan, and to the next stage, it sent


class InterconnectBook(msgspec.Struct, frozen=True, kw_only=True):
    """
    What the ranks of one engine waited for each other in one step.

    With entries a_r and exits e_r of an exchange on one clock, rank r waits `max(a) - a_r` and transfers
    `e_r - max(a)`.  The straggler is the rank that waited least: the others waited for it.
    """

    kind: str = "none"  # of the way between them; none: there is one rank
    wait_ns: int = 0  # of rank 0: a part of the step
    transfer_ns: int = 0  # of rank 0: a part of the step
    bubble_ns: int = 0  # of the first stage of a pipeline: a part of the step
    bytes: int = 0
    straggler: int = -1  # the rank that the others waited for; -1: nobody
    exchanges: dict[str, Exchange] = {}  # of EXCHANGES
    rank_wait_ns: tuple[int, ...] = ()  # of each rank, over all exchanges of the step
    clock_error_ns: int = 0  # how wrong the stamps of ranks on other hosts may be

    def imbalance(self) -> int:
        """Nanoseconds or bytes that the exchanges do not account for."""
        known = self.exchanges.values()
        lost = (
            self.wait_ns - sum(one.wait_ns for one in known),
            self.transfer_ns - sum(one.transfer_ns for one in known),
            self.bytes - sum(one.bytes for one in known),
        )
        return next((amount for amount in lost if amount), 0)


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """
    One request's ledger at its end, whatever the end.

    The engine fills its part; the gateway adds its own states in front and behind and the HTTP facts.  `states` maps a
    state to the nanoseconds spent in it; they sum to `finished_ns - accepted_ns` exactly.
    """

    request_id: str
    tenant: str = ""
    outcome: str = ""  # engine.api.FINISH_REASONS, or the gateway's own: "client_gone", "invalid", ...
    accepted_ns: int
    finished_ns: int
    states: dict[str, int]
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    computed_tokens: int = 0  # prompt tokens computed, for all choices; with one choice prompt = computed + cached
    recomputed_tokens: int = 0  # paid again after preemption
    output_tokens: int = 0
    drafted_tokens: int = 0  # guessed ahead and computed; accepted + rejected
    draft_accepted_tokens: int = 0  # of output_tokens: those that came with a step's first token
    draft_rejected_tokens: int = 0  # wrong, or behind the end
    preemptions: int = 0
    resumes: int = 0  # how often another engine took it up, for all choices
    steps: int = 0
    kv_block_ns: int = 0  # blocks held x time held
    interconnect_wait_ns: int = 0  # of the steps that it was in: for ranks that were late
    interconnect_transfer_ns: int = 0
    interconnect_wait_max_ns: int = 0  # in one step
    first_token_ns: int = 0  # from accepted_ns to the first output token; 0: there was none
    first_token_states: dict[str, int] = {}  # where that went: as `states`, they sum to it
    gap_max_ns: int = 0  # longest time between two output tokens
    gap_states: dict[str, int] = {}  # where that went; they sum to it
    gap_step: int = -1  # the step that ended it
    engine_ns: int = 0  # its share, by rows, of the steps that it was in: what it cost
    stalled_for: dict[str, int] = {}  # requests that were served instead, by their share of the rows; "": further ones
    kv_at_admission: KvReading | None = None  # as it was let in for the first time
    kv_worst: KvReading | None = None  # at the highest utilization
    kv_at_end: KvReading | None = None
    degenerate: str = ""  # of DEGENERATE_KINDS: why it failed
    # The gateway's own facts.
    model: str = ""
    route: str = ""
    status: int = 0  # HTTP status as sent; 499: the client left
    stream: bool = False
    choices: int = 1
    trace_id: str = ""
    replica: int = -1  # that it was given to at first; -1: none
    routing: str = ""  # why that one: of telemetry.vocabulary.ROUTINGS
    promised_tokens: int | None = None  # of its prompt, cached there by the prefix index's word; None: it had none
    reserved_tokens: int = 0  # of the limits of its key, before it ran; 0: nothing limits it, or it was refused
    charged_tokens: int = 0  # in their place, at its end
    charged_micros: int = 0  # what they cost, in millionths of the currency of the prices
    upstream: str = ""  # who answered, where that was no engine of ours; its KV, steps and phases are not known
    usage_estimated: bool = False  # the upstream has not said how many tokens there were
    unread_ns: int = 0  # before `accepted_ns`: as long as its event loop was held up, it may have lain unread
    repeated_tokens: int = 0  # of its prompt, as many as a prompt before it began with: what a prefix cache could find
    gc_pause_ns: int = 0  # of the gateway, while it was here: overlaps with its states
    loop_lag_ns: int = (
        0  # by how much its event loop was late beside that and the next, while it was here: overlaps, too
    )
    starved_ns: int = 0  # in which the gateway's event loop could have run and had no processor: overlaps, too

    def imbalance(self) -> int:
        """Nanoseconds of the request's life that no state accounts for."""
        return self.finished_ns - self.accepted_ns - sum(self.states.values())

    def token_gap_mean_ns(self) -> int | None:
        """Mean time between output tokens of one choice, after its first; None for fewer than two tokens a choice."""
        gaps = self.output_tokens // max(1, self.choices) - 1
        if gaps < 1 or self.first_token_ns <= 0:
            return None
        return max(0, self.finished_ns - self.accepted_ns - self.first_token_ns) // gaps

    def part_imbalance(self) -> int:
        """The same of the time to its first token, and of its longest gap."""
        first_ns = self.first_token_ns - sum(self.first_token_states.values())
        return first_ns or self.gap_max_ns - sum(self.gap_states.values())


NAME_SEPARATOR = "#"
"""What follows it in an engine's name of a sequence is the engine's business: each choice and each life has its own."""


def request_of(name: str) -> str:
    """The request whose sequence an engine calls so."""
    return name.partition(NAME_SEPARATOR)[0]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine step as flat numbers.  It covers the time from the end of the step before to its own end."""

    step_id: int
    replica: int = 0
    ended_ns: int
    step_ns: int
    parts: dict[str, int]  # of STEP_PARTS; they sum to step_ns
    compute_parts: dict[str, int] = {}  # of COMPUTE_PARTS: of `compute`, as far as the decoder can tell
    tokens: int = 0  # rows computed
    prefill_tokens: int = 0  # rows of prompts, for the first time
    recompute_tokens: int = 0  # rows paid again after preemption
    decode_tokens: int = 0  # rows of output tokens, for the first time; without drafts
    emitted_tokens: int = 0
    sequences: int = 0  # slices in the plan
    running: int = 0  # sequences that hold KV, after the step
    waiting: int = 0  # sequences that wait, after the step
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache by admissions of this step
    evictions: int = 0  # cached blocks given up for new tokens
    drafted_tokens: int = 0
    draft_accepted_tokens: int = 0
    draft_rejected_tokens: int = 0
    draft_rejected_ns: int = 0  # of `compute`: what, by the engine's model of its costs, the rejected rows have added
    interconnect: InterconnectBook = InterconnectBook()
    slices: tuple[tuple[int, int], ...] = ()  # who was served: the engine's number of the sequence, and its rows
    requests: dict[int, str] = {}  # request ids of those that are served for the first time
    served_ns: int = 0  # of the step, what is shared out among those: from the plan to the commit
    waits: dict[str, int] = {}  # waiting sequences, after the step, by their state
    gc_pause_ns: int = 0  # garbage collection of the engine: overlaps with the parts
    starved_ns: int = (
        0  # of rank 0, the worst thread: it could have run and had no processor; told of some 50 ms at once
    )
    memory: MemoryReading | None = None  # now and then
    kv: KvBook = KvBook()
    finished: tuple[RequestRecord, ...] = ()

    def imbalance(self) -> int:
        """Nanoseconds of the step that no part accounts for."""
        return self.step_ns - sum(self.parts.values())
