"""
What a model is, as one frozen value, whatever file it came from.

    Llama    RMSNorm, rotary positions, grouped-query attention, SiLU-gated MLP
    Mistral  the same with a sliding window          Qwen2  with qkv bias          Qwen3  with q/k norm

`from_config` reads a Hugging Face `config.json`; `gguf_weights` fills the same value from GGUF metadata.  Whatever is
not understood is refused by its name: a model that runs with a silently ignored option gives wrong text.
"""

import json
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from quant.formats.errors import ModelError
from quant.formats.mixing import plain_name

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_Shape = TypeVar("_Shape", bound=msgspec.Struct)
SUPPORTED = "supported are Llama, Mistral, Qwen2 and Qwen3"


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """How positions turn queries and keys; the fields of `rope_parameters` in transformers, by the same names."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn, as the next five
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()  # GGUF's `rope_freqs`: Llama 3's scaling, already worked out


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and switches of one decoder."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_max: int
    norm_epsilon: float
    rope: Rope
    windows: tuple[int, ...]  # per layer: how many newest positions a token sees, itself included; 0: all
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool | None = False  # the head is the embedding; None: exactly if the file has no head

    @property
    def query_size(self) -> int:
        """Columns of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads, or of all value heads."""
        return self.kv_heads * self.head_dim

    def checked(self) -> "Architecture":
        """Itself, if its sizes fit together.  Raises ModelError."""
        sizes = (self.layers, self.hidden, self.intermediate, self.heads, self.kv_heads, self.head_dim)
        if min(*sizes, self.vocab_size, self.context_max) < 1:
            raise ModelError(f"the model's configuration has a size below 1 (layers, hidden, ... = {sizes})")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd: rotary positions need pairs")
        if not 0 < self.norm_epsilon < 1:
            raise ModelError(f"rms_norm_eps {self.norm_epsilon} is not between 0 and 1")
        if self.rope.theta <= 1 or self.rope.factor < 1:
            raise ModelError(f"rope theta {self.rope.theta} or factor {self.rope.factor} is out of range")
        if self.rope.divisors and len(self.rope.divisors) != self.head_dim // 2:
            raise ModelError(f"rope_freqs has {len(self.rope.divisors)} entries, expected {self.head_dim // 2}")
        return self


class _RopeJson(msgspec.Struct, frozen=True):
    """`rope_scaling` of transformers 4 or `rope_parameters` of transformers 5."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0


