"""
Text to token ids and back: the model's own tokenizer and chat template.

A Hugging Face directory brings `tokenizer.json`; a GGUF file brings its vocabulary as metadata (gateway.vocabulary).
Token bytes are decoded here, not by the library, so that text can be made token by token (gateway.text) and still be
equal to what the library makes of the whole.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer

from gateway.renderer import Renderer
from gateway.template import TemplateError
from gateway.vocabulary import Vocabulary, VocabularyError, read_gguf
from gateway.wire import ChatMessage, Json

INLINE_CHARS_MAX = 4096
"""Longer texts are tokenized on a thread, so that the event loop goes on: about a millisecond's worth."""
THREADS = 2

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>")
_SPACE = "\u2581"  # how SentencePiece writes a space


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: each byte as a printable character (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in printable)
    return table | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_of_char()


class ModelText:
    """The text side of one model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer: Tokenizer = vocabulary.tokenizer
        self._special = {index for index, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self.decoder = _decoder_kind(self._tokenizer)
        self._pieces: dict[int, bytes] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.template = _template(vocabulary)
        eos = self.token_id(vocabulary.special_tokens.get("eos_token", ""))
        self.eos_ids: tuple[int, ...] = () if eos is None else (eos,)
        self.turn_ids = self._turn_ids()

    def _turn_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn in the chat template, beside the end of text."""
        source = self.template.source if self.template else ""
        found = (self.token_id(token) for token in _END_OF_TURN if token in source)
        return tuple(token for token in found if token is not None and token in self._special)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text; None: there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids.  Long texts do not hold up the event loop."""
        if len(text) <= INLINE_CHARS_MAX:
            return self._encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call lets go of the interpreter lock; the single one does not.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for a conversation.  Raises TemplateError, RendererBusy."""
        if self.template is None:
            raise TemplateError("This model has no chat template; use /v1/completions.")
        return await self.template.render(messages, add_generation_prompt=add_generation_prompt, extra=extra)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of all ids, special tokens included: for `/detokenize`."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def is_special(self, token: int) -> bool:
        """Whether the token is markup, not text."""
        return token in self._special

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to the text.  Unknown ids have none."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._make_piece(token)
        return piece

    def _make_piece(self, token: int) -> bytes:
        text: str | None = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self.decoder == "bytes":
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in text])
            except KeyError:
                return text.encode()  # An added token whose text is no byte-level text: the library does the same.
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace(_SPACE, " ").encode()

    def token_text(self, token: int) -> str:
        """A token alone, for logprobs: bytes that are no whole character become U+FFFD."""
        return self.piece(token).decode(errors="replace")

    async def check(self) -> None:
        """Whether the chat template is one.  Raises VocabularyError, with words for the operator."""
        if self.template is not None:
            try:
                await self.template.check()
            except TemplateError as error:
                raise VocabularyError(f"the chat template is broken: {error}") from error

    def close(self) -> None:
        """Let threads and processes go."""
        if self.template is not None:
            self.template.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def load(path: Path) -> ModelText:
    """The text side of a model directory or GGUF file.  Raises VocabularyError, with words for the operator."""
    return ModelText(_read_directory(path) if path.is_dir() else read_gguf(path))


def _template(vocabulary: Vocabulary) -> Renderer | None:
    if vocabulary.chat_template is None:
        return None
    return Renderer(vocabulary.chat_template, vocabulary.special_tokens)


# ---- Hugging Face directories


def _read_directory(path: Path) -> Vocabulary:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise VocabularyError(f"{path.name} has no tokenizer.json.")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception for whatever is wrong with the file.
        raise VocabularyError(f"{file.name} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(path / "tokenizer_config.json")
    special = _special_tokens(_read_json(path / "special_tokens_map.json")) | _special_tokens(config)
    jinja = path / "chat_template.jinja"
    template = jinja.read_text() if jinja.is_file() else _config_template(config)
    return Vocabulary(tokenizer, template, special)


def _read_json(file: Path) -> dict[str, Json]:
    if not file.is_file():
        return {}
    try:
        value: Json = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise VocabularyError(f"{file.name} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _special_tokens(config: dict[str, Json]) -> dict[str, str]:
    special: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    return special


def _config_template(config: dict[str, Json]) -> str | None:
    """`chat_template` is a text, or a list of named texts of which we want the default one."""
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {str(one.get("name")): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _decoder_kind(tokenizer: Tokenizer) -> str:
    """`bytes` for byte-level BPE, `spaces` for SentencePiece-like vocabularies, which strip one leading space."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    parts = decoder.get("decoders") or [decoder]
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return "bytes"
    strips = [part for part in parts if part.get("type") == "Strip"]
    usual = set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in kinds
    if usual and strips and all((part["content"], part["start"], part["stop"]) == (" ", 1, 0) for part in strips):
        return "spaces"
    raise VocabularyError(f"tokenizer decoder {' + '.join(map(str, kinds)) or 'none'} is not supported.")
