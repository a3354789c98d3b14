"""
The token ids that a conversion looks at: to calibrate on, and to be measured on.

Calibration comes from a file, or is sampled from the model itself: then it needs no data at all, and it is the text
that this model deals with.  Evaluation comes from a file of passages, by default `quant/evaluation.txt`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from quant.formats.architecture import Architecture
from quant.formats.checkpoint import Checkpoint
from quant.formats.errors import ModelError
from quant.forward import attend, norm, plain, queries_keys_values, read_layer, rotations
from quant.options import Progress

Tokenize = Callable[[str], list[int]]

EVALUATION = Path(__file__).parent / "evaluation.txt"
SEPARATOR = "\n---\n"
SEQUENCES = 64
SEQUENCE_TOKENS = 256
TEXT_BYTES_MAX = 256 << 20
_BATCH = 64  # sequences sampled together: their keys and values lie in memory


def sample(
    checkpoint: Checkpoint,
    *,
    sequences: int = SEQUENCES,
    tokens: int = SEQUENCE_TOKENS,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress = lambda what, done, total: None,
) -> Tensor:
    """
    What the model says by itself at temperature 1: int64 [sequences, tokens].  Raises ModelError.

    Half of the sequences begin where the model begins a text, behind an end-of-sequence token; the other half begin
    with any token, which leads to more kinds of text (as in LLM-QAT, Liu et al. 2023).  The whole model is in memory
    meanwhile, in bfloat16: the one part of a conversion that is not done layer by layer.
    """
    a = checkpoint.architecture
    if not 0 < tokens <= a.context_max:
        raise ModelError(f"calibration sequences of {tokens} tokens do not fit the model's context of {a.context_max}")
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(a.vocab_size, (sequences, 1), generator=generator)
    if checkpoint.eos_ids:
        first[::2] = checkpoint.eos_ids[0]
    model = _Sampler(checkpoint, torch.device(device))
    done = []
    for number, batch in enumerate(first.split(_BATCH)):

        def report(position: int, before: int = number * _BATCH, rows: int = len(batch)) -> None:
            progress("sampling calibration text", before * tokens + position * rows, sequences * tokens)

        done.append(model.continue_(batch, tokens, generator, report))
    return torch.cat(done)


class _Sampler:
    """A whole model with a dense cache of keys and values."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        a = self._a = checkpoint.architecture
        dtype = torch.bfloat16

        def read(name: str, *shape: int) -> Tensor:
            return checkpoint.read(name, shape, dtype).to(device)

        self._device = device
        self._embedding = read("model.embed_tokens.weight", a.vocab_size, a.hidden)
        self._head = self._embedding if checkpoint.tied else read("lm_head.weight", a.vocab_size, a.hidden)
        self._norm = read("model.norm.weight", a.hidden)
        self._layers = [
            {name: weight.to(device) for name, weight in read_layer(checkpoint, layer, dtype).items()}
            for layer in range(a.layers)
        ]

    def continue_(
        self, first: Tensor, tokens: int, generator: torch.Generator, report: Callable[[int], None]
    ) -> Tensor:
        """[sequences, 1] -> [sequences, tokens]"""
        a = self._a
        cache = torch.empty(
            a.layers, 2, first.shape[0], a.kv_heads, tokens, a.head_dim, dtype=torch.bfloat16, device=self._device
        )
        rotation = rotations(a, tokens, self._device)
        known = [first]
        for position in range(tokens - 1):
            logits = self._step(known[-1].to(self._device), position, cache, rotation)
            known.append(_draw(logits.float().cpu(), generator))
            report(position + 2)  # the first one was there
        return torch.cat(known, 1)

    def _step(self, newest: Tensor, position: int, cache: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Logits behind one more token of every sequence: [sequences, vocab_size]."""
        a = self._a
        cos, sin = rotation
        here = slice(position, position + 1)
        x = F.embedding(newest, self._embedding)
        for layer, (weights, kv) in enumerate(zip(self._layers, cache, strict=True)):
            linear = plain(weights)
            z = norm(x, weights["input_layernorm.weight"], a.norm_epsilon)
            query, key, value = queries_keys_values(a, z, weights, linear, (cos[here], sin[here]))
            kv[0, :, :, here], kv[1, :, :, here] = key, value
            z = attend(query, kv[0, :, :, : position + 1], kv[1, :, :, : position + 1], a.windows[layer])
            x = x + linear("self_attn.o_proj", z)
            z = norm(x, weights["post_attention_layernorm.weight"], a.norm_epsilon)
            z = F.silu(linear("mlp.gate_proj", z)) * linear("mlp.up_proj", z)
            x = x + linear("mlp.down_proj", z)
        return F.linear(norm(x[:, -1], self._norm, a.norm_epsilon), self._head)


def _draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One token of each row by its chance, [rows, 1], from one uniform number; multinomial draws one for each token."""
    reach = torch.softmax(logits, -1).cumsum(-1)
    aim = torch.rand(reach.shape[0], 1, generator=generator) * reach[:, -1:]
    return torch.searchsorted(reach, aim, right=True).clamp(max=reach.shape[1] - 1)


def read_calibration(
    path: Path, tokenize: Tokenize, checkpoint: Checkpoint, *, sequences: int = SEQUENCES, tokens: int = SEQUENCE_TOKENS
) -> Tensor:
    """
    The beginning of a .txt file, or of the texts of a .jsonl file, cut to int64 [n, tokens], n <= `sequences`.

    Texts are joined by the end-of-sequence token, where there is one.  A file of fewer than `tokens` tokens becomes one
    shorter sequence.  Raises ModelError.
    """
    joint = list(checkpoint.eos_ids[:1])
    ids: list[int] = []
    for text in _texts(path):
        ids += (joint if ids else []) + tokenize(text)
        if len(ids) >= sequences * tokens:
            break
    if not ids:
        raise ModelError(f"{path.name} holds no text to calibrate on")
    _check_ids(ids, checkpoint.architecture, path)
    if len(ids) < tokens:
        return torch.tensor([ids])
    count = min(sequences, len(ids) // tokens)
    return torch.tensor(ids[: count * tokens]).view(count, tokens)


def read_evaluation(
    path: Path, tokenize: Tokenize, architecture: Architecture, *, tokens_max: int = 1024
) -> list[Tensor]:
    """
    The passages of a text, which lines of `---` divide; of a .jsonl file, those of each of its texts.

    Each is int64 [tokens] with at least two tokens; longer ones than `tokens_max` are cut into pieces.  Raises
    ModelError.
    """
    pieces: list[Tensor] = []
    length = min(tokens_max, architecture.context_max)
    for text in _texts(path):
        for passage in text.split(SEPARATOR):
            ids = tokenize(passage.strip("\n"))
            _check_ids(ids, architecture, path)
            pieces += [piece for piece in torch.tensor(ids, dtype=torch.int64).split(length) if len(piece) > 1]
    if not pieces:
        raise ModelError(f"{path.name} holds no text to measure on")
    return pieces


def _check_ids(ids: list[int], architecture: Architecture, path: Path) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < architecture.vocab_size:
        raise ModelError(
            f"{path.name} has token {max(ids)}, the model knows {architecture.vocab_size}: another tokenizer?"
        )


def _texts(path: Path) -> list[str]:
    """The texts of a file.  Raises ModelError that names the line."""
    try:
        if path.stat().st_size > TEXT_BYTES_MAX:
            raise ModelError(f"{path.name} is larger than {TEXT_BYTES_MAX >> 20} MiB: take a part of it")
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if path.suffix.lower() != ".jsonl":
        return [content]
    # Not splitlines: JSON's strings may hold U+2028 and other ends of lines that are none here.
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    return [_text_of(line, f"{path.name}:{number}") for number, line in lines]


def _text_of(line: str, place: str) -> str:
    """A string, {"text": ...} or {"messages": [{"content": ...}, ...]}."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{place} is no JSON: {error}") from error
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        turns = [turn.get("content") if isinstance(turn, dict) else None for turn in value["messages"]]
        texts = [turn for turn in turns if isinstance(turn, str)]
        value = "\n".join(texts) if len(texts) == len(turns) else None
    elif isinstance(value, dict):
        value = value.get("text")
    if not isinstance(value, str):
        raise ModelError(f'{place} is neither a string nor has a "text" or "messages" with "content"')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{place} has half of a surrogate pair, which is no character: {error.reason}") from error
    return value
