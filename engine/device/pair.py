"""
A model and, if one was asked for, its draft model: looked at together before anything is loaded, then loaded alike.
"""

from pathlib import Path

import msgspec

from engine.config import EngineOptions
from engine.device.drafting import DraftModel
from engine.device.errors import ModelError
from engine.device.form import choose_form
from engine.device.ranks.seat import Seat
from engine.device.runner import Runner, blocks_within, needed_bytes
from quant.formats.checkpoint import Checkpoint, open_checkpoint

KV_SHARE = 8  # one part in so many of the memory for keys and values is the draft model's


def load_pair(options: EngineOptions, seat: Seat | None = None) -> tuple[Runner, DraftModel | None]:
    """
    Load what `options` name.  Raises ModelError, whose text says which of the two it is about, and RankLost.

    `seat` is that of rank 0, where there are several.
    """
    if not drafts(options):
        return Runner.load(options, seat=seat), None
    main = open_checkpoint(Path(options.model))
    kv_bytes = options.kv_memory_bytes // KV_SHARE
    with_draft = beside_draft(options)
    try:
        draft = open_checkpoint(Path(options.draft_model))
        refuse_other_vocabulary(main, draft)
        small = msgspec.structs.replace(
            options,
            model=options.draft_model,
            kv_memory_bytes=kv_bytes,
            tensor_parallel=1,  # it is small: rank 0 computes it alone
            pipeline_parallel=1,
            quantization="auto" if draft.scheme is not None else options.quantization,
            context_max=min(options.context_max or main.architecture.context_max, draft.architecture.context_max),
        )
        form = choose_form(draft, small)
        beside = needed_bytes(form, blocks_within(form, kv_bytes, small), small)
    except ModelError as error:
        raise _of_draft(error) from error
    runner = Runner.load(with_draft, beside_bytes=beside, seat=seat)
    try:
        return runner, DraftModel(Runner.load(small))
    except ModelError as error:
        raise _of_draft(error) from error


def drafts(options: EngineOptions) -> bool:
    """Whether there is a draft model."""
    return bool(options.draft_model and options.drafts_max)


def beside_draft(options: EngineOptions) -> EngineOptions:
    """What is left for the model."""
    if not drafts(options):
        return options
    kv_bytes = options.kv_memory_bytes // KV_SHARE
    return msgspec.structs.replace(options, kv_memory_bytes=options.kv_memory_bytes - kv_bytes)


def refuse_other_vocabulary(main: Checkpoint, draft: Checkpoint) -> None:
    """Raise ModelError where the two cannot have the same tokens."""
    sizes = main.architecture.vocab_size, draft.architecture.vocab_size
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"its vocabulary has {sizes[1]} tokens and that of the model {sizes[0]}: "
            "choose a smaller model of the same family, or leave --draft-model out"
        )
    if main.eos_ids and draft.eos_ids and not set(main.eos_ids) & set(draft.eos_ids):
        raise ModelError(
            f"its texts end with token {_some(draft.eos_ids)} and those of the model with {_some(main.eos_ids)}, so "
            "theirs are other tokens: choose a smaller model of the same family, or leave --draft-model out"
        )


def _some(ids: tuple[int, ...]) -> str:
    return " or ".join(map(str, ids[:3]))


def _of_draft(error: ModelError) -> ModelError:
    return type(error)(f"the draft model: {error}")
