"""A GGUF and the directory that is made from it are the same model: text, template, architecture."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import tokens
from gateway.tokens import ModelText
from gateway.wire import ChatMessage
from launch.errors import UserError
from quant.formats.architecture import Architecture, Rope, RopeKind, from_directory
from quant.formats.checkpoint import open_checkpoint
from quant.formats.errors import ModelError
from quant.formats.rope import frequencies
from quant.source_config import config_from_architecture, config_of, updated
from quant.text_files import COPIED, is_quantized, tokenizing, write_text_files
from quant.write import write_json
from tests.quant.small import leftovers, write_model

TEXTS = [
    "The capital of France is Paris.",
    "  two  spaces,\ttabs\n\n\nand lines \r\n",
    "1234567 3.14159 2024-01-01 x1y22",
    "don't I'll WE'VE they'RE",
    "Größe, naïve, Ελληνικά, кириллица, 漢字かな交じり文, 🙂👩‍👩‍👧",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|>",
    "def f(x):\n    return {'a': x ** 2}  # code\n",
    "",
]


A = Architecture(
    family="llama",
    layers=2,
    hidden=256,
    intermediate=96,
    heads=4,
    kv_heads=2,
    head_dim=64,
    vocab_size=100,
    context_max=2048,
    norm_epsilon=1e-5,
    rope=Rope(original_max_position_embeddings=2048),
    windows=(0, 0),
)


def config(a: Architecture, eos_ids: tuple[int, ...] = (2,)) -> dict[str, object]:
    return updated(config_from_architecture(a, eos_ids, tied=bool(a.tied)), "bfloat16")


@pytest.fixture(scope="module")
def made(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text side and the configuration of the default model, from its GGUF."""
    folder = tmp_path_factory.mktemp("made")
    checkpoint = open_checkpoint(default_model)
    write_text_files(default_model, folder, checkpoint.eos_ids)
    write_json(folder / "config.json", config_of(default_model, checkpoint, dtype="bfloat16"))
    return folder


def encode(text: ModelText, passage: str) -> list[int]:
    return asyncio.run(text.encode(passage, add_special_tokens=True))


def test_the_gateway_reads_the_same_text_side(default_model: Path, made: Path) -> None:
    one, other = tokens.load(default_model), tokens.load(made)
    try:
        for passage in [*TEXTS, "".join(TEXTS) * 20]:
            assert encode(one, passage) == encode(other, passage)
        assert (one.eos_ids, one.turn_ids, one.vocab_size) == (other.eos_ids, other.turn_ids, other.vocab_size)
        assert [one.piece(i) for i in range(one.vocab_size)] == [other.piece(i) for i in range(other.vocab_size)]
        assert [one.is_special(i) for i in range(99)] == [other.is_special(i) for i in range(99)]
        for messages in (
            [("user", "hi")],
            [("system", "be brief"), ("user", "hi"), ("assistant", "ho"), ("user", "?")],
        ):
            chat = [msgspec.convert({"role": role, "content": content}, ChatMessage) for role, content in messages]
            rendered = [asyncio.run(text.render(chat)) for text in (one, other)]
            assert rendered[0] == rendered[1] and "<|im_start|>user\nhi<|im_end|>" in rendered[0]
    finally:
        one.close()
        other.close()


