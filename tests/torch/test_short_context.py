"""
The probe and the warm-up on contexts too short for what they would like to run.
"""

from pathlib import Path

import pytest

from engine.config import EngineOptions
from engine.device.runner import Runner


@pytest.mark.parametrize("context_max", [1, 2, 3, 17])
def test_a_short_context_loads(tiny_model: Path, context_max: int) -> None:
    options = EngineOptions(
        model=str(tiny_model), model_name="m", listen="", context_max=context_max, kv_memory_bytes=4 << 20
    )
    facts = Runner.load(options).facts
    assert facts.context_max == context_max
    assert facts.reproducible
