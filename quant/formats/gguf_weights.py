"""
GGUF as a source of tensors under the names of transformers.

Two things differ from a Hugging Face checkpoint.  Shapes are written fastest dimension first.  And the architecture
"llama" (Llama and Mistral) stores the rows of q and k for rotary positions on adjacent pairs; they are put back into
the order of the half-rotation form, the only one that our kernels know.  Qwen2 and Qwen3 are stored as they are.
"""

import struct
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize
from torch import Tensor

from quant.formats.architecture import SUPPORTED, Architecture, Rope, rope_kind
from quant.formats.errors import ModelError

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QUANTS = frozenset(
    getattr(GGMLQuantizationType, name)
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)
_BROKEN = (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError, struct.error, MemoryError)
"""What the reader raises on a file that is cut off or overwritten; it promises nothing narrower."""


class _Reader(GGUFReader):
    """The package's reader on a plain array: a memory map is slow to slice, and a vocabulary is 100,000 slices."""

    @property  # type: ignore[override]  # the parent's is an attribute, and says memmap
    def data(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The file's bytes, still mapped."""
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        self._data = np.asarray(mapped)


class GgufSource:
    """The tensors of one GGUF file."""

    def __init__(self, reader: GGUFReader, architecture: Architecture) -> None:
        self._architecture = architecture
        self._tensors: dict[str, ReaderTensor] = {}
        for tensor in reader.tensors:
            self._tensors[_name(tensor.name)] = tensor

    def names(self) -> frozenset[str]:
        """All tensors of the file."""
        return frozenset(self._tensors)

    def read(self, name: str) -> Tensor:
        """One tensor, dequantized; float16 and bfloat16 become float32, which holds both exactly."""
        stored = self._tensors[name]
        if stored.tensor_type not in _QUANTS:
            kinds = ", ".join(sorted(kind.name for kind in _QUANTS))
            raise ModelError(f"tensor {stored.name} is {stored.tensor_type.name}, supported are {kinds}")
        try:
            values = np.ascontiguousarray(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
            tensor = torch.from_numpy(values.reshape(tuple(int(size) for size in reversed(stored.shape))).copy())
        except _BROKEN as error:
            raise ModelError(f"tensor {stored.name} is broken ({error}): download the model again") from error
        architecture = self._architecture
        if architecture.family == "llama" and ".q_proj." in name:
            return _halves(tensor, architecture.heads, name)
        if architecture.family == "llama" and ".k_proj." in name:
            return _halves(tensor, architecture.kv_heads, name)
        return tensor


def open_gguf(path: Path) -> tuple[Architecture, tuple[int, ...], GgufSource]:
    """Architecture, end-of-sequence ids and tensors of a GGUF file.  Raises ModelError."""
    try:
        reader = _Reader(path)
        metadata = _Metadata(reader)
        architecture = _architecture(metadata, reader).checked()
        eos_ids = metadata.token_ids("eos_token_id", "eot_token_id", "eom_token_id")
        return architecture, eos_ids, GgufSource(reader, architecture)
    except _BROKEN as error:
        raise ModelError(f"{path.name} is no whole GGUF file ({error}): download the model again") from error


class _Metadata:
    """Typed look-ups in the key-value part of a GGUF file."""

    def __init__(self, reader: GGUFReader) -> None:
        self._reader = reader
        self.family = self.text("general.architecture", "")

    def text(self, key: str, default: str) -> str:
        value = self._get(key)
        return value if isinstance(value, str) else default

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(f"{self.family}.{key}")
        if value is None and default is not None:
            return default
        if not isinstance(value, int):
            raise ModelError(f"GGUF key {self.family}.{key} is {_describe(value)}: expected one whole number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._get(f"{self.family}.{key}")
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)):
            raise ModelError(f"GGUF key {self.family}.{key} is {_describe(value)}: expected a number")
        return float(value)

    def token_ids(self, *keys: str) -> tuple[int, ...]:
        values = (self._get(f"tokenizer.ggml.{key}") for key in keys)
        return tuple(value for value in values if isinstance(value, int))

    def _get(self, key: str) -> object:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()


def _describe(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def _architecture(metadata: _Metadata, reader: GGUFReader) -> Architecture:
    family = metadata.family
    if family not in ("llama", "qwen2", "qwen3"):  # Mistral is written as "llama"
        raise ModelError(f"GGUF architecture {family!r} is not supported: {SUPPORTED}; choose such a model")
    if metadata.integer("expert_count", 0) > 0:
        raise ModelError(f"{family!r} with experts (Mixtral) is not supported: {SUPPORTED}; choose such a model")
    names = {tensor.name for tensor in reader.tensors}
    embedding = next((tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise ModelError("the GGUF file has no token_embd.weight: it is not a whole language model")
    heads, hidden = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden // max(1, heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(key, head_dim) != head_dim:
            raise ModelError(f"GGUF key {family}.{key} differs from the head size {head_dim}, which is not supported")
    layers = metadata.integer("block_count")
    return Architecture(
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=metadata.integer("feed_forward_length"),
        heads=heads,
        kv_heads=metadata.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=int(embedding.shape[-1]),
        context_max=metadata.integer("context_length"),
        norm_epsilon=metadata.real("attention.layer_norm_rms_epsilon"),
        rope=_rope(metadata, reader),
        windows=(metadata.integer("attention.sliding_window", 0),) * layers,
        qkv_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        tied=None,
    )


def _rope(metadata: _Metadata, reader: GGUFReader) -> Rope:
    name = metadata.text(f"{metadata.family}.rope.scaling.type", "none")
    factors = next((tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    return Rope(
        kind=rope_kind("default" if name == "none" else name),
        theta=metadata.real("rope.freq_base", 10000.0),
        factor=metadata.real("rope.scaling.factor", 1.0),
        original_max_position_embeddings=metadata.integer(
            "rope.scaling.original_context_length", metadata.integer("context_length")
        ),
        beta_fast=metadata.real("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.real("rope.scaling.yarn_beta_slow", 1.0),
        divisors=() if factors is None else tuple(float(value) for value in factors.data),
    )


def _name(stored: str) -> str:
    """The name that transformers gives a tensor; unknown ones keep theirs, nobody will ask for them."""
    if stored in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[stored]
    match stored.split("."):
        case ["blk", layer, part, kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    return stored


def _halves(rows: Tensor, heads: int, name: str) -> Tensor:
    """Rows (0, h/2, 1, h/2 + 1, ...) of each head back to (0, 1, ..., h - 1); `h` is the head's size."""
    if rows.shape[0] % (2 * heads):
        raise ModelError(f"tensor {name} has {rows.shape[0]} rows, which {heads} heads do not divide into pairs")
    return rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
