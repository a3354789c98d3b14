"""
A machine on paper for the controller: what a step costs is a curve, what the model says is written down beforehand.
"""

import random
from collections.abc import Callable
from itertools import pairwise, takewhile

from engine.api import GenerateRequest, Sampling
from engine.sequence import Sequence, Status
from engine.speculate import Speculator

ROWS = (1, 4, 8, 16, 32, 64, 128)
MILLISECONDS = (3.8, 4.2, 5.1, 7.7, 14.3, 28.6, 57.0)  # a step with so many rows: flat to about 4, then in proportion
MS_PER_THOUSAND_KEYS = 0.5

Text = tuple[list[int], list[int]]  # prompt, output


def step_ns(rows: int, keys: float) -> int:
    """The compute-bound curve of a processor with 8-bit weights."""
    for (low, high), (fast, slow) in zip(pairwise(ROWS), pairwise(MILLISECONDS), strict=True):
        if rows <= high:
            return int((fast + (slow - fast) * (rows - low) / (high - low) + MS_PER_THOUSAND_KEYS * keys) * 1e6)
    raise AssertionError(f"{rows} rows are more than a test needs")


Noise = Callable[[], float]
"""How many times longer a step takes than it would."""


def still(_seed: int) -> Noise:
    """None."""
    return lambda: 1.0


def usual(seed: int) -> Noise:
    """A few percent, and a pause now and then."""
    dice = random.Random(seed)
    return lambda: 6.0 if dice.random() < 0.01 else dice.choice((0.95, 1.0, 1.0, 1.05))


def wild(seed: int) -> Noise:
    """Somebody else takes the processor away: everything is slower for long, and one step in three by much."""
    dice, state = random.Random(seed), [1.0]

    def noise() -> float:
        if dice.random() < 0.03:
            state[0] = dice.choice((1.0, 1.5, 3.0))
        return state[0] * (dice.choice((1.5, 2.5, 5.0)) if dice.random() < 0.33 else dice.uniform(0.9, 1.1))

    return noise


class Outcome:
    """What a run came to."""

    def __init__(self) -> None:
        self.tokens = self.drafted = self.accepted = self.looks = 0
        self.spent_ns = self.plain_ns = 0

    @property
    def speedup(self) -> float:
        """Against the same tokens without speculation, at the same number of streams."""
        return self.plain_ns / self.spent_ns


def run(
    texts: list[Text],
    *,
    streams: int,
    speculator: Speculator | None = None,
    cost: Callable[[int, float], int] = step_ns,
    noise: Noise | None = None,
    lookup_ns: int = 20_000,
) -> Outcome:
    """Play `texts`, so many at a time; a look for drafts costs time as well."""
    speculator = speculator or Speculator(15)
    outcome, waiting = Outcome(), list(enumerate(texts))
    running: list[tuple[Sequence, list[int]]] = []
    while waiting or running:
        while waiting and len(running) < streams:
            number, (prompt, output) = waiting.pop(0)
            request = GenerateRequest(
                request_id=f"r{number}", prompt=tuple(prompt), sampling=Sampling(), tokens_max=len(output)
            )
            sequence = Sequence(request, number=number, now_ns=0)
            sequence.status = Status.RUNNING
            sequence.emit(output[0], 1)
            running.append((sequence, output))
        looked = speculator._looked
        wishes = speculator.wish([sequence for sequence, _ in running], 512 - len(running))
        searched_ns = lookup_ns * len(running) if speculator._looked != looked else 0
        outcome.looks += speculator._looked != looked
        rows = len(running) + sum(map(len, wishes.values()))
        keys = sum(len(one.tokens) * (1 + len(wishes.get(one.number, ()))) for one, _ in running) / 1000
        emitted, plain_ns = _answer(running, wishes, speculator, outcome, cost)
        spent_ns = cost(rows, keys) + searched_ns
        if noise is not None:
            spent_ns = int(spent_ns * noise())
        speculator.spent(rows, keys, spent_ns)
        outcome.spent_ns += cost(rows, keys) + searched_ns
        outcome.plain_ns += plain_ns
        outcome.tokens += emitted
        for pair in [pair for pair in running if pair[0].output_length == len(pair[1])]:
            running.remove(pair)
            speculator.end(pair[0], keep=True)
    return outcome


def _answer(
    running: list[tuple[Sequence, list[int]]],
    wishes: dict[int, tuple[int, ...]],
    speculator: Speculator,
    outcome: Outcome,
    cost: Callable[[int, float], int],
) -> tuple[int, int]:
    """Emit what is true; returns the tokens, and the time that they would have taken one by one."""
    emitted = 0
    streams, keys = len(running), sum(len(sequence.tokens) for sequence, _ in running) / 1000
    for sequence, output in running:
        drafts, start = wishes.get(sequence.number, ()), sequence.output_length
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, output[start:], strict=False)))
        said = output[start : start + right + 1]
        for token in said:
            sequence.emit(token, 1)
        speculator.answered(sequence, said)
        outcome.drafted += len(drafts)
        outcome.accepted += len(said) - 1
        emitted += len(said)
    return emitted, cost(streams, keys) * emitted // streams


def copying(seed: int, *, count: int = 20, prompt: int = 300, output: int = 150, slips: float = 0.04) -> list[Text]:
    """Outputs that copy their prompt, and now and then say something else or jump."""
    dice, texts = random.Random(seed), list[Text]()
    for _ in range(count):
        source = [dice.randrange(2000) for _ in range(prompt)]
        place, said = 0, list[int]()
        while len(said) < output:
            if dice.random() < slips:
                said.append(dice.randrange(2000))
                place = dice.choice((place + 1, dice.randrange(prompt)))
            else:
                said.append(source[place % prompt])
                place += 1
        texts.append((source, said))
    return texts


def chatting(seed: int, *, count: int = 20, prompt: int = 60, output: int = 150) -> list[Text]:
    """Words by Zipf's law, each depending a little on the one before: pairs come again, and mostly go on otherwise."""
    dice = random.Random(seed)

    def words(length: int) -> list[int]:
        said = [0]
        for _ in range(length):
            zipf = min(1999, int(1 / max(1e-4, dice.random())))
            said.append((said[-1] * 7 + zipf) % 2000 if dice.random() < 0.3 else zipf)
        return said[1:]

    return [(words(prompt), words(output)) for _ in range(count)]


def deceiving(seed: int, *, count: int = 20, output: int = 150, run: int = 6) -> list[Text]:
    """Whatever looks like something that was there before goes on differently, always after `run` tokens or none."""
    dice, texts = random.Random(seed), list[Text]()
    for _ in range(count):
        pieces = [[dice.randrange(2000) for _ in range(run)] for _ in range(8)]
        said = [token for _ in range(output) for token in (*dice.choice(pieces), dice.randrange(2000, 90_000))]
        texts.append((said[:100], said[100 : 100 + output]))
    return texts


def alternating(seed: int, *, span: int) -> list[Text]:
    """A stretch that copies, then as long a stretch of matches of two that never go on as before, and so on."""
    dice = random.Random(seed)
    texts: list[Text] = []
    for _ in range(10):
        source = [dice.randrange(2000) for _ in range(400)]
        said: list[int] = []
        while len(said) < 300:
            place = dice.randrange(400 - span)
            said += source[place : place + span]
            for _ in range(span // 3):
                at = dice.randrange(398)
                said += [source[at], source[at + 1], dice.randrange(5000, 90_000)]
        texts.append((source, said[:300]))
    return texts
