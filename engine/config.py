"""
The engine's configuration: parsed once into frozen values, derived sizes are properties.
"""

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the pure core."""

    blocks_max: int
    """KV blocks in the pool."""
    block_slots: int = 16
    """Tokens whose keys and values one block holds."""
    context_max: int = 8192
    """Prompt and output tokens of one sequence."""
    sequences_max: int = 64
    """Sequences in the batch."""
    tokens_step_max: int = 512
    """Rows of one step: bounds how long a long prompt may hold up the others."""
    waiting_max: int = 256
    """Sequences beyond those for which the batch has places; one more is refused as overloaded."""
    bypass_max: int = 16
    """How often the head of the queue may be overtaken because it does not fit yet."""
    preemptions_max: int = 3
    """After so many preemptions a sequence comes back only with its whole need reserved."""
    vocab_size: int = 2**31 - 1
    """Token ids are below it."""
    prefix_cache: bool = True
    """Whether finished blocks are kept for requests that start alike."""
    drafts_max: int = 0
    """Tokens guessed ahead for one sequence in one step, where it pays; 0: no speculation."""
    draft_blocks_max: int = 0
    """KV blocks of the draft model; 0: there is none."""
    draft_context_max: int = 0
    """Tokens of one sequence that the draft model can read and guess."""

    @property
    def slots_max(self) -> int:
        """Tokens that the whole pool holds."""
        return self.blocks_max * self.block_slots

    @property
    def sequence_tokens_max(self) -> int:
        """Prompt and output tokens of one sequence, whichever of context and pool is smaller."""
        return min(self.context_max, self.slots_max)


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `python -m engine` is started with, as JSON."""

    model: str
    """A Hugging Face directory or a GGUF file."""
    model_name: str
    """The name under which clients know it."""
    listen: str
    """`unix:PATH` or `tcp:HOST:PORT`."""
    replica: int = 0
    dtype: str = "auto"
    """auto, float32 or bfloat16; auto is bfloat16 where the processor multiplies it natively."""
    quantization: str = "auto"
    """What float weights are rounded to while they are loaded: none, int8, fp8 or nf4; auto: see engine.device.form."""
    kv_dtype: str = "auto"
    """auto, int8 or fp8."""
    packed_directory: str = ""
    """Where weights are kept in the order in which the native kernels read them; empty: nowhere."""
    threads: int = 0
    """0: as many as the process may use."""
    tensor_parallel: int = 1
    """Ranks that share the heads, channels and vocabulary of each layer."""
    pipeline_parallel: int = 1
    """Groups of such ranks that share the layers."""
    rank: int = 0
    """Which of `tensor_parallel * pipeline_parallel` this process is; 0 leads, and starts the others."""
    rank_cpus: tuple[tuple[int, ...], ...] = ()
    """The processors that each rank keeps to; empty: all that the process may use."""
    interconnect: str = "auto"
    """How ranks exchange numbers: shared-memory or gloo; auto: through memory, where that can be had."""
    rank_timeout_s: float = 10.0
    """How long a rank may keep the others waiting before it counts as lost, and its group is started anew."""
    control: int = -1
    """Of ranks above 0: the descriptor of the line to rank 0."""
    pulse: int = -1
    """Of ranks above 0: the descriptor of the socket on which they and rank 0 give each other signs of life."""
    memory: tuple[int, ...] = ()
    """
    Of ranks above 0: the descriptors of the memory that all ranks share, and of those that the ranks of each stage do,
    if there are several of both; empty: there is none.
    """
    meeting_port: int = 0
    """Of ranks above 0: where they find each other, if there is none."""
    context_max: int = 0
    """0: what the model was trained for."""
    kv_memory_bytes: int = 1 << 30
    sequences_max: int = 64
    tokens_step_max: int = 512
    waiting_max: int = 256
    prefix_cache: bool = True
    drafts_max: int = 0
    """Tokens guessed ahead for one sequence in one step; 0: no speculation."""
    draft_model: str = ""
    """A smaller model with the same vocabulary, that guesses; a directory or a GGUF file, empty: none."""
    flight_directory: str = ""
    """Where the journal of what was decided last is kept; empty: nowhere."""
    flight_memory_bytes: int = 64 << 20
    """Of it."""
    log_level: str = "info"
    log_format: str = "console"
    """console or json."""
