"""
What all tests share: marks by directory, the shared data, the default model.
"""

import os
from pathlib import Path

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as engine.__main__ does, before anything loads torch

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test is marked by the directory it lies in, so `pytest -m core` needs neither torch nor sockets."""
    for item in items:
        if item.path.is_relative_to(TESTS) and item.path.parent != TESTS:
            item.add_marker(item.path.relative_to(TESTS).parts[0])


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory with shared fixtures: $PELLUCID_SHARED, or `shared` beside the checkout."""
    place = Path(os.environ.get("PELLUCID_SHARED") or ROOT.parent / "shared")
    if not place.is_dir():
        pytest.skip(f"no shared data at {place}; PELLUCID_SHARED names another place")
    return place


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF, which `make test` has pulled."""
    from launch.errors import UserError
    from launch.known import DEFAULT_MODEL
    from launch.store import Store, data_dir

    environ = dict(os.environ)
    try:
        found = Store(data_dir(environ.get("PELLUCID_DATA_DIR", ""), environ)).find(DEFAULT_MODEL)
    except UserError as error:
        pytest.skip(str(error))
    if found is None:
        pytest.skip("the default model is not here: pellucid model pull")
    return found.path
