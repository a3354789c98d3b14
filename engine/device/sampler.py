"""
From logits to tokens.

    repetition, presence, frequency penalties -> logit_bias -> banned        the adjusted logits: logprobs are theirs
    -> temperature (0: argmax) -> top_k -> top_p -> min_p -> inverse of the cumulative distribution at its uniform

Equal logits go to the lowest id, everywhere.  Probabilities are float64 here and float32 in the native draw; every sum
runs inside one row in one order, so a row's token does not depend on the others.  Where something has to be sorted,
only the head of the distribution is: a candidate list is always a prefix of "most likely first, then lowest id".
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.api import TokenLogprobs
from engine.device.compute import ALL, Computed
from engine.plan import SampleSpec, SliceResult

Draw = Callable[[Tensor, Sequence[SampleSpec]], list[int]]
"""One token at random for each row of logits, float32 [rows, vocab_size]."""

NO_NUMBER = "The model's numbers are none: the checkpoint may be broken, or quantized too coarsely."
FLAT = "The model finds all tokens equally likely: the checkpoint may be broken, or quantized too coarsely."
GREEDY_BELOW = 1e-5  # a temperature below it is 0: dividing by it would only overflow
_HEAD = 256  # candidates that are sorted before anybody has to sort the whole vocabulary


def logits_wanted(spec: SampleSpec) -> int:
    """How many of a row's best logits are needed to choose, or to answer: 0, if the best token is enough, or ALL."""
    s = spec.sampling
    penalized = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
    if s.logprobs is not None or s.logit_bias or spec.banned or penalized:
        return ALL
    if s.temperature < GREEDY_BELOW:
        return 0
    return s.top_k if s.top_k > 0 else ALL


def choose(computed: Computed, specs: Sequence[SampleSpec], draw: Draw | None = None) -> list[SliceResult]:
    """
    Choose a token for each sampling row of a step; each spec is of one row.  The logits are changed.

    A row without a number to choose is that row's fault and nobody else's.  `draw` is for rows that draw at random; by
    default they do it in torch.
    """
    alone = computed.logits.shape[1] == 1  # a vocabulary of one token cannot help it
    results, asked = [], []
    for row, (spec, best, highest, lowest) in enumerate(
        zip(specs, computed.best, computed.highest, computed.lowest, strict=True)
    ):
        if not math.isfinite(highest):
            results.append(SliceResult(fault=NO_NUMBER, degenerate="not_a_number"))
        elif lowest == highest and not alone:  # before penalties and bans, which would hide it
            results.append(SliceResult(fault=FLAT, degenerate="flat"))
        else:
            results.append(SliceResult((best,)))
        if logits_wanted(spec):
            asked.append(row)
    if asked:
        with torch.inference_mode():
            answers = _sample(computed.logits, [specs[row] for row in asked], draw or _draw)
        for row, answer in zip(asked, answers, strict=True):
            if not results[row].fault:
                results[row] = answer
    return results


def _sample(logits: Tensor, specs: Sequence[SampleSpec], draw: Draw) -> list[SliceResult]:
    """A token for each row of `logits`, float32 [rows, vocab_size]."""
    faults = [_adjust(row, spec) for row, spec in zip(logits, specs, strict=True)]
    best, chosen = torch.max(logits, -1)
    usable = torch.isfinite(best).tolist()
    for row, fine in enumerate(usable):
        if not fine and not faults[row]:
            faults[row] = "no token is left to choose from"
    tokens: list[int] = chosen.tolist()
    drawn = [row for row, spec in enumerate(specs) if not faults[row] and spec.sampling.temperature >= GREEDY_BELOW]
    if drawn:
        chances = logits if len(drawn) == len(specs) else logits[drawn]
        for row, token in zip(drawn, draw(chances, [specs[row] for row in drawn]), strict=True):
            tokens[row] = token
    asked = [row for row, spec in enumerate(specs) if not faults[row] and spec.sampling.logprobs is not None]
    logprobs: dict[int, TokenLogprobs] = {}
    if asked:
        counts = [specs[row].sampling.logprobs or 0 for row in asked]
        logprobs = dict(zip(asked, _logprobs(logits[asked], [tokens[row] for row in asked], counts), strict=True))
    return [
        SliceResult(fault=faults[row])
        if faults[row]
        else SliceResult((tokens[row],), (logprobs[row],) if row in logprobs else ())
        for row in range(len(specs))
    ]


