"""
Drawing tokens at random, natively: all rows in one call.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine.device.native.library import Draw, Library
from engine.plan import SampleSpec


class NativeDraw:
    """Implements `engine.device.sampler.Draw`."""

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        self._threads = threads

    def __call__(self, logits: Tensor, specs: Sequence[SampleSpec]) -> list[int]:
        """One token for each row."""
        rows, vocab = logits.shape
        assert rows == len(specs)
        draws = (Draw * rows)()
        for draw, spec in zip(draws, specs, strict=True):
            s = spec.sampling
            draw.temperature, draw.top_p, draw.min_p, draw.top_k = s.temperature, s.top_p, s.min_p, s.top_k
            draw.uniform = spec.uniforms[0]
        tokens = np.empty(rows, np.int32)
        chances = logits.contiguous()
        fault = self._library.sample(
            chances.data_ptr(), vocab, draws, tokens.ctypes.data, rows, min(rows, self._threads)
        )
        if fault:
            raise MemoryError("no memory to draw tokens")
        chosen: list[int] = tokens.tolist()
        return chosen