class _ConfigJson(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of config.json that decide how a decoder computes."""

    architectures: tuple[str, ...] | None = None
    model_type: str | None = None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float | None = None
    rope_scaling: _RopeJson | None = None
    rope_parameters: _RopeJson | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    layer_types: tuple[str, ...] | None = None
    tie_word_embeddings: bool | None = None
    partial_rotary_factor: float = 1.0
    eos_token_id: int | tuple[int, ...] | None = None


class _EosJson(msgspec.Struct, frozen=True):
    """The one key of generation_config.json that we need."""

    eos_token_id: int | tuple[int, ...] | None = None


class _NameJson(msgspec.Struct, frozen=True):
    """What kind of model it is: read first, so that a foreign one is refused by its name and not by a missing key."""

    architectures: tuple[str, ...] | None = None
    model_type: str | None = None


def from_directory(directory: Path) -> tuple[Architecture, tuple[int, ...]]:
    """The architecture and the end-of-sequence ids of a Hugging Face directory.  Raises ModelError."""
    content = _read(directory / "config.json")
    if content is None:
        raise ModelError(f"{directory} has no config.json: name a Hugging Face model directory or a .gguf file")
    family = _family(content)
    config = _decode(content, _ConfigJson, "config.json")
    if config.hidden_act != "silu":
        raise ModelError(f"hidden_act {config.hidden_act!r} is not supported, only 'silu': choose another model")
    generation = _read(directory / "generation_config.json")
    eos = _decode(generation, _EosJson, "generation_config.json").eos_token_id if generation is not None else None
    if eos is None:
        eos = config.eos_token_id
    eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else eos
    return _architecture(family, config).checked(), eos_ids


def _architecture(family: str, config: _ConfigJson) -> Architecture:
    rope = _rope(config)
    context_max = config.max_position_embeddings
    if rope.kind == "yarn":  # Qwen's cards switch YaRN on without touching max_position_embeddings.
        context_max = max(context_max, int(rope.original_max_position_embeddings * rope.factor))
    return Architecture(
        family=family,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // max(1, config.num_attention_heads),
        vocab_size=config.vocab_size,
        context_max=context_max,
        norm_epsilon=config.rms_norm_eps,
        rope=rope,
        windows=_windows(family, config),
        qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and config.attention_bias),
        output_bias=family in ("llama", "qwen3") and config.attention_bias,
        mlp_bias=family == "llama" and config.mlp_bias,
        qk_norm=family == "qwen3",
        tied=config.tie_word_embeddings,
    )


def _rope(config: _ConfigJson) -> Rope:
    """Both spellings.  The newer one wins where a file has both, as in transformers."""
    source = config.rope_parameters or config.rope_scaling or _RopeJson()
    kind = source.rope_type or source.type or "default"
    known = rope_kind(kind)
    if source.partial_rotary_factor != 1 or config.partial_rotary_factor != 1:
        raise ModelError("partial_rotary_factor is not supported, only 1.0: choose another model")
    if known != "default" and source.factor is None:
        raise ModelError(f"rope type {kind!r} lacks its 'factor' in config.json")
    if known == "llama3" and (source.low_freq_factor is None or source.high_freq_factor is None):
        raise ModelError("rope type 'llama3' lacks 'low_freq_factor' or 'high_freq_factor' in config.json")
    return Rope(
        kind=known,
        theta=source.rope_theta or config.rope_theta or 10000.0,
        factor=source.factor if source.factor is not None else 1.0,
        original_max_position_embeddings=source.original_max_position_embeddings or config.max_position_embeddings,
        low_freq_factor=source.low_freq_factor or 1.0,
        high_freq_factor=source.high_freq_factor or 4.0,
        beta_fast=source.beta_fast or 32.0,
        beta_slow=source.beta_slow or 1.0,
        attention_factor=source.attention_factor,
        mscale=source.mscale,
        mscale_all_dim=source.mscale_all_dim,
        truncate=source.truncate,
    )


def rope_kind(name: str) -> RopeKind:
    """The kind of that name.  Raises ModelError."""
    for kind in ROPE_KINDS:
        if name == kind:
            return kind
    raise ModelError(f"rope type {name!r} is not supported, only {', '.join(ROPE_KINDS)}: choose another model")


def _windows(family: str, config: _ConfigJson) -> tuple[int, ...]:
    layers = config.num_hidden_layers
    window = config.sliding_window or 0
    if family == "llama" or (family in ("qwen2", "qwen3") and not config.use_sliding_window):
        window = 0
    if not window:
        return (0,) * layers
    if config.layer_types is not None:
        unknown = sorted(set(config.layer_types) - {"full_attention", "sliding_attention"})
        if unknown or len(config.layer_types) != layers:
            raise ModelError(f"layer_types of config.json is not understood: {unknown or len(config.layer_types)}")
        return tuple(window if kind == "sliding_attention" else 0 for kind in config.layer_types)
    if family == "mistral":
        return (window,) * layers
    full = 28 if config.max_window_layers is None else config.max_window_layers  # transformers' default
    return tuple(window if layer >= full else 0 for layer in range(layers))


def _family(content: bytes) -> str:
    """`llama`, `mistral`, ...  Raises ModelError that names what the file has instead."""
    name = _decode(content, _NameJson, "config.json")
    found = name.architectures or (name.model_type or "an unnamed architecture",)
    known = plain_name(found[0])
    family = FAMILIES.get(known, known if name.architectures is None else "")
    if len(found) != 1 or family not in FAMILIES.values():
        raise ModelError(f"{' + '.join(found)} is not supported: {SUPPORTED}; choose such a model")
    return family


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _decode(content: bytes, shape: type[_Shape], name: str) -> _Shape:
    """JSON as Python reads it: model files in the wild carry Infinity and NaN, which strict JSON has not."""
    try:
        return msgspec.convert(json.loads(content), shape, strict=False)
    except (ValueError, RecursionError) as error:  # JSON, UTF-8 and msgspec's ValidationError are ValueErrors
        raise ModelError(f"{name} is broken ({error}): download the model again") from error
