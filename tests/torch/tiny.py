"""
Tiny models and plans for the tests of the device ring.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.api import Sampling
from engine.config import EngineOptions
from engine.device.kernels import Kernels
from engine.device.runner import Runner
from engine.plan import SampleSpec, Slice, SliceResult, StepPlan
from quant.formats.architecture import from_directory
from quant.forward import layer_shapes

GREEDY = SampleSpec(sampling=Sampling(temperature=0), uniforms=(0.0,))
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 259,
    "eos_token_id": 2,
}


def write_model(directory: Path, seed: int = 0, **changes: object) -> Path:
    """A Hugging Face directory with random weights for `CONFIG` with `changes`."""
    config = CONFIG | changes
    generator = torch.Generator().manual_seed(seed)
    sizes = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    queries = sizes["num_attention_heads"] * sizes["head_dim"]
    keys = sizes["num_key_value_heads"] * sizes["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    tensors = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.add_(1)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_any_model(directory: Path, seed: int = 0, **changes: object) -> Path:
    """The same for any architecture that is supported, with all tensors that it has, norms and biases included."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    a, _ = from_directory(directory)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (a.vocab_size, a.hidden),
        "model.norm.weight": (a.hidden,),
    }
    if not a.tied:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden)
    for layer in range(a.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(a).items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    save_file({name: t + 1 if "norm" in name else t for name, t in tensors.items()}, directory / "model.safetensors")
    return directory


def bfloat16_model(directory: Path, changes: dict[str, object], seed: int = 0) -> Path:
    """The same in bfloat16, so that decoders of any precision have the very same weights."""
    write_any_model(directory, seed, **changes)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def load(
    model: Path,
    *,
    dtype: str = "float32",
    quantization: str = "none",
    kv_memory_bytes: int = 4 << 20,
    context_max: int = 0,
    threads: int = 1,
    kernels: Kernels | None = None,
) -> Runner:
    """A runner on that model; `kernels` asks for the decoder in torch with these."""
    options = EngineOptions(
        model=str(model),
        model_name="tiny",
        listen="unix:/nowhere",
        dtype=dtype,
        quantization=quantization,
        threads=threads,
        kv_memory_bytes=kv_memory_bytes,
        context_max=context_max,
        tokens_step_max=64,
    )
    return Runner.load(options, kernels)


def table(first: int, tokens: int, slots: int = 16) -> tuple[int, ...]:
    """Blocks for so many tokens, from `first` on."""
    return tuple(range(first, first + -(-tokens // slots)))


def run(runner: Runner, *pieces: Slice) -> tuple[SliceResult, ...]:
    """One step of these slices."""
    return runner.run(StepPlan(step_id=1, slices=pieces)).slices


def generate(runner: Runner, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy continuation of one prompt, alone."""
    return generate_all(runner, [prompt], count)[0]


def generate_all(runner: Runner, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy continuations of several prompts, computed together: whole prompts first, then token by token."""
    tokens = [list(prompt) for prompt in prompts]
    room = max(len(prompt) for prompt in prompts) + count
    tables = [table(number * len(table(0, room)), room) for number in range(len(prompts))]
    starts = [0] * len(prompts)
    for _ in range(count):
        pieces = [
            Slice(sequence=i, start=starts[i], tokens=tuple(tokens[i][starts[i] :]), blocks=tables[i], sample=GREEDY)
            for i in range(len(prompts))
        ]
        starts = [len(known) for known in tokens]
        for known, result in zip(tokens, run(runner, *pieces), strict=True):
            assert not result.fault
            known.extend(result.emitted)
    return [known[len(prompt) :] for known, prompt in zip(tokens, prompts, strict=True)]


def logits(runner: Runner, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after each token of one sequence."""
    piece = Slice(sequence=1, start=0, tokens=tuple(tokens), blocks=table(0, len(tokens)))
    return runner.logits(StepPlan(step_id=1, slices=(piece,)))
