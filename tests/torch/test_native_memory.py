"""
What the native kernels take of memory, and what becomes of them where there is none.
"""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.config import EngineOptions
from engine.device import runner
from engine.device.errors import MemoryShort
from engine.device.form import choose_form
from engine.device.machine import give_back_memory
from engine.device.native.working_memory import working_bytes
from engine.device.runner import Runner, needed_bytes
from quant.formats.checkpoint import open_checkpoint
from tests.torch.kernels import every_isa, native, native_model
from tests.torch.tiny import bfloat16_model

ROOT = Path(__file__).parents[2]
DRAW_WITH_LITTLE = """
import re, resource, sys
from pathlib import Path
import torch
from engine.api import Sampling
from engine.device.native.sampling import NativeDraw
from engine.plan import SampleSpec
from tests.torch.kernels import native

draw = NativeDraw(native(sys.argv[1]), 2)
logits = torch.zeros(2, 500_000)
specs = [SampleSpec(sampling=Sampling(temperature=1.0, top_p=float(sys.argv[2])), uniforms=(0.5,))] * 2
draw(logits[:, :100], specs)  # the threads are there
for more in range(0, 64 << 20, 1 << 19):
    taken = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, resource.RLIM_INFINITY))
    try:
        draw(logits, specs)
        print("drawn")
        break
    except MemoryError:
        print("none")
"""


@every_isa
def test_a_draw_without_memory_says_so(isa: str) -> None:
    """Wherever it runs out: an exception that leaves a thread of a team would end the process."""
    native(isa)
    for top_p in ("1", "0.9"):
        done = subprocess.run(
            [sys.executable, "-c", DRAW_WITH_LITTLE, isa, top_p],
            cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said = done.stdout.split()
        assert said[0] == "none" and said[-1] == "drawn" and set(said[:-1]) == {"none"}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@every_isa
@pytest.mark.parametrize(
    ("threads", "rows", "context"), [(64, 256, 131072), (16, 4096, 2048), (1, 16384, 2048), (2, 512, 262144)]
)
def test_what_is_counted_is_what_is_taken(isa: str, threads: int, rows: int, context: int, tmp_path: Path) -> None:
    """By the library, of which each buffer is touched when it is made; a buffer that is not counted shows."""
    changes: dict[str, object] = {"head_dim": 64, "max_position_embeddings": context}
    one = native_model(native(isa), bfloat16_model(tmp_path / "model", changes), threads=threads)
    a = one._architecture
    give_back_memory()
    before = _resident_bytes()
    handle = one._library.open(ctypes.byref(one._decoder), rows)
    taken = _resident_bytes() - before
    one._library.close(handle)
    tables_and_drawing = 4 * context * a.head_dim + threads * 16 * (a.vocab_size + 64)
    counted = working_bytes(a, threads=threads, rows_max=rows, context_max=context) - tables_and_drawing
    assert 0.95 * taken < counted < 1.1 * taken + (1 << 20)


@pytest.fixture
def _same_threads() -> Iterator[None]:
    """Loading sets torch's."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@every_isa
@pytest.mark.usefixtures("_same_threads")
def test_threads_that_find_no_room_are_refused(isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, and the message says whose fault it is."""
    native(isa)
    monkeypatch.setenv("PELLUCID_KERNELS", isa)
    model = bfloat16_model(tmp_path / "model", {"max_position_embeddings": 131072})
    asked = EngineOptions(
        model=str(model), model_name="m", listen="", dtype="bfloat16", kv_memory_bytes=1 << 20, threads=64
    )
    monkeypatch.setattr(runner, "_load_native", None)  # nobody comes so far
    form = choose_form(open_checkpoint(model), asked)
    needed = needed_bytes(form, runner.blocks_within(form, asked.kv_memory_bytes, asked), asked)
    assert needed > 150 << 20
    monkeypatch.setattr(runner, "memory_bytes", lambda: needed - 1)
    with pytest.raises(MemoryShort, match=r"and 64 threads take .* GiB are free: choose fewer --threads"):
        Runner.load(asked)
    monkeypatch.setattr(runner, "memory_bytes", lambda: 1 << 20)
    with pytest.raises(MemoryShort, match="GiB are free: choose a smaller model or --kv-memory"):
        Runner.load(asked)
    monkeypatch.setattr(runner, "memory_bytes", lambda: needed)
    with pytest.raises(TypeError):
        Runner.load(asked)
