"""
How much memory the library takes beside weights and KV, known before anything is loaded.
"""

from engine.device.native.library import TILE, WIDE
from quant.formats.architecture import Architecture

ROWS_MIN = 256
"""Rows that there is room for from the start."""
_SPLIT = 256  # positions that one thread attends to at a time
_QUERIES = 16  # of a tile of attention
_PIECES = 4  # of attention for each thread, whose splits are kept until they are merged
_SCRATCH_BYTES = 72 << 10  # of attention, for each thread
_BEST_BYTES = 16 * (4 + 4 + 4)  # of each row and thread: the best and the least logits of 16 lanes
_DRAW_BYTES = 4 + 12  # of each token and thread: its weight, and its place among the likeliest


def working_bytes(architecture: Architecture, *, threads: int, rows_max: int, context_max: int, ranks: int = 1) -> int:
    """What `Model` of src/step.h, the tables of positions and drawing take, as if all weights were bfloat16."""
    a = architecture
    rows_max = max(rows_max, ROWS_MIN)
    widths = [a.hidden, a.query_size, a.query_size + 2 * a.kv_size, a.intermediate]
    columns = [width + -width % WIDE for width in widths]
    widest = max(columns)
    rounded = 2 * widest + WIDE + 8 * (widest // TILE)  # a row's values, scales and sums
    partial = columns[0] if ranks > 1 else 0  # what this rank adds to the hidden row
    row = 4 * (sum(columns) + partial) + rounded + threads * _BEST_BYTES
    splits = -(-context_max // _SPLIT)
    parts = _PIECES * splits * (8 + 4 * a.head_dim) * _QUERIES
    thread = parts + _SCRATCH_BYTES + 2 * 4 * widest + 2 * rounded + _DRAW_BYTES * (a.vocab_size + WIDE)
    return rows_max * row + threads * thread + 4 * context_max * a.head_dim
