"""
From a checkpoint to a native model: packed weights from the file of an earlier start, or packed now and kept.
"""

from pathlib import Path

from engine.device.native.library import Library
from engine.device.native.memory import Arrays, gathered
from engine.device.native.model import NativeModel
from engine.device.native.pack import Packer
from engine.device.native.packed_file import BrokenFile, packed_path, read_packed, write_packed
from engine.device.ranks.book import Interconnect
from engine.device.weights import Weights


def load_native(
    library: Library,
    weights: Weights,
    *,
    kv_int8: bool,
    context_max: int,
    blocks_max: int,
    threads: int,
    cache: str,
    part: str = "",
    head_vocab: int | None = None,
    interconnect: Interconnect | None = None,
) -> NativeModel:
    """
    `cache` is the directory for packed weights; empty: they are not kept.  `part` says which part of the model the
    weights of this rank are, if not all.  Raises ModelError and Unpackable.
    """
    return NativeModel(
        library,
        _packed(library, weights, cache, part),
        weights.architecture,
        context_max=context_max,
        blocks_max=blocks_max,
        kv_int8=kv_int8,
        mix=0 if weights.scheme is None else weights.scheme.mix,
        threads=threads,
        head_vocab=head_vocab,
        interconnect=interconnect,
    )


def _packed(library: Library, weights: Weights, cache: str, part: str) -> Arrays:
    packer = Packer(library, weights)
    if not cache:
        return gathered(packer.arrays())
    source = (weights.checkpoint.identity, repr(weights.scheme), str(weights.dtype))
    path = packed_path(Path(cache), (*source, part) if part else source)
    try:
        return read_packed(path)
    except (OSError, BrokenFile):  # not there, or of no use
        arrays = packer.arrays()
    try:
        write_packed(path, arrays)
    except OSError:  # a full or read-only disk: this start goes on without
        pass
    return gathered(arrays)
