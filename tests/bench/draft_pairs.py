"""
Pairs of a model and a draft model, made of one model: the best that could be, and one that is of no use.
"""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel


def deeper(gguf: Path, factor: int, folder: Path) -> Path:
    """`factor` times as many layers; those that are added add nothing, so it says what the original says."""
    model = _open(gguf)
    layers = model.model.layers
    for _ in range((factor - 1) * len(layers)):
        layer = copy.deepcopy(layers[-1])
        layer.self_attn.layer_idx = len(layers)
        with torch.no_grad():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        layers.append(layer)
    return _save(model, folder)


def shallow(gguf: Path, count: int, folder: Path) -> Path:
    """The first `count` layers only: cheap, and mostly wrong."""
    model = _open(gguf)
    model.model.layers = model.model.layers[:count]
    return _save(model, folder)


def _open(gguf: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    assert isinstance(model, PreTrainedModel)
    return model


def _save(model: PreTrainedModel, folder: Path) -> Path:
    config = model.config.to_dict()
    config["num_hidden_layers"] = len(model.model.layers)
    for name in ("quantization_config", "layer_types"):  # what it was read from; they are all alike
        config.pop(name, None)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder
