"""
The native libraries for tests: as they were installed, or another build that the environment names.
"""

import os
from pathlib import Path

import pytest

from engine.device.native.build import LIBRARIES
from engine.device.native.library import Library, Unavailable, open_library

DIRECTORY = Path(os.environ.get("PELLUCID_TEST_LIBRARIES", LIBRARIES))
"""Where the libraries are; `make test-sanitized` names a build that checks every access."""


def native(instruction_set: str) -> Library:
    """The library, or a skipped test on a machine without a compiler."""
    try:
        return open_library(instruction_set, DIRECTORY)
    except Unavailable as reason:
        pytest.skip(f"the native kernels are not there: {reason}")
