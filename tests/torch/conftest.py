"""
Models for the tests of the device ring.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torch.ranks.processes import RankProcesses, rank_processes
from tests.torch.tiny import write_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with 3 query heads per key head."""
    return write_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def gguf_file(request: pytest.FixtureRequest) -> Path:
    """The default model's GGUF: $PELLUCID_TEST_GGUF, or the model store's."""
    named = os.environ.get("PELLUCID_TEST_GGUF")
    path: Path = Path(named) if named else request.getfixturevalue("default_model")
    return path


@pytest.fixture(scope="session")
def processes() -> Iterator[RankProcesses]:
    """Up to four ranks."""
    with rank_processes() as ranks:
        yield ranks
