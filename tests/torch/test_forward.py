"""
The layer by layer forward of the converter against transformers: its calibration and its measurements stand on it.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

from quant.formats.checkpoint import Checkpoint, open_checkpoint
from quant.forward import LayerForward, Stream, norm, plain, read_layer
from tests.torch.tiny import write_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about itself

TOLERANCE = 1e-4  # of the logits, absolute
YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, object]] = {
    "llama": {},
    "llama_biases_tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama_yarn": {"rope_parameters": YARN},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"head_dim": 32},
}


def logits_of(checkpoint: Checkpoint, tokens: Tensor, points: int = 0) -> Tensor:
    """[sequences, tokens, vocab_size], through the stream; `points` as for `LayerForward`."""
    a = checkpoint.architecture
    embedding = checkpoint.read("model.embed_tokens.weight", (a.vocab_size, a.hidden), torch.float32)
    head = embedding
    if not checkpoint.tied:
        head = checkpoint.read("lm_head.weight", (a.vocab_size, a.hidden), torch.float32)
    stream = Stream(tokens.split(2), embedding)
    for number in range(a.layers):
        weights, layer = read_layer(checkpoint, number, torch.float32), LayerForward(a, number, points)
        stream.begin(layer, weights)
        for stage in ("qkv", "o", "gate_up", "down"):
            stream.advance(layer, stage, weights, plain(weights))
    last = checkpoint.read("model.norm.weight", (a.hidden,), torch.float32)
    return F.linear(norm(torch.cat(stream.x), last, a.norm_epsilon), head)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_shared_oracle(shared: Path, name: str) -> None:
    directory = shared / "fixtures/models" / name
    expected = load_file(directory / "expected.safetensors")
    found = logits_of(open_checkpoint(directory), expected["input_ids"].long()[None])
    assert (found[0] - expected["logits"]).abs().max() < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers(tmp_path: Path, variant: str) -> None:
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(
        variant.partition("_")[0],
        vocab_size=131,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        **VARIANTS[variant],
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # transformers starts them at 0 and at 1
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.eval()
    model.save_pretrained(tmp_path)
    tokens = torch.randint(0, 131, (3, 40))
    with torch.no_grad():
        expected = model(tokens).logits
    assert (logits_of(open_checkpoint(tmp_path), tokens) - expected).abs().max() < TOLERANCE


def test_sequences_do_not_know_their_neighbours(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "model"))
    tokens = torch.randint(0, 259, (3, 17), generator=torch.Generator().manual_seed(1))
    together = logits_of(checkpoint, tokens)
    for row in range(3):
        alone = logits_of(checkpoint, tokens[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-5)
