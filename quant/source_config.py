"""
config.json of the result: that of the source word for word, with what a quantized checkpoint adds.

A GGUF has none; there it is written from the `Architecture`, such that reading it gives the same `Architecture` again.
"""

import json
from pathlib import Path

from quant.formats.architecture import FAMILIES, Architecture, Rope
from quant.formats.checkpoint import Checkpoint
from quant.formats.errors import ModelError
from quant.formats.mixing import mixed_config
from quant.formats.rope import frequencies

_LLAMA3_FACTORS = (8.0, 32.0)  # of Llama 3.1 and 3.2
_LLAMA3_CONTEXT = 8192
_FREQUENCIES_ALIKE = 1e-4


def config_of(path: Path, checkpoint: Checkpoint, *, dtype: str) -> dict[str, object]:
    """
    The configuration of the source at `path`, fit for the result's directory.  Raises ModelError.

    `dtype` is that of the floats which are in the result, `bfloat16` or `float16`.
    """
    if path.is_file():
        config = config_from_architecture(checkpoint.architecture, checkpoint.eos_ids, tied=checkpoint.tied)
    else:
        config = json.loads((path / "config.json").read_bytes())
    return updated(config, dtype)


def rotated_config(config: dict[str, object], *, points: int) -> dict[str, object]:
    """The same of a rotated model: the head is a tensor of its own, and what is mixed at run time has other names."""
    untied = config | {"tie_word_embeddings": False}
    return mixed_config(untied) if points else untied


def updated(config: dict[str, object], dtype: str) -> dict[str, object]:
    """
    Without what is no longer true, and readable by both generations of transformers.

    Version 5 writes `dtype` and `rope_parameters`; version 4 knows neither, and would compute with another base of the
    rotary positions without a word.
    """
    config = {key: value for key, value in config.items() if key not in ("_name_or_path", "quantization_config")}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        if "rope_theta" in rope:
            config.setdefault("rope_theta", rope["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            config.setdefault("rope_scaling", {key: value for key, value in rope.items() if key != "rope_theta"})
    if "dtype" in config:
        config["dtype"] = dtype
    return config | {"torch_dtype": dtype}


def config_from_architecture(a: Architecture, eos_ids: tuple[int, ...], *, tied: bool) -> dict[str, object]:
    """What transformers would have written for this model.  Raises ModelError for what it has no words for."""
    family = "mistral" if a.family == "llama" and any(a.windows) else a.family  # GGUF calls both llama
    config: dict[str, object] = {
        "architectures": [next(name for name, known in FAMILIES.items() if known == family)],
        "model_type": family,
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": a.context_max,
        "rms_norm_eps": a.norm_epsilon,
        "rope_theta": a.rope.theta,
        "tie_word_embeddings": tied,
        "use_cache": True,
    }
    if eos_ids:
        config["eos_token_id"] = eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)
    return config | _biases(a, family) | _windows(a, family) | _scaling(a)


def _biases(a: Architecture, family: str) -> dict[str, object]:
    if family == "qwen2":
        if not a.qkv_bias or a.output_bias or a.mlp_bias:
            raise ModelError("this Qwen2 has other biases than config.json can say: take its safetensors directory")
        return {}
    if a.qkv_bias != a.output_bias or (family != "llama" and (a.mlp_bias or (a.qkv_bias and family == "mistral"))):
        raise ModelError(f"this {family} has other biases than config.json can say: take its safetensors directory")
    return {"attention_bias": a.qkv_bias, "mlp_bias": a.mlp_bias} if family != "mistral" else {}


def _windows(a: Architecture, family: str) -> dict[str, object]:
    if family == "mistral":
        return {"sliding_window": a.windows[0]}
    if family == "llama" or not any(a.windows):
        return {}
    kinds = ["sliding_attention" if window else "full_attention" for window in a.windows]
    return {"use_sliding_window": True, "sliding_window": max(a.windows), "layer_types": kinds}


def _scaling(a: Architecture) -> dict[str, object]:
    """The scaling of the rotary positions, under the key of transformers 4, which version 5 reads too."""
    rope = a.rope
    if rope.divisors:
        return {"rope_scaling": _llama3(a)}
    if rope.kind == "default":
        return {}
    scaling: dict[str, object] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    return {"rope_scaling": scaling | {"original_max_position_embeddings": rope.original_max_position_embeddings}}


def _llama3(a: Architecture) -> dict[str, object]:
    """GGUF has Llama 3's scaling worked out; find the parameters from which it was."""
    wanted, _ = frequencies(a.rope, a.head_dim)
    for factor in _LLAMA3_FACTORS:
        rope = Rope(
            kind="llama3",
            theta=a.rope.theta,
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=_LLAMA3_CONTEXT,
        )
        found, _ = frequencies(rope, a.head_dim)
        if bool(((found - wanted).abs() <= _FREQUENCIES_ALIKE * found).all()):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": _LLAMA3_CONTEXT,
            }
    raise ModelError("rope_freqs of this GGUF are none of Llama 3's: take the model's safetensors directory")
