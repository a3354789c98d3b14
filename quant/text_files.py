"""
The text side of the result: tokenizer, special tokens, chat template; and the tokenizer itself, to cut texts.

What lies in a directory is copied.  A GGUF has all of it in its metadata: from there the files are made that say the
same.  Text belongs to the gateway, so it is the gateway's reading of a model that decides.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway import tokens
from gateway.gguf_metadata import read_metadata
from gateway.vocabulary import VocabularyError, read_gguf
from launch.errors import UserError
from quant.write import write_file, write_json

COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "LICENSE",
    "NOTICE",
)


@contextmanager
def tokenizing(path: Path) -> Iterator[Callable[[str], list[int]]]:
    """The tokenizer of the model at `path`, as `serve` would have it.  Raises UserError."""
    try:
        text = tokens.load(path)
    except (VocabularyError, UnicodeDecodeError) as error:
        raise UserError(str(error).removesuffix(".")) from error

    def encode(passage: str) -> list[int]:
        return asyncio.run(text.encode(passage, add_special_tokens=True))

    try:
        yield encode
    finally:
        text.close()


def write_text_files(path: Path, folder: Path, eos_ids: tuple[int, ...]) -> None:
    """The text side of the model at `path` into `folder`.  Raises UserError and OSError."""
    if path.is_file():
        _from_gguf(path, folder, eos_ids)
        return
    for name in COPIED:
        file = path / name
        if file.is_file():
            write_file(folder / name, file.read_bytes())


def _from_gguf(path: Path, folder: Path, eos_ids: tuple[int, ...]) -> None:
    try:
        vocabulary = read_gguf(path)
    except VocabularyError as error:
        raise UserError(str(error).removesuffix(".")) from error
    special = vocabulary.special_tokens
    write_file(folder / "tokenizer.json", vocabulary.tokenizer.to_str(pretty=True).encode())
    write_json(folder / "special_tokens_map.json", dict(special))
    context = _context(path)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # as it stands in tokenizer.json, and nothing added
        "clean_up_tokenization_spaces": False,
        **({"model_max_length": context} if context else {}),
        **special,
        **({"chat_template": vocabulary.chat_template} if vocabulary.chat_template else {}),
    }
    write_json(folder / "tokenizer_config.json", config)
    generation: dict[str, object] = {}
    if eos_ids:
        generation["eos_token_id"] = eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)
    for name in ("bos", "pad"):
        token = vocabulary.tokenizer.token_to_id(special.get(f"{name}_token", ""))
        generation |= {} if token is None else {f"{name}_token_id": token}
    write_json(folder / "generation_config.json", generation)


def _context(path: Path) -> int:
    metadata = read_metadata(path)
    value = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return value if isinstance(value, int) else 0


def is_quantized(path: Path) -> str | None:
    """By which method the directory at `path` says that it is quantized already.  None: it is not."""
    if path.is_file():
        return None  # a GGUF, which is read as the floats it stands for
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # whoever reads it next says what is wrong with it
    found = config.get("quantization_config") if isinstance(config, dict) else None
    if found is None:
        return "gptq" if (path / "quantize_config.json").is_file() else None
    return str(found.get("quant_method", "unknown method")) if isinstance(found, dict) else "unknown method"
