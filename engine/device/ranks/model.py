"""
Several ranks as one model: rank 0 tells the others what it was told, all compute their parts of the same step, side by
side or one behind the other, and what each has found in its part of the vocabulary comes together on rank 0.

Of a row that is only to be continued greedily a rank tells its best token; of one that draws among the k best it tells
its k best, and only where all logits matter, all of its part.  The bits of what is chosen are those of one distribution
over the whole vocabulary: a tie goes to the lowest id, and the parts ascend.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import monotonic_ns

import msgspec
import torch
from torch import Tensor

from engine.api import Sampling
from engine.device import DeviceLost
from engine.device.compute import ALL, Computed, Model
from engine.device.ranks.seat import Compute, LineClosed, Logits, Order, Reset, Seat
from engine.device.ranks.shard import Shard, Span
from engine.device.sampler import best_ids
from engine.plan import SampleSpec, StepPlan

_ANY = SampleSpec(sampling=Sampling(), uniforms=())  # to compute a row one must know that it samples, not how


class SplitModel:
    """Implements `engine.device.compute.Model` on rank 0."""

    def __init__(self, own: Model, seat: Seat, parts: Sequence[Shard], *, vocab_size: int) -> None:
        """`own` is the part of rank 0, `parts` are those of all ranks."""
        self._own = own
        self._seat = seat
        self._parts = [part.vocab for part in parts]
        self._vocab_size = vocab_size

    @property
    def name(self) -> str:
        """Of the kernels."""
        return self._own.name

    @property
    def tiles(self) -> str:
        """Ranks that share layers change sums, so they belong into the fingerprint; stages change no bit."""
        sums = self._seat.sums
        return self._own.tiles if sums is None else f"{self._own.tiles} {sums.size} ranks"

    @property
    def reproducible(self) -> bool:
        """The ranks have agreed on it."""
        return self._own.reproducible

    def compute(self, plan: StepPlan, wanted: Sequence[int]) -> Computed:
        """Tell, compute, gather."""
        if self._seat.sums is None:  # To the bit what one process draws: its sums are over all logits.
            wanted = [ALL if count else 0 for count in wanted]
        began_ns = monotonic_ns()
        sent_bytes = self._seat.tell(Compute(_bare(plan), tuple(wanted)))
        self._seat.interconnect.told(began_ns, monotonic_ns(), sent_bytes)
        with _in_step():
            own = self._own.compute(plan, wanted)
        gathered = self._gather(*_found(own, wanted, self._parts, 0, len(plan.slices)))
        merging_ns = monotonic_ns()
        computed = merged(gathered, self._parts, wanted, len(plan.slices), self._vocab_size)
        batch_ns = own.batch_ns + monotonic_ns() - merging_ns
        return replace(computed, batch_ns=batch_ns, parts=own.parts)

    def logits(self, plan: StepPlan) -> Tensor:
        """Side by side."""
        self._seat.tell(Logits(_bare(plan)))
        with _in_step():
            own = self._own.logits(plan)
        gathered = self._gather(own.reshape(-1), [plan.tokens * part.length for part in self._parts])
        self._seat.close_book()  # It is of no step.
        return torch.cat([one.view(plan.tokens, -1) for one in gathered if one.numel()], -1)

    def reset(self) -> None:
        """Everywhere."""
        self._seat.tell(Reset())
        self._own.reset()

    def _gather(self, found: Tensor, counts: list[int]) -> list[Tensor]:
        return self._seat.interconnect.gather(found, counts)


def follow(model: Model, seat: Seat, parts: Sequence[Shard]) -> None:
    """Compute what rank 0 tells, until it hangs up.  Raises RankLost."""
    vocab = [part.vocab for part in parts]
    while True:
        try:
            order = seat.lines[0].receive(None)
        except LineClosed:
            return
        if isinstance(order, Reset):
            model.reset()
        else:
            seat.interconnect.gather(*_answer(model, order, vocab, seat.rank))
            seat.close_book()  # Rank 0 has it from the stamps.


def _answer(model: Model, order: Order, vocab: Sequence[Span], rank: int) -> tuple[Tensor, list[int]]:
    """What this rank finds, and how much each finds."""
    if isinstance(order, Logits):
        found = model.logits(order.plan).reshape(-1)
        return found, [order.plan.tokens * part.length for part in vocab]
    assert isinstance(order, Compute)
    computed = model.compute(order.plan, order.wanted)
    return _found(computed, order.wanted, vocab, rank, len(order.plan.slices))


def _found(
    computed: Computed, wanted: Sequence[int], vocab: Sequence[Span], rank: int, slices: int
) -> tuple[Tensor, list[int]]:
    """The report of a rank, and how long that of each is."""
    return report(computed, wanted, vocab[rank], slices), [_length(part, wanted, slices) for part in vocab]


def report(computed: Computed, wanted: Sequence[int], part: Span, slices: int) -> Tensor:
    """
    What a rank has found, as one run of float32, in which ids are exact: [slices] that are broken; best id, its logit
    and the lowest one of each sampling row; then what is wanted of each row, k ids and k logits, or all.
    """
    broken = torch.zeros(slices)
    if computed.broken:
        broken[list(computed.broken)] = 1
    if not part.length:
        return broken
    rows = torch.tensor([computed.best, computed.highest, computed.lowest], dtype=torch.float64)
    rows[0] += part.start
    pieces = [broken, rows.float().reshape(-1)]
    asked = [count for count in wanted if count]
    few = [min(count, part.length) for count in asked if count != ALL]
    drawing = computed.logits[[row for row, count in enumerate(asked) if count != ALL]]
    # Of a row with a number that is none nobody will draw, but it has its length all the same.
    heads = iter(best_ids(drawing.nan_to_num(nan=-math.inf), few) if few else ())
    for row, count in enumerate(asked):
        if count == ALL:
            pieces.append(computed.logits[row])
        else:
            ids = next(heads)
            pieces += [(ids + part.start).float(), computed.logits[row, ids]]
    return torch.cat(pieces)


def _length(part: Span, wanted: Sequence[int], slices: int) -> int:
    """Of the report of a rank."""
    if not part.length:
        return slices
    each = (part.length if count == ALL else 2 * min(count, part.length) for count in wanted)
    return slices + 3 * len(wanted) + sum(each)


def merged(
    reports: Sequence[Tensor], parts: Sequence[Span], wanted: Sequence[int], slices: int, vocab_size: int
) -> Computed:
    """What the `reports` of all ranks come to."""
    broken = torch.stack([found[:slices] for found in reports]).amax(0).nonzero()[:, 0].tolist()
    knowing = [(found, part) for found, part in zip(reports, parts, strict=True) if part.length]
    rows = torch.stack([found[slices : slices + 3 * len(wanted)].view(3, -1) for found, _ in knowing]).tolist()
    best, highest, lowest = [], [], []
    for row in range(len(wanted)):
        heights = [one[1][row] for one in rows]
        sound = all(map(math.isfinite, heights))
        winner = heights.index(max(heights)) if sound else 0
        best.append(int(rows[winner][0][row]))
        highest.append(heights[winner] if sound else -math.inf)
        lowest.append(min(one[2][row] for one in rows))
    asked = [count for count in wanted if count]
    logits = torch.empty(len(asked), vocab_size)
    for row, count in enumerate(asked):
        if count != ALL:
            logits[row] = -math.inf
    for found, part in knowing:
        at = slices + 3 * len(wanted)
        for row, count in enumerate(asked):
            if count == ALL:
                logits[row, part.start : part.stop] = found[at : at + part.length]
                at += part.length
            else:
                few = min(count, part.length)
                logits[row, found[at : at + few].long()] = found[at + few : at + 2 * few]
                at += 2 * few
    return Computed(best, highest, lowest, logits, frozenset(broken))


@contextlib.contextmanager
def _in_step() -> Iterator[None]:
    """What fails here alone leaves the other ranks in the middle of a step, for good.  Raises DeviceLost."""
    try:
        yield
    except DeviceLost:
        raise
    except Exception as error:
        raise DeviceLost(f"rank 0 failed in a step that it shares: {error}") from error


def _bare(plan: StepPlan) -> StepPlan:
    """The plan as followers need it: without histories and uniforms, which grow with the output."""
    pieces = (piece if piece.sample is None else msgspec.structs.replace(piece, sample=_ANY) for piece in plan.slices)
    return StepPlan(step_id=plan.step_id, slices=tuple(pieces))
