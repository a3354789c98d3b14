"""
The decoder against transformers: same logits, same greedy text, for every architecture and every option of it.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.torch.oracle import model_from_gguf
from tests.torch.tiny import generate, generate_all, load, logits

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about itself

TOLERANCE = 1e-4  # relative, float32
SIZES: dict[str, object] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3: dict[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama_rope_llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama_rope_yarn": ("llama", {"rope_parameters": YARN}),
    "llama_rope_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "llama_biases_tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama_head_dim": ("llama", {"head_dim": 24, "tie_word_embeddings": False}),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "mistral_no_window": ("mistral", {"sliding_window": None}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2_unused_window": ("qwen2", {"use_sliding_window": False, "sliding_window": 4}),
    "qwen3": (
        "qwen3",
        {"head_dim": 32, "attention_bias": True, "rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}},
    ),
}


def _oracle(family: str, options: dict[str, object]) -> transformers.PreTrainedModel:
    """A random model of transformers, biases and norms included."""
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **SIZES, **options)
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # transformers starts them at 0 and at 1
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.eval()
    return model


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _greedy(model: transformers.PreTrainedModel, prompt: torch.Tensor, count: int) -> list[int]:
    """Its own best tokens, one by one."""
    tokens = prompt
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), 1)
    return tokens[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_shared_oracle(shared: Path, name: str) -> None:
    directory = shared / "fixtures/models" / name
    if not directory.is_dir():
        pytest.skip(f"no {directory}")
    expected = load_file(directory / "expected.safetensors")
    runner = load(directory)
    prompt = expected["input_ids"].tolist()
    assert _relative(logits(runner, prompt), expected["logits"]) < TOLERANCE
    assert generate(runner, prompt, len(expected["greedy"])) == expected["greedy"].tolist()
    assert runner.facts.eos_ids == (2,)
    assert runner.facts.vocab_size == 128


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(len(name))
    model = _oracle(*VARIANTS[name])
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists(), "this test also reads shards"
    prompt = torch.randint(3, 131, (1, 45))
    with torch.no_grad():
        expected = model(prompt).logits[0]
        continued = _greedy(model, prompt, 12)
    runner = load(tmp_path)
    assert _relative(logits(runner, prompt[0].tolist()), expected) < TOLERANCE
    assert generate(runner, prompt[0].tolist(), 12) == continued


def test_old_spelling_of_rope_and_eos(tmp_path: Path) -> None:
    """transformers 4 wrote `rope_scaling` with `type`, beside `rope_theta`."""
    torch.manual_seed(0)
    model = _oracle("llama", {"rope_parameters": LLAMA3})
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    old = {key: value for key, value in config.pop("rope_parameters").items() if key != "rope_theta"}
    old["type"] = old.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": old, "rope_theta": 10000.0}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3, 999999]}))
    prompt = torch.arange(3, 60)[None]
    with torch.no_grad():
        expected = model(prompt).logits[0]
    runner = load(tmp_path)
    assert _relative(logits(runner, prompt[0].tolist()), expected) < TOLERANCE
    assert runner.facts.eos_ids == (3, 5)  # an id beyond the vocabulary can never be sampled


PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was a",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "Dear customer, we are sorry that",
    "The opposite of hot is",
    "import numpy as np\n",
    "Roses are red,",
    "In 1969, the first",
)


def test_default_model_writes_what_transformers_writes(gguf_file: Path) -> None:
    """
    64 greedy tokens on 10 prompts.

    transformers is shown prompt and answer at once: if each of our tokens is its best one after all tokens before, then
    by induction its own greedy text is the same, for a tenth of the time.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    prompts: list[list[int]] = [tokenizer(text).input_ids for text in PROMPTS]
    answers = generate_all(load(gguf_file, kv_memory_bytes=64 << 20, context_max=128), prompts, 64)
    oracle = model_from_gguf(gguf_file, torch.float32)
    for text, prompt, answer in zip(PROMPTS, prompts, answers, strict=True):
        with torch.no_grad():
            best = oracle(torch.tensor([prompt + answer])).logits[0].argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == answer, text