def test_transformers_reads_the_same_text_side(default_model: Path, made: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(made)
    ours = tokens.load(default_model)
    try:
        for passage in TEXTS:
            assert theirs(passage).input_ids == encode(ours, passage)
        assert theirs.eos_token_id in ours.eos_ids
        assert theirs.bos_token == "<|im_start|>" and theirs.pad_token == "<|im_end|>"
        message = {"role": "user", "content": "hi"}
        chat = [msgspec.convert(message, ChatMessage)]
        rendered = theirs.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        assert rendered == asyncio.run(ours.render(chat))
    finally:
        ours.close()


def test_the_architecture_is_the_same(default_model: Path, made: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    found, eos_ids = from_directory(made)
    assert found == msgspec.structs.replace(checkpoint.architecture, tied=True)
    assert eos_ids == checkpoint.eos_ids
    theirs = transformers.AutoConfig.from_pretrained(made)
    assert theirs.model_type == "llama" and theirs.num_hidden_layers == 30 and theirs.tie_word_embeddings
    assert transformers.GenerationConfig.from_pretrained(made).eos_token_id == 2


FAMILIES = st.sampled_from(["llama", "mistral", "qwen2", "qwen3"])
ROPE_KINDS_OF_GGUF: tuple[RopeKind, ...] = ("default", "linear", "yarn")


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    family = draw(FAMILIES)
    layers, context = draw(st.integers(1, 4)), draw(st.sampled_from([2048, 32768]))
    biased = draw(st.booleans())
    kind: RopeKind = draw(st.sampled_from(ROPE_KINDS_OF_GGUF))
    factor, original = (2.0, context // 2) if kind != "default" else (1.0, context)
    windows = (0,) * layers
    if family != "llama" and draw(st.booleans()):
        windows = (77,) * layers
        if family != "mistral" and draw(st.booleans()):
            windows = (0, *windows[1:])
    return Architecture(
        family=family,
        layers=layers,
        hidden=64,
        intermediate=96,
        heads=4,
        kv_heads=2,
        head_dim=draw(st.sampled_from([16, 32])),
        vocab_size=100,
        context_max=context,
        norm_epsilon=float(torch.tensor(1e-5)),
        rope=Rope(kind=kind, theta=1e6, factor=factor, original_max_position_embeddings=original),
        windows=windows,
        qkv_bias=family == "qwen2" or (biased and family != "mistral"),
        output_bias=biased and family in ("llama", "qwen3"),
        mlp_bias=draw(st.booleans()) if family == "llama" else False,
        qk_norm=family == "qwen3",
        tied=draw(st.booleans()),
    )


@given(a=architectures(), eos_ids=st.sampled_from([(), (2,), (2, 7)]))
@settings(max_examples=200, deadline=None)
def test_a_written_configuration_reads_as_the_same_architecture(
    a: Architecture, eos_ids: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("config")
    write_json(folder / "config.json", config(a, eos_ids))
    assert from_directory(folder) == (a, eos_ids)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_found_again(factor: float, tmp_path: Path) -> None:
    plain = Rope(theta=500000.0, original_max_position_embeddings=131072)
    scaled = msgspec.structs.replace(
        plain, kind="llama3", factor=factor, original_max_position_embeddings=8192, low_freq_factor=1.0
    )
    wanted, _ = frequencies(scaled, 64)
    divisors = tuple((frequencies(plain, 64)[0] / wanted).tolist())
    a = msgspec.structs.replace(A, context_max=131072, rope=msgspec.structs.replace(plain, divisors=divisors))
    write_json(tmp_path / "config.json", config(a))
    found, _ = from_directory(tmp_path)
    assert found.rope == scaled
    torch.testing.assert_close(frequencies(found.rope, 64)[0], frequencies(a.rope, 64)[0], rtol=1e-6, atol=0)
    odd = msgspec.structs.replace(a, rope=msgspec.structs.replace(plain, divisors=(3.0,) * 32))
    with pytest.raises(ModelError, match="none of Llama 3's: take the model's safetensors directory"):
        config(odd)


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "qwen2", "qkv_bias": False},
        {"family": "llama", "qkv_bias": True},
        {"family": "qwen3", "mlp_bias": True},
    ],
)
def test_biases_without_words_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ModelError, match="has other biases than config.json can say"):
        config(msgspec.structs.replace(A, **changes))


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    a = msgspec.structs.replace(A, windows=(32, 32))
    write_json(tmp_path / "config.json", config(a))
    assert from_directory(tmp_path)[0] == msgspec.structs.replace(a, family="mistral")


def test_what_lies_in_a_directory_is_copied_and_nothing_else(tmp_path: Path) -> None:
    source, folder = write_model(tmp_path / "source"), tmp_path / "folder"
    folder.mkdir()
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "LICENSE").write_text("as you like")
    (source / "modeling_evil.py").write_text("boom")
    write_text_files(source, folder, (2,))
    assert leftovers(folder) == ["LICENSE", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert all((folder / name).read_bytes() == (source / name).read_bytes() for name in leftovers(folder))
    assert set(leftovers(folder)) <= set(COPIED)
    assert all((folder / name).stat().st_mode & 0o777 == 0o644 for name in leftovers(folder))


def test_a_configuration_of_transformers_5_can_be_read_by_4() -> None:
    source = {
        "_name_or_path": "somewhere",
        "dtype": "float32",
        "rope_parameters": {"rope_theta": 77.0, "rope_type": "linear", "factor": 2.0},
        "quantization_config": None,
        "left": "alone",
    }
    found = updated(dict(source), "bfloat16")
    assert found.pop("rope_theta") == 77.0 and found.pop("torch_dtype") == "bfloat16"
    assert found.pop("rope_scaling") == {"rope_type": "linear", "factor": 2.0}
    assert found == {"dtype": "bfloat16", "rope_parameters": source["rope_parameters"], "left": "alone"}
    assert updated({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "float16")["rope_theta"] == 1.0


def test_a_tokenizer_is_that_of_serve_or_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    with tokenizing(source) as tokenize:
        assert tokenize("Hello world") and tokenize("") == []
    (source / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer.json$"), tokenizing(source):
        pytest.fail("there is none")


def test_a_quantized_source_is_known_by_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for said, method in (
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {}}, "unknown method"),
        ({"quantization_config": 1}, "unknown method"),
    ):
        file.write_text(json.dumps(said))
        assert is_quantized(tmp_path) == method
    file.write_text("{")
    assert is_quantized(tmp_path) is None
