"""
The native libraries for tests: as they were installed, or another build that the environment names.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.device.native.build import LIBRARIES
from engine.device.native.library import Library, Unavailable, Weight, instruction_sets, open_library
from engine.device.native.load import load_native
from engine.device.native.memory import Arrays
from engine.device.native.model import NativeModel
from engine.device.native.pack import Packer, weight_of
from engine.device.weights import Linear, Weights
from engine.plan import Slice, StepPlan
from quant.formats.checkpoint import Checkpoint, open_checkpoint
from quant.formats.rounding import AT_LOAD
from quant.formats.scheme import Scheme
from quant.formats.weights import Affine, Quantized

DIRECTORY = Path(os.environ.get("PELLUCID_TEST_LIBRARIES", LIBRARIES))
"""Where the libraries are; `make test-sanitized` names a build that checks every access."""

every_isa = pytest.mark.parametrize("isa", instruction_sets())
"""For tests of each library that this processor can run."""


def native(instruction_set: str) -> Library:
    """The library, or a skipped test on a machine without a compiler."""
    try:
        return open_library(instruction_set, DIRECTORY)
    except Unavailable as reason:
        pytest.skip(f"the native kernels are not there: {reason}")


def pack_one(library: Library, weight: Tensor | Quantized, bias: Tensor | None = None) -> tuple[Arrays, Weight]:
    """One linear layer in the form of the kernels.  The arrays must outlive the structure."""
    int8 = isinstance(weight, Affine) and weight.bits == 8
    scheme = AT_LOAD["int8"] if int8 else Scheme(method="packed", bits=4)
    weights = Weights(cast(Checkpoint, None), torch.bfloat16, scheme)  # with a scheme, nobody asks the checkpoint
    arrays = dict(Packer(library, weights)._linear("one", Linear((weight,), bias)))
    return arrays, weight_of(arrays, "one")


def multiply(
    library: Library,
    weight: Tensor | Quantized,
    x: Tensor,
    bias: Tensor | None = None,
    *,
    mix: int = 0,
    threads: int = 1,
) -> Tensor:
    """`x @ weight.T + bias`, natively."""
    arrays, structure = pack_one(library, weight, bias)
    assert arrays and structure.ins >= x.shape[1]
    inputs = torch.nn.functional.pad(x.float(), (0, structure.ins - x.shape[1])).contiguous()
    found = torch.full((len(x), structure.outs), -7.0)
    fault = library.product(structure, inputs.data_ptr(), found.data_ptr(), len(x), mix, threads)
    assert fault == 0
    rest = found[:, weight.shape[0] :]
    assert not bool(((rest != 0) & torch.isfinite(rest)).any()), "what only fills a tile is zero"
    return found[:, : weight.shape[0]].contiguous()


def native_model(
    library: Library,
    directory: Path,
    *,
    rounding: Scheme | None = None,
    kv_int8: bool = True,
    context_max: int = 0,
    blocks_max: int = 64,
    threads: int = 1,
) -> NativeModel:
    """A model of a directory or file, with its weights freshly packed."""
    checkpoint = open_checkpoint(directory)
    with torch.inference_mode():
        return load_native(
            library,
            Weights(checkpoint, torch.bfloat16, rounding),
            kv_int8=kv_int8,
            context_max=context_max or checkpoint.architecture.context_max,
            blocks_max=blocks_max,
            threads=threads,
            cache="",
        )


def in_chunks(
    model: NativeModel, tokens: Sequence[int], counts: Sequence[int], blocks: Sequence[int], sequence: int = 1
) -> Tensor:
    """Logits of all rows of one sequence that is computed alone, in slices of `counts` tokens."""
    assert sum(counts) == len(tokens)
    rows, start = [], 0
    for count in counts:
        piece = Slice(sequence=sequence, start=start, tokens=tuple(tokens[start : start + count]), blocks=tuple(blocks))
        rows.append(model.logits(StepPlan(step_id=1, slices=(piece,))))
        start += count
    return torch.cat(rows)


def every(total: int, count: int) -> list[int]:
    """`total` in pieces of `count`, the last one shorter."""
    return [min(count, total - start) for start in range(0, total, count)]


def kv_of(model: NativeModel) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """A copy of the whole cache."""
    return model._kv.astype(np.uint8)
