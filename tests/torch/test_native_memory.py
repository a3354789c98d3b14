"""
What the native kernels take of memory, and what becomes of them where there is none.
"""

import subprocess
import sys
from pathlib import Path

from tests.torch.kernels import every_isa, native

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
