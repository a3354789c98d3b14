"""
What the quantized model says against what its source says: token by token, on text that neither was made for.
"""

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
        self._divergences: list[Tensor] = []
        self._same: list[Tensor] = []
        self._source_losses: list[Tensor] = []
        self._losses: list[Tensor] = []

    def add(self, tokens: Tensor, source: Tensor, quantized: Tensor) -> None:
        """One passage: ids [tokens], and both models' hidden states [tokens, hidden].  The last predicts nothing."""
        for start in range(0, len(tokens) - 1, _ROWS):
            rows = slice(start, min(start + _ROWS, len(tokens) - 1))
            self._add(tokens[1:][rows], self._source(source[rows]), self._quantized(quantized[rows]))

    def _add(self, targets: Tensor, source: Tensor, quantized: Tensor) -> None:
        expected, found = source.log_softmax(-1), quantized.log_softmax(-1)
        self._divergences.append((expected.exp() * (expected - found)).sum(-1).cpu())
        self._same.append((expected.argmax(-1) == found.argmax(-1)).cpu())
        chosen = targets.to(expected.device)[:, None]
        self._source_losses.append(-expected.gather(1, chosen)[:, 0].cpu())
        self._losses.append(-found.gather(1, chosen)[:, 0].cpu())

    def result(self) -> Quality:
        """Of all passages; at least one of two tokens must have come."""
        divergences = torch.cat(self._divergences).double()
        source_loss, loss = torch.cat(self._source_losses).double().mean(), torch.cat(self._losses).double().mean()
        return Quality(
            tokens=len(divergences),
            source_perplexity=float(source_loss.exp()),
            perplexity=float(loss.exp()),
            perplexity_increase=float((loss - source_loss).exp() - 1),
            kl_mean=float(divergences.mean()),
            kl_p99=float(divergences.quantile(0.99)),
            top1=float(torch.cat(self._same).double().mean()),
        )
