"""
Resident memory of the engine's device with float, int8 and 4-bit weights: what of the linear weights' size is saved.

    python -m tests.bench.bench_memory [--model FILE.gguf] [--rounds 3]

Each measurement is a process of its own that loads the model, probes, warms up, computes some steps, and reads its own
resident set.  The forms take turns, and medians are compared.  All three are safetensors of the same model, written
here by plain rounding: how well codes were chosen is no matter of memory.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from launch.known import DEFAULT_MODEL
from launch.sizes import format_bytes
from launch.store import Store, data_dir
from quant.formats.checkpoint import open_checkpoint
from tests.torch.rounded import SCHEMES, write_rounded_file

ROOT = Path(__file__).resolve().parents[2]
KV_BYTES = 64 << 20
NEEDED = {"int8": 0.4, "gptq-4bit-g64": 0.6}
CHILD = """
import sys
from pathlib import Path
from engine.config import EngineOptions
from engine.device.runner import Runner
from tests.torch.tiny import generate
model, kv_bytes = sys.argv[1:]
options = EngineOptions(model=model, model_name="m", listen="", quantization="none", kv_memory_bytes=int(kv_bytes))
runner = Runner.load(options)
generate(runner, range(100, 300), 4)
status = Path("/proc/self/status").read_text()
print(runner.facts.weights.label, int(status.partition("VmRSS:")[2].split()[0]) * 1024)
"""


def measure(model: Path) -> tuple[str, int]:
    """What the weights are held in, and the resident bytes of a fresh process with them."""
    command = [sys.executable, "-c", CHILD, str(model), str(KV_BYTES)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "GOMP_SPINCOUNT": "10000"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=True)
    label, resident = done.stdout.split()[-2:]
    return label, int(resident)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = arguments.model or Store(data_dir("", dict(os.environ))).pull(DEFAULT_MODEL).path
    a = open_checkpoint(model).architecture
    per_layer = a.hidden * (2 * a.query_size + 2 * a.kv_size + 3 * a.intermediate)
    linear_bytes = 2 * a.layers * per_layer
    with tempfile.TemporaryDirectory() as folder:
        forms = {name: Path(folder) / name for name in ("float", "int8", "gptq-g64")}
        for name, directory in forms.items():
            write_rounded_file(model, directory, SCHEMES.get(name))
        found: dict[str, list[int]] = {}
        for _ in range(arguments.rounds):
            for directory in forms.values():
                label, resident = measure(directory)
                found.setdefault(label, []).append(resident)
    medians = {label: int(statistics.median(residents)) for label, residents in found.items()}
    print(f"{model.name}: linear weights are {format_bytes(linear_bytes)} in bfloat16; medians of {arguments.rounds}")
    print("weights         resident      saved         of the linear weights")
    for label, resident in medians.items():
        saved = medians["float"] - resident
        needed = f"  (at least {NEEDED[label]} wanted)" if label in NEEDED else ""
        share = f"{saved / linear_bytes:.2f}{needed}" if label in NEEDED else ""
        print(f"{label:<16}{format_bytes(resident):<14}{format_bytes(abs(saved)):<14}{share}")


if __name__ == "__main__":
    main()
