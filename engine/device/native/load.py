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
    interconnect: Interconnect | None = None,
) -> NativeModel:
    """
    `cache` is the directory for packed weights; empty: they are not kept.  `interconnect` is the way to the ranks that
    have the other parts.  Raises ModelError and Unpackable.
    """
    return NativeModel(
        library,
        _packed(library, weights, cache),
        weights.architecture,
        context_max=context_max,
        blocks_max=blocks_max,
        kv_int8=kv_int8,
        mix=0 if weights.scheme is None else weights.scheme.mix,
        threads=threads,
        head_vocab=weights.part.vocab.length,
        interconnect=interconnect,
    )


def _packed(library: Library, weights: Weights, cache: str) -> Arrays:
    packer = Packer(library, weights)
    if not cache:
        return gathered(packer.arrays())
    source = (weights.checkpoint.identity, repr(weights.scheme), str(weights.dtype))
    path = packed_path(Path(cache), source if weights.shard is None else (*source, repr(weights.shard)))
    try:
        return read_packed(path)
    except (OSError, BrokenFile):  # not there, or of no use
        arrays = packer.arrays()
    try:
        write_packed(path, arrays, ranks=weights.part.ranks)
    except OSError:  # a full or read-only disk: this start goes on without
        pass
    return gathered(arrays)
