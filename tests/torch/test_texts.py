"""
Token ids to calibrate on and to be measured on: sampled, read, refused.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from quant.formats.checkpoint import Checkpoint, open_checkpoint
from quant.formats.errors import ModelError
from quant.forward import LayerForward, norm, read_layer
from quant.texts import EVALUATION, SEPARATOR, read_calibration, read_evaluation, sample
from tests.torch.tiny import write_model


def letters(text: str) -> list[int]:
    return [ord(letter) % 259 for letter in text]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_model(tmp_path_factory.mktemp("texts") / "model"))


def test_same_seed_same_text(checkpoint: Checkpoint) -> None:
    first, second, other = (sample(checkpoint, sequences=6, tokens=12, seed=seed) for seed in (1, 1, 2))
    assert first.dtype == torch.int64
    assert first.shape == (6, 12)
    assert 0 <= int(first.min()) <= int(first.max()) < 259
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert (first[::2, 0] == 2).all()  # where a text begins: behind the end of another


def test_global_randomness_has_no_say(checkpoint: Checkpoint) -> None:
    torch.manual_seed(1)
    first = sample(checkpoint, sequences=2, tokens=8, seed=3)
    torch.manual_seed(2)
    assert torch.equal(first, sample(checkpoint, sequences=2, tokens=8, seed=3))


@pytest.mark.parametrize("window", [None, 4])
def test_the_model_finds_its_own_text_likely(tmp_path: Path, window: int | None) -> None:
    """
    Sampled through the cache, judged by the whole forward: the mean loss must be the mean entropy.

    A cache that is off by one position, a window or a head would make the model disagree with itself.
    """
    family = "MistralForCausalLM" if window else "LlamaForCausalLM"
    checkpoint = open_checkpoint(write_model(tmp_path / "model", architectures=[family], sliding_window=window))
    a = checkpoint.architecture
    tokens = sample(checkpoint, sequences=48, tokens=24, seed=4)
    x = F.embedding(tokens, checkpoint.read("model.embed_tokens.weight", (a.vocab_size, a.hidden), torch.float32))
    for layer in range(a.layers):
        x = LayerForward(a, layer).whole(x, read_layer(checkpoint, layer, torch.float32))
    x = norm(x, checkpoint.read("model.norm.weight", (a.hidden,), torch.float32), a.norm_epsilon)
    logs = F.linear(x, checkpoint.read("lm_head.weight", (a.vocab_size, a.hidden), torch.float32)).log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)[:, :-1].mean()
    loss = -logs[:, :-1].gather(2, tokens[:, 1:, None]).mean()
    uniform = torch.tensor(float(a.vocab_size)).log()
    assert entropy < uniform - 0.3  # else there would be nothing to find
    assert abs(loss - entropy) < 0.15, f"loss {loss:.3f}, entropy {entropy:.3f}"


def test_progress_ends_at_the_end(checkpoint: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    sample(checkpoint, sequences=3, tokens=5, progress=lambda what, done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {15}
    assert seen[-1] == (15, 15)


def test_too_long_for_the_context(checkpoint: Checkpoint) -> None:
    with pytest.raises(ModelError, match="4096 tokens do not fit the model's context of 2048"):
        sample(checkpoint, sequences=1, tokens=4096)


def test_evaluation_text_that_ships() -> None:
    content = EVALUATION.read_text(encoding="utf-8")
    assert 6_000 <= len(content.encode()) <= 10_240
    passages = content.split(SEPARATOR)
    assert len(passages) >= 10
    assert all(len(passage.split()) > 30 for passage in passages)


def test_evaluation_is_cut_into_passages(tmp_path: Path, checkpoint: Checkpoint) -> None:
    file = tmp_path / "text.txt"
    file.write_text(f"first{SEPARATOR}x{SEPARATOR}{'long ' * 5}")
    pieces = read_evaluation(file, letters, checkpoint.architecture, tokens_max=10)
    assert [len(piece) for piece in pieces] == [5, 10, 10, 5]  # a single token predicts nothing
    assert pieces[0].tolist() == letters("first")


def test_calibration_from_lines(tmp_path: Path, checkpoint: Checkpoint) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('"abc"\n\n{"text": "def"}\n{"messages": [{"role": "user", "content": "g"}, {"content": "h"}]}\n')
    found = read_calibration(file, letters, checkpoint, sequences=2, tokens=4)
    assert found.tolist() == [[*letters("abc"), 2], [*letters("def"), 2]]


def test_short_calibration_is_one_sequence(tmp_path: Path, checkpoint: Checkpoint) -> None:
    file = tmp_path / "text.txt"
    file.write_text("short")
    assert read_calibration(file, letters, checkpoint).tolist() == [letters("short")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt holds no text"),
        ("latin.txt", b"caf\xe9", "cannot be read as UTF-8"),
        ("broken.jsonl", b'"fine"\n{', "broken.jsonl:2 is no JSON"),
        ("number.jsonl", b"5", "number.jsonl:1 is neither a string"),
        ("turns.jsonl", b'{"messages": [{"content": 5}]}', "turns.jsonl:1 is neither a string"),
    ],
)
def test_files_that_are_none(tmp_path: Path, checkpoint: Checkpoint, name: str, content: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    readers: tuple[Callable[[], object], ...] = (
        lambda: read_calibration(file, letters, checkpoint),
        lambda: read_evaluation(file, letters, checkpoint.architecture),
    )
    for read in readers:
        with pytest.raises(ModelError, match=message) if name != "empty.txt" else pytest.raises(ModelError):
            read()


def test_another_tokenizer_is_noticed(tmp_path: Path, checkpoint: Checkpoint) -> None:
    file = tmp_path / "text.txt"
    file.write_text("text")
    with pytest.raises(ModelError, match="has token 900, the model knows 259"):
        read_calibration(file, lambda text: [1, 900], checkpoint)


def test_lines_of_jsonl_end_at_newlines_only(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """JSON's strings may hold other ends of lines, and the file may begin with a mark of its byte order."""
    file = tmp_path / "texts.JSONL"
    file.write_text('\ufeff"ab\u2028cd\x85ef"\n\n{"text": "gh"}\r\n', encoding="utf-8")
    assert [len(piece) for piece in read_evaluation(file, letters, checkpoint.architecture)] == [8, 2]


def test_half_of_a_surrogate_pair_is_no_text(tmp_path: Path, checkpoint: Checkpoint) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('"whole"\n{"text": "\\ud800 abc"}\n')
    with pytest.raises(ModelError, match=r"texts\.jsonl:2 has half of a surrogate pair"):
        read_evaluation(file, letters, checkpoint.architecture)
