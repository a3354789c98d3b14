"""
Tokenizers out of GGUF metadata.

GGUF names the way text is cut before merging (`tokenizer.ggml.pre`) instead of carrying it; the patterns here are those
of the original tokenizers.  What is not in `_CUTS` is refused by name: a wrong cut gives wrong tokens in silence.

    smollm      each digit alone, then GPT-2's pattern (whitespace before a digit therefore stays whole)
    llama-bpe   GPT-4's pattern with up to three digits; whole words that are in the vocabulary skip merging
    qwen2       the same with single digits, after NFC
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gateway.gguf_metadata import GgufError, Value, read_metadata

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of tokenizer.ggml.token_type


class VocabularyError(Exception):
    """The model's tokenizer is missing, broken or of a kind that is not supported; the text names it."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model directory or file says about its text."""

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]
    """bos_token, eos_token, ...: as templates name them."""


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    parts = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _smollm() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


@dataclass(frozen=True, slots=True)
class _Cut:
    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_CUTS = {
    "smollm": _Cut(_smollm),
    "llama-bpe": _Cut(lambda: _split(_WORDS + r"\p{N}{1,3}" + _REST), ignore_merges=True, add_bos=True),
    "qwen2": _Cut(lambda: _split(_WORDS + r"\p{N}" + _REST), nfc=True),
}


def read_gguf(path: Path) -> Vocabulary:
    """The tokenizer and the chat template of a GGUF file.  Raises VocabularyError."""
    try:
        metadata = _Metadata(read_metadata(path))
    except (OSError, GgufError) as error:
        raise VocabularyError(f"{path.name} is not a readable GGUF file: {error}") from error
    kind = metadata.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise VocabularyError(f"{path.name}: tokenizer model {kind!r} is not supported; gpt2 (byte-level BPE) is.")
    pre = metadata.text("tokenizer.ggml.pre")
    cut = _CUTS.get(pre)
    if cut is None:
        raise VocabularyError(f"{path.name}: pre-tokenizer {pre!r} is not supported; {', '.join(_CUTS)} are.")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    special = _special_tokens(metadata, tokens)
    tokenizer = _build(path.name, metadata, tokens, cut)
    bos = special.get("bos_token")
    if metadata.flag("tokenizer.ggml.add_bos_token", cut.add_bos) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 $B:1", special_tokens=[(bos, tokens.index(bos))]
        )
    return Vocabulary(tokenizer, metadata.text("tokenizer.chat_template") or None, special)


class _Metadata:
    """GGUF fields by name, with types checked."""

    def __init__(self, fields: dict[str, Value]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        value = self._value(name)
        return value if isinstance(value, str) else ""

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name)
        return value if isinstance(value, bool) else default

    def number(self, name: str) -> int | None:
        value = self._value(name)
        return int(value) if isinstance(value, int) else None

    def texts(self, name: str) -> list[str]:
        return [value for value in self._values(name) if isinstance(value, str)]

    def numbers(self, name: str) -> list[int]:
        return [int(value) for value in self._values(name) if isinstance(value, int)]

    def _value(self, name: str) -> Value | None:
        return self._fields.get(name)

    def _values(self, name: str) -> list[Value]:
        value = self._value(name)
        return value if isinstance(value, list) else []


def _special_tokens(metadata: _Metadata, tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special: dict[str, str] = {}
    for ggml, name in names.items():
        token = metadata.number(f"tokenizer.ggml.{ggml}_token_id")
        if token is not None and 0 <= token < len(tokens):
            special[name] = tokens[token]
    return special


def _build(name: str, metadata: _Metadata, tokens: list[str], cut: _Cut) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    kinds = metadata.numbers("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not tokens or len(vocab) != len(tokens) or len(kinds) != len(tokens):
        raise VocabularyError(f"{name}: the vocabulary is empty, has duplicates, or lacks token types.")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.texts("tokenizer.ggml.merges")]
    pairs = [(merge[0], merge[1]) for merge in merges if len(merge) == 2]
    if len(pairs) != len(merges):
        raise VocabularyError(f"{name}: a merge does not join two tokens.")
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=cut.ignore_merges)
    except Exception as error:  # tokenizers raises plain Exception when a merge's tokens are not in the vocabulary.
        raise VocabularyError(f"{name}: the vocabulary is inconsistent: {error}") from error
    tokenizer = Tokenizer(model)
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cut.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer
