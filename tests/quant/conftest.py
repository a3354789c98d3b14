"""
A model, a text, and the command on them.
"""

from pathlib import Path

import pytest

from tests.quant.running import Runner
from tests.quant.small import write_model

TEXT = "The quick brown fox jumps over the lazy dog, and one two three four five six tokens follow.\n" * 20


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that nobody changes."""
    return write_model(tmp_path_factory.mktemp("run") / "source")


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def runner(source: Path, calibration: Path, tmp_path: Path) -> Runner:
    """`run`, with what most tests want."""
    return Runner(source, calibration, tmp_path / "place")
