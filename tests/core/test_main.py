"""
What an engine says of itself.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.__main__ import hello, scheduler_config
from engine.config import EngineOptions
from engine.device.fake import FakeRunner

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = EngineOptions(model="m", model_name="name", listen="unix:none")


def test_a_pool_that_is_smaller_than_the_context_is_the_context() -> None:
    """So that a request which can never fit is refused with the numbers before it is sent."""
    small = FakeRunner(context_max=8192, blocks_max=2, block_slots=16)
    assert hello(OPTIONS, small).context_max == 32
    assert hello(OPTIONS, FakeRunner(context_max=64, blocks_max=100)).context_max == 64


def test_the_core_is_bounded_by_what_the_device_has() -> None:
    config = scheduler_config(OPTIONS, FakeRunner(vocab_size=77, blocks_max=5))
    assert (config.vocab_size, config.blocks_max, config.sequences_max) == (77, 5, OPTIONS.sequences_max)


def test_each_start_is_a_new_epoch() -> None:
    device = FakeRunner()
    assert hello(OPTIONS, device).epoch != hello(OPTIONS, device).epoch


def test_the_draft_model_s_pool_and_context_bound_the_core() -> None:
    draft = FakeRunner(blocks_max=7, context_max=33).facts
    config = scheduler_config(OPTIONS, FakeRunner(), draft)
    assert (config.draft_blocks_max, config.draft_context_max) == (7, 33)
    assert scheduler_config(OPTIONS, FakeRunner()).draft_blocks_max == 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins nothing")
def test_it_keeps_to_its_processors() -> None:
    """A process of its own: what is pinned stays so."""
    cpus = sorted(os.sched_getaffinity(0))[-1:]
    source = f"import os; from engine.__main__ import _keep_to; _keep_to({tuple(cpus)}); print(os.sched_getaffinity(0))"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{set(cpus)}\n"


def test_processors_that_are_not_to_be_had_end_nothing() -> None:
    source = "from engine.__main__ import _keep_to; _keep_to((1000000,)); print('goes on')"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("goes on\n")
