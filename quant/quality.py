"""
What the quantized model says against what its source says: token by token, on text that neither was made for.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quant.report import Quality

Logits = Callable[[Tensor], Tensor]
"""Hidden states [rows, hidden] behind the last layer to logits float32 [rows, vocab_size]."""

_ROWS = 128  # whose logits are in memory together


class Comparison:
    """Adds up, passage by passage."""

    def __init__(self, source: Logits, quantized: Logits) -> None:
        self._source = source
        self._quantized = quantized
        # Numbers and not small tensors: those would lie between the large ones of every step and hold their memory.
        self._divergences: list[float] = []
        self._same: list[bool] = []
        self._source_losses: list[float] = []
        self._losses: list[float] = []

    def add(self, tokens: Tensor, source: Tensor, quantized: Tensor) -> None:
        """One passage: ids [tokens], and both models' hidden states [tokens, hidden].  The last predicts nothing."""
        for start in range(0, len(tokens) - 1, _ROWS):
            rows = slice(start, min(start + _ROWS, len(tokens) - 1))
            self._add(tokens[1:][rows], self._source(source[rows]), self._quantized(quantized[rows]))

    def _add(self, targets: Tensor, source: Tensor, quantized: Tensor) -> None:
        expected, found = source.log_softmax(-1), quantized.log_softmax(-1)
        self._divergences += (expected.exp() * (expected - found)).sum(-1).tolist()
        self._same += (expected.argmax(-1) == found.argmax(-1)).tolist()
        chosen = targets.to(expected.device)[:, None]
        self._source_losses += (-expected.gather(1, chosen)[:, 0]).tolist()
        self._losses += (-found.gather(1, chosen)[:, 0]).tolist()

    def result(self) -> Quality:
        """Of all passages; at least one of two tokens must have come."""
        count = len(self._divergences)
        source_loss, loss = math.fsum(self._source_losses) / count, math.fsum(self._losses) / count
        return Quality(
            tokens=count,
            source_perplexity=_exp(source_loss),
            perplexity=_exp(loss),
            perplexity_increase=_exp(loss - source_loss) - 1,
            kl_mean=math.fsum(self._divergences) / count,
            kl_p99=float(torch.tensor(self._divergences, dtype=torch.float64).quantile(0.99)),
            top1=sum(self._same) / count,
        )


def _exp(loss: float) -> float:
    """Infinite where it is too large for a float, NaN of NaN: a broken result must be reported, not crash."""
    return math.exp(loss) if not loss > 700 else math.inf
