"""
What an engine shows, held against what it has.
"""

from engine.api import BLOCK_PLACES, Sight
from engine.scheduler import Scheduler
from engine.sight import sight_of
from telemetry.records import KvBook


def book_of(sight: Sight) -> KvBook:
    """The book, from the blocks that are shown."""
    slots = dict.fromkeys((*KvBook.__struct_fields__,), 0)
    for count, place, filled, _, _ in sight.runs:
        slots["total"] += count * sight.block_slots
        if BLOCK_PLACES[place] != "held":
            slots[BLOCK_PLACES[place]] += count * sight.block_slots
        elif filled:
            slots["filled"] += count * filled
            slots["tail"] += count * (sight.block_slots - filled)
        else:
            slots["lookahead"] += count * sight.block_slots
    return KvBook(**slots)


def check_sight(scheduler: Scheduler, now_ns: int) -> None:
    """Sums over the blocks are the book, and each block is shown with one who holds it."""
    everybody = [*scheduler.running, *scheduler.waiting]
    sight = sight_of(scheduler.pool, everybody, now_ns)
    assert sight.book == scheduler.pool.book() == book_of(sight)
    tables = {sequence.number: sequence.blocks for sequence in everybody}
    assert [one.number for one in sight.sequences] == list(tables)
    block, shown = 0, dict.fromkeys(tables, 0)
    for count, place, filled, owner, holders in sight.runs:
        for one in range(block, block + count):
            by = sorted(number for number, blocks in tables.items() if one in blocks)
            assert len(by) == holders and (holders > 0) == (BLOCK_PLACES[place] == "held")
            assert owner in by if by else (owner, filled) == (-1, 0)
            for number in by:
                shown[number] += 1
        block += count
    assert block == scheduler.pool.blocks_max
    assert {one.number: one.blocks for one in sight.sequences} == shown
    states = {sequence.number: sequence.ledger.state for sequence in everybody}
    assert all(one.state == states[one.number] and 0 <= one.state_ns <= one.age_ns for one in sight.sequences)