def _adjust(row: Tensor, spec: SampleSpec) -> str:
    """Penalties, bias and bans on one row, in place.  Returns a fault, or nothing."""
    s, vocab_size = spec.sampling, row.shape[0]
    if s.repetition_penalty != 1 and (spec.prompt or spec.outputs):
        seen = torch.from_numpy(np.unique(np.array(spec.prompt + spec.outputs, np.int64)))
        values = row[seen]
        row[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if (s.presence_penalty or s.frequency_penalty) and spec.outputs:
        ids, counts = np.unique(np.array(spec.outputs, np.int64), return_counts=True)
        penalties = s.presence_penalty + s.frequency_penalty * counts
        row[torch.from_numpy(ids)] -= torch.from_numpy(penalties).float()
    if s.logit_bias:
        if min(s.logit_bias) < 0 or max(s.logit_bias) >= vocab_size:
            return f"logit_bias names a token that the vocabulary of {vocab_size} has not"
        row[list(s.logit_bias)] += torch.tensor(list(s.logit_bias.values()), dtype=torch.float32)
    banned = [token for token in spec.banned if 0 <= token < vocab_size]
    if banned:
        row[banned] = float("-inf")
    return ""


def _draw(logits: Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """One token per row at random, as its spec says."""
    temperatures = torch.tensor([spec.sampling.temperature for spec in specs], dtype=torch.float64)
    probabilities = torch.softmax(logits.double() / temperatures[:, None], -1)
    tokens = [0] * len(specs)
    ranked = [row for row, spec in enumerate(specs) if spec.sampling.top_k > 0 or spec.sampling.top_p < 1]
    plain = [row for row in range(len(specs)) if row not in set(ranked)]
    if plain:
        for row, token in zip(plain, _draw_plain(probabilities[plain], [specs[row] for row in plain]), strict=True):
            tokens[row] = token
    if ranked:
        vocab_size = logits.shape[1]
        counts = [min(specs[row].sampling.top_k or _HEAD, vocab_size) for row in ranked]
        for row, head in zip(ranked, best_ids(logits[ranked], counts), strict=True):
            tokens[row] = _draw_ranked(logits[row], probabilities[row], head, specs[row])
    return tokens


def _draw_plain(probabilities: Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """Rows that need no order: the distribution is summed up along the vocabulary."""
    floors = torch.tensor([spec.sampling.min_p for spec in specs], dtype=torch.float64)
    least = floors[:, None] * probabilities.max(-1, keepdim=True).values
    sums = torch.where(probabilities >= least, probabilities, 0.0).cumsum(-1)
    uniforms = torch.tensor([spec.uniforms[0] for spec in specs], dtype=torch.float64)
    points = uniforms[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, points, right=True)[:, 0]
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())[:, 0]  # the last token that has any weight
    tokens: list[int] = torch.minimum(found, last).tolist()
    return tokens


def _draw_ranked(logits: Tensor, probabilities: Tensor, head: Tensor, spec: SampleSpec) -> int:
    """One row with top_k or top_p.  `head` holds its most likely ids; if they are too few, all are sorted."""
    s = spec.sampling
    sums = probabilities[head].cumsum(0)
    mass = sums[-1] if s.top_k > 0 else torch.ones((), dtype=torch.float64)
    if s.top_k == 0 and sums[-1] < s.top_p and head.shape[0] < logits.shape[0]:
        head = torch.sort(logits, descending=True, stable=True).indices
        sums = probabilities[head].cumsum(0)
        mass = sums[-1]
    kept = head.shape[0]
    if s.top_p < 1:
        kept = min(kept, int(torch.searchsorted(sums, s.top_p * mass)) + 1)
    if s.min_p > 0:
        ranked = probabilities[head[:kept]]
        kept = max(1, int((ranked >= s.min_p * ranked[0]).sum()))
    found = int(torch.searchsorted(sums[:kept], spec.uniforms[0] * sums[kept - 1], right=True))
    return int(head[min(found, kept - 1)])


def best_ids(logits: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """
    The `counts[row]` best ids of each row, best first, equal ones by id.

    `topk` breaks ties as it likes, so it only gives the threshold; what reaches it is sorted stably.
    """
    values = torch.topk(logits, max(counts), -1).values
    heads = []
    for row, count in enumerate(counts):
        reached = (logits[row] >= values[row, count - 1]).nonzero()[:, 0]
        order = torch.sort(logits[row, reached], descending=True, stable=True).indices
        heads.append(reached[order[:count]])
    return heads


def _logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of the adjusted logits: of the chosen token, and of the `counts[row]` best."""
    logs = torch.log_softmax(logits.double(), -1)
    counts = [min(count, logits.shape[1]) for count in counts]
    heads = best_ids(logits, counts) if max(counts) else [torch.zeros(0, dtype=torch.int64)] * len(counts)
    rows = []
    for row, (token, head) in enumerate(zip(tokens, heads, strict=True)):
        top = zip(head[: counts[row]].tolist(), logs[row, head[: counts[row]]].tolist(), strict=True)
        possible = tuple((id_, value) for id_, value in top if value > float("-inf"))
        rows.append(TokenLogprobs(float(logs[row, token]), possible))
    return rows
