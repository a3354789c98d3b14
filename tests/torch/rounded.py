"""
Quantized checkpoints by plain rounding, as files: what the engine and other loaders read.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quant.formats.checkpoint import open_checkpoint
from quant.formats.kept import LINEARS, is_kept
from quant.formats.layouts import pack, quantization_config, unpack
from quant.formats.rounding import round_weight
from quant.formats.scheme import Scheme
from quant.formats.weights import Quantized
from quant.forward import read_layer
from quant.source_config import config_of

SCHEMES = {
    "int8": Scheme(method="int8", bits=8),
    "int8-tensor": Scheme(method="int8", bits=8, granularity="tensor"),
    "int8-group": Scheme(method="int8", bits=8, granularity="group", group_size=32),
    "fp8": Scheme(method="fp8", bits=8),
    "fp8-tensor": Scheme(method="fp8", bits=8, granularity="tensor"),
    "gptq": Scheme(method="gptq", bits=4, granularity="group", group_size=32),
    "gptq-g64": Scheme(method="gptq", bits=4, granularity="group", group_size=64),
    "gptq-asym": Scheme(method="gptq", bits=4, granularity="group", group_size=64, symmetric=False),
    "gptq-8bit": Scheme(method="gptq", bits=8, granularity="group", group_size=32),
    "gptq-channel": Scheme(method="gptq", bits=4),
    "packed": Scheme(method="packed", bits=4, granularity="group", group_size=32),
    "packed-asym": Scheme(method="packed", bits=4, granularity="group", group_size=32, symmetric=False),
    "nf4": Scheme(method="nf4", bits=4),
    "nf4-double": Scheme(method="nf4", bits=4, double_quant=True),
    "llm-int8": Scheme(method="llm-int8", bits=8),
}


def write_rounded(
    source: Path, directory: Path, scheme: Scheme, change: Callable[[str, Quantized], Quantized] = lambda _, same: same
) -> dict[str, Tensor]:
    """
    The Hugging Face model in `source`, with its linear layers rounded to `scheme`, in `directory`.

    Returns: the same model's tensors as the floats that the rounded ones stand for.
    """
    shutil.copytree(source, directory)
    config = json.loads((source / "config.json").read_bytes())
    config["quantization_config"] = quantization_config(scheme, layers=config["num_hidden_layers"])
    (directory / "config.json").write_text(json.dumps(config))
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        prefix = name.removesuffix(".weight")
        if not prefix.endswith(LINEARS) or prefix == name or is_kept(scheme, prefix):
            stored[name] = dense[name] = tensor
            continue
        weight = change(prefix, round_weight(tensor, scheme))
        packed = {suffix: part.contiguous() for suffix, part in pack(scheme, weight).items()}
        stored |= {f"{prefix}.{suffix}": part for suffix, part in packed.items()}
        dense[name] = unpack(scheme, packed, weight.shape).dense(tensor.dtype)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return dense


def write_rounded_file(source: Path, directory: Path, scheme: Scheme | None, layers: int = 0) -> None:
    """The model of a file or directory, or its first layers, in the numbers of `scheme` or bfloat16; no tokenizer."""
    checkpoint = open_checkpoint(source)
    config = config_of(source, checkpoint, dtype="bfloat16")
    if scheme is not None:
        config["quantization_config"] = quantization_config(scheme)
    a = checkpoint.architecture
    config["num_hidden_layers"] = layers = layers or a.layers
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (a.vocab_size, a.hidden), "model.norm.weight": (a.hidden,)}
    shapes |= {} if checkpoint.tied else {"lm_head.weight": (a.vocab_size, a.hidden)}
    tensors = {name: checkpoint.read(name, shape, torch.bfloat16) for name, shape in shapes.items()}
    for layer in range(layers):
        for suffix, weight in read_layer(checkpoint, layer, torch.float32).items():
            name = f"model.layers.{layer}.{suffix}"
            prefix = name.removesuffix(".weight")
            if scheme is not None and prefix != name and prefix.endswith(LINEARS):
                packed = pack(scheme, round_weight(weight, scheme))
                tensors |= {f"{prefix}.{part}": tensor.contiguous() for part, tensor in packed.items()}
            else:
                tensors[name] = weight.bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def with_kept(scheme: Scheme, *names: str) -> Scheme:
    """The same, with these layers left as floats."""
    return msgspec.structs.replace(scheme, kept=names)
