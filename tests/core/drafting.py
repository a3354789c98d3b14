"""
A draft model on paper: each guess is right with a chance that is given, each pass takes what a curve says.
"""

import random
from collections.abc import Callable
from itertools import takewhile

from engine.api import GenerateRequest, Sampling
from engine.config import SchedulerConfig
from engine.draft_model import ModelSpeculator
from engine.plan import DraftPlan, DraftResult
from engine.sequence import Sequence, Status
from tests.core.speculation import Noise, Text, step_ns

Curve = Callable[[int, float], int]


def far_ns(rows: int, keys: float) -> int:
    """`step_ns`, and on in proportion: a prompt is read in one pass."""
    return step_ns(rows, keys) if rows <= 128 else int(step_ns(128, keys) * rows / 128)


class Paper:
    """What a run came to."""

    def __init__(self) -> None:
        self.tokens = self.guessed = self.accepted = self.draft_ns = 0
        self.spent_ns = self.plain_ns = 0

    @property
    def speedup(self) -> float:
        """Against the same tokens without speculation, at the same number of streams."""
        return self.plain_ns / self.spent_ns


def speculator_of(*, blocks_max: int = 4096, drafts_max: int = 15) -> ModelSpeculator:
    """One that has room."""
    return ModelSpeculator(
        SchedulerConfig(
            blocks_max=1, drafts_max=drafts_max, draft_blocks_max=blocks_max, draft_context_max=8192, vocab_size=200_000
        )
    )


def play(
    texts: list[Text],
    *,
    streams: int,
    chance: float,
    share: float,
    speculator: ModelSpeculator | None = None,
    cost: Curve = far_ns,
    noise: Noise | None = None,
    seed: int = 1,
) -> Paper:
    """Play `texts`, so many at a time; a pass of the draft model takes `share` of such a step of the other."""
    speculator = speculator or speculator_of()
    dice, paper, waiting = random.Random(seed), Paper(), list(enumerate(texts))
    running: list[tuple[Sequence, list[int]]] = []
    noisy = noise or (lambda: 1.0)
    while waiting or running:
        while waiting and len(running) < streams:
            number, text = waiting.pop(0)
            running.append((_begun(number, text), text[1]))
        sequences = [sequence for sequence, _ in running]
        for sequence in sequences:
            sequence.computed = len(sequence.tokens) - 1
        plan = speculator.asks(sequences, 512 - len(running))
        if plan.slices:
            truths = {sequence.number: output[sequence.output_length :] for sequence, output in running}
            result, true_ns = _guess(
                plan, truths, chance, lambda rows, keys: int(share * cost(rows, keys)), noisy, dice
            )
            speculator.told(plan, result)
            paper.draft_ns += true_ns
            paper.spent_ns += true_ns
        wishes = speculator.wish(sequences, 512 - len(running))
        rows = len(running) + sum(map(len, wishes.values()))
        keys = sum(len(one.tokens) * (1 + len(wishes.get(one.number, ()))) for one in sequences) / 1000
        plain_ns = cost(len(running), sum(len(one.tokens) for one in sequences) / 1000) / len(running)
        for sequence, output in running:
            drafts, start = wishes.get(sequence.number, ()), sequence.output_length
            pairs = zip(drafts, output[start:], strict=False)
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            said = output[start : start + right + 1]
            for token in said:
                sequence.emit(token, 1)
            if sequence.output_length < len(output):
                speculator.answered(sequence, said)
            paper.guessed += len(drafts)
            paper.accepted += len(said) - 1
            paper.tokens += len(said)
            paper.plain_ns += int(plain_ns * len(said))
        paper.spent_ns += cost(rows, keys)
        speculator.spent(rows, keys, int(cost(rows, keys) * noisy()))
        speculator.check()
        for pair in [pair for pair in running if pair[0].output_length == len(pair[1])]:
            running.remove(pair)
            speculator.end(pair[0], keep=True)
    return paper


def _begun(number: int, text: Text) -> Sequence:
    request = GenerateRequest(
        request_id=f"r{number}", prompt=tuple(text[0]), sampling=Sampling(), tokens_max=len(text[1])
    )
    sequence = Sequence(request, number=number, now_ns=0)
    sequence.status = Status.RUNNING
    sequence.emit(text[1][0], 1)
    return sequence


def _guess(
    plan: DraftPlan, truths: dict[int, list[int]], chance: float, cost: Curve, noise: Noise, dice: random.Random
) -> tuple[DraftResult, int]:
    """Guesses, and the time that they take without noise."""
    drafts: list[tuple[int, ...]] = []
    for piece, count in zip(plan.slices, plan.counts, strict=True):
        truth = truths[piece.sequence]
        guesses = [truth[i] if i < len(truth) and dice.random() < chance else -1 - i for i in range(count)]
        drafts.append(tuple(guesses))
    keys = sum(len(one.tokens) * (one.start + len(one.tokens)) for one in plan.slices) / 1000
    times = [cost(plan.rows(0), keys)]
    for number in range(1, max(plan.counts)):
        times.append(cost(plan.rows(number), keys * plan.rows(number) / plan.rows(0)))
    return DraftResult(tuple(drafts), tuple(int(spent * noise()) for spent in times)), sum(times)
