"""
Small whole models for the conversion, and the command in this process.
"""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

import pellucid
from tests.http import model_files
from tests.torch import tiny

VOCAB = 400  # more ids than the tokenizer has tokens


class Done(NamedTuple):
    """What a command left behind."""

    code: object
    out: str
    err: str


def write_model(directory: Path, seed: int = 0, **changes: object) -> Path:
    """A Hugging Face directory with random weights, a tokenizer and a chat template."""
    tiny.write_model(directory, seed, vocab_size=VOCAB, **changes)
    return model_files.write_model(directory)


def change_config(directory: Path, **changes: object) -> None:
    """Overwrite keys of config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def run_command(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> Done:
    """`pellucid ...` in this process, through its console script."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as caught:
            pellucid.main(arguments)
    finally:
        signal.signal(signal.SIGTERM, handler)
    said = capsys.readouterr()
    return Done(caught.value.code, said.out, said.err)


def complaint(done: Done) -> str:
    """The one line of a mistake."""
    assert (done.code, done.out) == (2, ""), done
    assert done.err.startswith("pellucid: ") and done.err.count("\n") == 1, done.err
    return done.err


def leftovers(folder: Path) -> list[str]:
    """Names in a directory, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())
