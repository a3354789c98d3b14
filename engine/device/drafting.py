"""
A draft model: a second device, with weights and KV of its own, asked for one token after the other.
"""

import time
from collections.abc import Callable

import msgspec

from engine.device import Device
from engine.plan import DraftPlan, DraftResult, Slice, StepPlan


class DraftModel:
    """Implements `engine.device.Drafting`."""

    def __init__(self, device: Device, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.facts = device.facts
        self._device = device
        self._clock = clock

    def draft(self, plan: DraftPlan) -> DraftResult:
        """As many passes as the highest count; a sequence whose numbers are none has no part in those that follow."""
        drafts: list[tuple[int, ...]] = [() for _ in plan.slices]
        pass_ns: list[int] = []
        pieces = list(enumerate(plan.slices))
        while pieces:
            began_ns = self._clock()
            result = self._device.run(StepPlan(step_id=len(pass_ns), slices=tuple(piece for _, piece in pieces)))
            following: list[tuple[int, Slice]] = []
            for (index, piece), answer in zip(pieces, result.slices, strict=True):
                drafts[index] += answer.emitted
                if answer.emitted and len(drafts[index]) < plan.counts[index]:
                    start = piece.start + len(piece.tokens)
                    following.append((index, msgspec.structs.replace(piece, start=start, tokens=answer.emitted)))
            pieces = following
            pass_ns.append(self._clock() - began_ns)
        return DraftResult(tuple(drafts), tuple(pass_ns))
