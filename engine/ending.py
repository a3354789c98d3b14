"""
Whether the newest token ends a sequence.
"""

import msgspec

from engine.api import Fault, FinishReason
from engine.degenerate import degenerate_fault
from engine.sequence import Sequence


class Ending(msgspec.Struct, frozen=True):
    """How a sequence ends."""

    reason: FinishReason
    fault: Fault | None = None
    stop_id: int | None = None


def ending_of(sequence: Sequence) -> Ending | None:
    """The end that the newest token is, or None.  To be asked after each token, so that none is taken beyond it."""
    token = sequence.tokens[-1]
    if token in sequence.request.stop_ids:
        return Ending("stop", stop_id=token)
    if sequence.output_length >= sequence.request.tokens_max:
        return Ending("length")
    fault = degenerate_fault(sequence)
    if fault is None:
        return None
    sequence.degenerate = "repeated"
    return Ending("failed", fault)
