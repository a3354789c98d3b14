"""
The prototype of ../shared/reference/int8_step in a process of its own, on orders from bench_engine.

    python tests/bench/int8_step.py DIRECTORY MODEL.gguf SLOTS

One JSON array comes in a line, one number goes out a line: ["open", batch, context, room],
["window", steps] -> tokens/s, ["prefill", tokens] -> tokens/s, ["weights"] -> bytes, ["resident"] -> bytes.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

BLOCK_SLOTS = 16


class Step(Protocol):
    """What the prototype's class offers."""

    weight_bytes: int

    def step(self, tokens: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor, rows_out: Tensor) -> Tensor:
        """One step of any rows; returns the most probable ids of `rows_out`."""
        ...


class Prototype:
    """Holds one batch at a time."""

    def __init__(self, folder: Path, model: Path, slots: int) -> None:
        sys.path.insert(0, str(folder))
        self._module = importlib.import_module("model")
        blocks = slots // BLOCK_SLOTS
        self._engine: Step = self._module.Int8Step(self._module.load(str(model)), blocks_max=blocks)
        self._rows = self._tokens = self._positions = self._tables = torch.empty(0, dtype=torch.int32)

    def open(self, batch: int, context: int, room: int) -> float:
        """Fill `batch` sequences up to `context`, with room for so many tokens more.  All: unwritten ones read fast."""
        blocks = (context + room) // BLOCK_SLOTS + 1
        order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(1))
        self._tables = order.to(torch.int32).view(batch, blocks).contiguous()
        prompt = self._dice(context)
        for sequence in range(batch):
            self._module.prefill(self._engine, prompt, self._tables, sequence=sequence)
        self._rows, self._tokens = _ints(range(batch)), _ints(range(100, 100 + batch))
        self._positions = _ints([context] * batch)
        return 0.0

    def window(self, steps: int) -> float:
        """Tokens per second over `steps` steps, after one that does not count."""
        self._advance()
        began = time.perf_counter()
        for _ in range(steps):
            self._advance()
        return len(self._rows) * steps / (time.perf_counter() - began)

    def prefill(self, tokens: int) -> float:
        """Tokens per second of one prompt."""
        ids, tables = self._dice(tokens), _ints(range(tokens // BLOCK_SLOTS + 1)).view(1, -1)
        began = time.perf_counter()
        self._module.prefill(self._engine, ids, tables)
        return tokens / (time.perf_counter() - began)

    def weights(self) -> float:
        """Bytes of the packed matrices, and of the embedding in bfloat16."""
        return self._engine.weight_bytes + 2 * int(self._module.V) * int(self._module.H)

    def _dice(self, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(2)
        ids: list[int] = torch.randint(0, int(self._module.V), (count,), generator=generator).tolist()
        return ids

    def _advance(self) -> None:
        self._tokens = self._engine.step(self._tokens, self._positions, self._rows, self._tables, self._rows)
        self._positions = self._positions + 1


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) << 10


def _ints(values: range | list[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def main() -> None:
    """Load, say what was resident before it and that all is ready, then obey."""
    folder, model, slots = sys.argv[1:]
    torch.set_grad_enabled(False)
    before = resident_bytes()
    prototype = Prototype(Path(folder), Path(model), int(slots))
    print(before, flush=True)
    for line in sys.stdin:
        order, *numbers = json.loads(line)
        answer = resident_bytes() if order == "resident" else getattr(prototype, order)(*numbers)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
