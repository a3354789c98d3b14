"""
What an engine has before it at one moment, for whoever looks: every block of KV memory, and every sequence.

Between two steps only.  Nobody looks most of the time, so nothing is kept for it: all of it is read off the pool and
the queue, in O(blocks + sequences).
"""

from collections.abc import Iterable
from itertools import groupby

from engine.api import BlockRun, SeenSequence, Sight
from engine.blocks import BlockPool
from engine.sequence import Sequence


def sight_of(pool: BlockPool, sequences: Iterable[Sequence], now_ns: int) -> Sight:
    """Sums over its blocks are the pool's book.  A shared block is that of the first of `sequences` that hold it."""
    seen = list(sequences)
    owners = [-1] * pool.blocks_max
    for sequence in reversed(seen):
        for block in sequence.blocks:
            owners[block] = sequence.number
    return Sight(
        step_id=pool.committed,
        block_slots=pool.block_slots,
        book=pool.book(),
        runs=runs(pool, owners),
        sequences=tuple(_seen(sequence, now_ns) for sequence in seen),
    )


def runs(pool: BlockPool, owners: list[int]) -> tuple[BlockRun, ...]:
    """Every block in its order, those side by side that are alike as one."""
    alike = groupby(zip(pool.places(), pool.filled, owners, pool.holders, strict=True))
    return tuple((sum(1 for _ in group), *block) for block, group in alike)


def _seen(sequence: Sequence, now_ns: int) -> SeenSequence:
    state = sequence.ledger.state
    return SeenSequence(
        number=sequence.number,
        request_id=sequence.request.request_id,
        tenant=sequence.request.tenant,
        state=state,
        state_ns=sequence.ledger.spent(now_ns).get(state, 0),
        age_ns=now_ns - sequence.ledger.opened_ns,
        prompt_tokens=sequence.prompt_length,
        output_tokens=sequence.output_length,
        computed_tokens=sequence.computed,
        blocks=len(sequence.blocks),
    )
