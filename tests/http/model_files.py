"""
A small real model directory: a byte-level BPE tokenizer, trained here, and a chat template.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' and not loop.previtem %}{{ raise_exception('a tool speaks first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS = (
    "The quick brown fox jumps over the lazy dog. Hello world, how are you today? I am fine, thank you very much.",
    "A system, a user and an assistant talk about tokens, streams and errors; they stop at the end of the line.",
    "One two three four five six seven eight nine ten. Stop words are cut where they begin: STOP, END, halt!",
)


def write_model(directory: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json; returns the directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
