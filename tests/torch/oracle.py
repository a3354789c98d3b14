"""
A GGUF file in transformers, by transformers' own reader.

`from_pretrained(gguf_file=...)` does the same and also wants the package accelerate, for which we have no other use.
"""

from pathlib import Path

import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def model_from_gguf(path: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The model of a GGUF file, ready to compute."""
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    keys = model.load_state_dict(tensors, strict=False)
    assert not keys.unexpected_keys
    assert keys.missing_keys == (["lm_head.weight"] if config.tie_word_embeddings else [])
    model.eval()
    return model
