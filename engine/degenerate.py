"""
Output that is none: one token over and over, which is what a broken checkpoint or too coarse numbers come to.

The rule must not hit a model that does what it was told.  So it looks at the beginning only (a model that falls into a
loop later has said something before), grants more to a token that the prompt has, since that may have been asked for,
and leaves alone whoever forces the model's hand: with a bias, or without any token that could end the text.  Both
bounds are chosen, not measured.
"""

from engine.api import DEGENERATE, Fault
from engine.sequence import Sequence

REPEATS_MAX = 64
REPEATS_OF_PROMPT_MAX = 256


def degenerate_fault(sequence: Sequence) -> Fault | None:
    """Why `sequence` should end, if its outputs so far are one token only and too many of it."""
    request, repeats = sequence.request, sequence.repeats
    if repeats < REPEATS_MAX or repeats < sequence.output_length or not request.stop_ids:
        return None
    token = sequence.tokens[-1]
    if request.sampling.logit_bias or sequence.output_length <= request.tokens_min:
        return None
    if repeats < REPEATS_OF_PROMPT_MAX and token in sequence.tokens[: sequence.prompt_length]:
        return None
    return Fault(
        DEGENERATE,
        f"The model's output is degenerate: token {token}, {repeats} times from the start on."
        " The checkpoint may be broken, or quantized too coarsely; if it is meant, set ignore_eos.",
    )
