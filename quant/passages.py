"""
Texts of any length as rectangular batches, which is how they go through a layer.
"""

import torch
from torch import Tensor

BATCH_TOKENS = 2048  # that go through a layer together


class Padded:
    """Passages of any length in rectangular batches: what follows the end of one cannot reach back into it."""

    def __init__(self, passages: list[Tensor]) -> None:
        ordered = sorted(passages, key=len)
        self.batches: list[Tensor] = []
        self._passages: list[list[Tensor]] = []
        while ordered:
            count = max(1, BATCH_TOKENS // len(ordered[-1]))
            taken, ordered = ordered[-count:], ordered[:-count]
            self._passages.append(taken)
            self.batches.append(torch.nn.utils.rnn.pad_sequence(taken, batch_first=True))

    def peak(self, batches: list[Tensor]) -> float:
        """Of [sequences, tokens, in]: a token's largest number over its root mean square, the mean over all tokens."""
        total, count = 0.0, 0
        for batch, passages in zip(batches, self._passages, strict=True):
            for row, tokens in enumerate(passages):
                values = batch[row, : len(tokens)]
                typical = values.square().mean(1).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
                total += float((values.abs().amax(1) / typical).sum())
                count += len(tokens)
        return total / count

    def passages(self, source: list[Tensor], result: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(ids, hidden states of one stream, of the other) without the padding."""
        return [
            (tokens, source[batch][row, : len(tokens)], result[batch][row, : len(tokens)])
            for batch, passages in enumerate(self._passages)
            for row, tokens in enumerate(passages)
        ]
