"""
GGUF files written by the `gguf` package, read by us: every quantization, and the order of rows for rotary positions.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.torch import load_file

from quant.formats.checkpoint import open_checkpoint
from quant.formats.gguf_weights import open_gguf
from tests.torch.tiny import CONFIG, load, logits, write_model

WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # the package can quantize to these
READABLE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")  # and only dequantize these
STORED_AS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SIZES = {key: value for key, value in CONFIG.items() if isinstance(value, int)}


def _stored_name(name: str) -> str:
    if name in STORED_AS:
        return STORED_AS[name]
    _, _, layer, *part, kind = name.split(".")
    return f"blk.{layer}.{STORED_AS['.'.join(part)]}.{kind}"


def _paired(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The order in which llama.cpp's converter writes the rows of q and k of a Llama."""
    size = rows.shape[0] // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


def _write_gguf(path: Path, model: Path, kind: str, architecture: str = "llama") -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_key_length(SIZES["head_dim"])
    writer.add_value_length(SIZES["head_dim"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    quant = GGMLQuantizationType[kind]
    for name, tensor in load_file(model / "model.safetensors").items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = SIZES["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = _paired(tensor, heads)
        values = tensor.numpy()
        if values.ndim == 1:
            writer.add_tensor(_stored_name(name), values)
        else:
            writer.add_tensor(_stored_name(name), quantize(values, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", WRITABLE)
def test_round_trip(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _write_gguf(path, tiny_model, kind)
    quant = GGMLQuantizationType[kind]
    checkpoint = open_checkpoint(path)
    for name, tensor in load_file(tiny_model / "model.safetensors").items():
        values = tensor.numpy()
        expected = values if values.ndim == 1 else dequantize(quantize(values, quant), quant)
        found = checkpoint.read(name, tuple(values.shape), torch.float32)
        np.testing.assert_array_equal(found.numpy(), expected, err_msg=name)  # rows move whole, so this is exact
    assert checkpoint.eos_ids == (2, 7)
    assert not checkpoint.tied


def test_same_logits_as_the_directory(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _write_gguf(path, tiny_model, "F32")
    prompt = list(range(3, 60))
    assert torch.equal(logits(load(path), prompt), logits(load(tiny_model), prompt))


def test_qwen_rows_stay_where_they_are(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _write_gguf(path, tiny_model, "F32", architecture="qwen2")
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = load_file(tiny_model / "model.safetensors")[name]
    assert torch.equal(open_checkpoint(path).read(name, tuple(expected.shape), torch.float32), expected)


def test_tied_where_there_is_no_head(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", tie_word_embeddings=True)
    _write_gguf(tmp_path / "model.gguf", model, "F16")
    assert open_checkpoint(tmp_path / "model.gguf").tied


@pytest.mark.parametrize("kind", READABLE)
def test_k_quants(kind: str, tmp_path: Path) -> None:
    """Any bytes are a valid tensor of these; the package's own dequantizer says which one."""
    quant = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[quant]
    raw = np.random.default_rng(5).integers(0, 60, (4, 2 * size), dtype=np.uint8)  # small bytes: no NaN in the scales
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(2 * block)
    writer.add_feed_forward_length(4)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, _, source = open_gguf(path)
    np.testing.assert_array_equal(source.read("model.embed_tokens.weight").numpy(), dequantize(raw, quant))
