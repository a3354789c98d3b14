"""
What a sequence needs, and whether it can ever have it.

Sizes in blocks.  `door_fault` refuses the impossible at once; the rest says how much of the pool is spoken for, so that
a sequence is let in only when everything that the batch has yet to compute still fits.
"""

from collections.abc import Iterable
from math import isfinite

from engine.api import WEIGHT_MAX, Fault, GenerateRequest, Sampling
from engine.blocks import BlockPool
from engine.config import SchedulerConfig
from engine.sequence import Sequence


def blocks_for(tokens: int, config: SchedulerConfig) -> int:
    """Blocks that hold `tokens` slots."""
    return -(-tokens // config.block_slots)


def cached_blocks(sequence: Sequence, pool: BlockPool, config: SchedulerConfig) -> list[int]:
    """The longest chain of blocks that already holds the sequence's beginning.  One token is left to compute."""
    found: list[int] = []
    if not config.prefix_cache:
        return found
    for index in range((len(sequence.tokens) - 1) // config.block_slots):
        block = pool.find(sequence.name(index, config.block_slots))
        if block is None:
            break
        found.append(block)
    return found


def blocks_wanted(sequence: Sequence, config: SchedulerConfig) -> int:
    """
    Blocks that a sequence must find before it is let in.

    Usually those of the tokens that it knows; after `preemptions_max` all that it may ever use.
    """
    promised = sequence.preemptions >= config.preemptions_max
    return blocks_for(sequence.tokens_ever if promised else len(sequence.tokens), config)


def blocks_owed(running: Sequence, config: SchedulerConfig, newcomer: Sequence) -> int:
    """Blocks that a running sequence has yet to take, as far as `newcomer` must leave them alone."""
    cautious = max(newcomer.preemptions, running.preemptions) >= config.preemptions_max
    tokens = running.tokens_ever if cautious else len(running.tokens)
    return max(0, blocks_for(tokens, config) - len(running.blocks))


def fits(
    newcomer: Sequence, hit: list[int], running: Iterable[Sequence], pool: BlockPool, config: SchedulerConfig
) -> bool:
    """Whether there are blocks for all that `newcomer` beyond `hit` and the running ones have yet to compute."""
    spoken_for = sum(blocks_owed(one, config, newcomer) for one in running)
    return blocks_wanted(newcomer, config) - len(hit) + spoken_for <= pool.available - pool.idle(hit)


def door_fault(request: GenerateRequest, config: SchedulerConfig) -> Fault | None:
    """Why a request can never be served here; None if it can."""
    if not request.prompt:
        return Fault("invalid_value", "The prompt is empty: at least one token is needed.", "prompt")
    if not 0 <= min(request.prompt) <= max(request.prompt) < config.vocab_size:
        return Fault("invalid_value", f"Prompt token ids must be 0 to {config.vocab_size - 1}.", "prompt")
    if not 0 <= request.resume < len(request.prompt):
        return Fault("invalid_value", f"resume must be 0 to {len(request.prompt) - 1}.", "resume")
    if request.tokens_max <= request.resume:
        return Fault("invalid_value", f"max_tokens must be at least {request.resume + 1}.", "max_tokens")
    if not 1 <= request.weight <= WEIGHT_MAX:
        return Fault("invalid_value", f"weight must be 1 to {WEIGHT_MAX}, not {request.weight}.", "weight")
    return _length_fault(request, config) or _sampling_fault(request.sampling, config)


def _length_fault(request: GenerateRequest, config: SchedulerConfig) -> Fault | None:
    prompt = len(request.prompt) - request.resume
    total = prompt + request.tokens_max
    if total <= config.sequence_tokens_max:
        return None
    what = "KV memory" if config.slots_max < config.context_max else "context length"
    message = (
        f"This model's {what} is {config.sequence_tokens_max} tokens, but {total} were requested: "
        f"{prompt} in the prompt and {request.tokens_max} for the output. Shorten either."
    )
    return Fault("context_length_exceeded", message, "max_tokens" if prompt < config.sequence_tokens_max else "prompt")


def _sampling_fault(sampling: Sampling, config: SchedulerConfig) -> Fault | None:
    outside = [token for token in sampling.logit_bias if not 0 <= token < config.vocab_size]
    if outside:
        return Fault("invalid_value", f"Token id {outside[0]} is outside the vocabulary.", "logit_bias")
    numbers = {
        "temperature": (sampling.temperature, 0.0, 100.0),
        "top_p": (sampling.top_p, 0.0, 1.0),
        "min_p": (sampling.min_p, 0.0, 1.0),
        "repetition_penalty": (sampling.repetition_penalty, 1e-3, 1e3),
        "presence_penalty": (sampling.presence_penalty, -100.0, 100.0),
        "frequency_penalty": (sampling.frequency_penalty, -100.0, 100.0),
        "top_k": (sampling.top_k, 0, 2**31),
        "logprobs": (sampling.logprobs or 0, 0, 1000),
    }
    for name, (value, least, most) in numbers.items():
        if not least <= value <= most:  # False for NaN, too.
            return Fault("invalid_value", f"{name} must be {least:g} to {most:g}, not {value}.", name)
    if not all(isfinite(bias) for bias in sampling.logit_bias.values()):
        return Fault("invalid_value", "A bias is not a finite number.", "logit_bias")
    return None
