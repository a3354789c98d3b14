"""
Paged-KV bookkeeping: which block of KV memory belongs to whom, and what is in it.

A block holds keys and values of `block_slots` tokens in every layer.  Here a block is only a number.

Life of a block:  free -> held (refs > 0) -> fenced (refs == 0) -> free, or cached_idle if it has a name
                  cached_idle -> held, by a prefix hit;  cached_idle -> held with new content, least recently used first
Why fence: a step already sent to the device may still write to what we just gave up.
A name is a hash of everything up to the block's last token (engine.prefix): same name, same keys and values.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence as Many

from engine.api import BLOCK_PLACES
from engine.prefix_news import PrefixLedger
from telemetry.records import KvBook

_FREE, _CACHED_IDLE, _FENCED, _HELD = range(len(BLOCK_PLACES))


class BlockPool:
    """Hands out blocks, least recently freed first.  Same calls, same answers."""

    def __init__(self, *, blocks_max: int, block_slots: int) -> None:
        assert blocks_max > 0
        assert block_slots > 0
        self.blocks_max = blocks_max
        self.block_slots = block_slots
        self.evictions = 0  # named blocks given up for new content, ever
        self.prefixes = PrefixLedger()
        self._refs = [0] * blocks_max
        self._filled = [0] * blocks_max  # slots with keys and values; of a held block only
        self._names: list[bytes | None] = [None] * blocks_max
        self._named: dict[bytes, int] = {}
        self._free: deque[int] = deque(range(blocks_max))
        self._idle: OrderedDict[int, None] = OrderedDict()  # O(1) removal, for prefix hits
        self._fenced: deque[tuple[int, int]] = deque()  # (step_id, block), step_id ascends
        self._committed = -1  # newest step that the device has finished
        self._held = 0
        self._filled_slots = 0  # over held blocks
        self._started = 0  # held blocks with at least one filled slot

    @property
    def available(self) -> int:
        """Blocks that `take` could hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def free(self) -> int:
        """Blocks that `take` hands out first: nothing is in them that anybody could ask for."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Hold `count` blocks.  None, and no change, if fewer are available: the caller preempts and retries."""
        assert 0 < count <= self.blocks_max
        if count > self.available:
            return None
        return tuple(self._take_one() for _ in range(count))

    def find(self, name: bytes) -> int | None:
        """The block of that name, unless it is fenced."""
        block = self._named.get(name)
        return None if block is None or (self._refs[block] == 0 and block not in self._idle) else block

    def idle(self, blocks: Many[int]) -> int:
        """How many of `blocks` nobody holds: holding them makes so many fewer available."""
        return sum(self._refs[block] == 0 for block in blocks)

    def hold(self, blocks: Many[int]) -> None:
        """One more reference to each: a prefix hit."""
        for block in blocks:
            name = self._names[block]
            if name is not None:
                self.prefixes.used(name)
            if self._refs[block] == 0:
                del self._idle[block]
                self._held += 1
                self._account(block, self.block_slots)
            self._refs[block] += 1

    def fill(self, block: int, filled: int) -> None:
        """The first `filled` slots of a held block now hold keys and values."""
        assert self._refs[block] > 0, f"block {block} filled while nobody holds it"
        assert self._filled[block] <= filled <= self.block_slots
        self._account(block, filled)

    def name(self, block: int, name: bytes, *, indexed: bool = False) -> None:
        """Publish a full block for prefix hits, `indexed` or not (see engine.prefix).  A twin keeps the name it has."""
        assert self._filled[block] == self.block_slots, f"block {block} is named before it is full"
        if self._names[block] is None and name not in self._named:
            self._names[block] = name
            self._named[name] = block
        if indexed:
            self.prefixes.came(name)

    def forget(self, blocks: Many[int]) -> None:
        """What these held blocks contain is not to be found again: it may be no numbers."""
        for block in blocks:
            assert self._refs[block] > 0
            self._unname(block)

    def release(self, blocks: Many[int], *, step_id: int) -> None:
        """Drop one reference to each; `step_id` is the newest step that may touch them."""
        assert not self._fenced or self._fenced[-1][0] <= step_id
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._account(block, 0)
                self._held -= 1
                if step_id > self._committed:
                    self._fenced.append((step_id, block))
                else:
                    self._rest(block)

    def commit(self, step_id: int) -> None:
        """The device has finished `step_id`: all that it fenced is available again."""
        self._committed = max(self._committed, step_id)
        while self._fenced and self._fenced[0][0] <= step_id:
            self._rest(self._fenced.popleft()[1])

    def book(self) -> KvBook:
        """Where every slot is now."""
        slots = self.block_slots
        return KvBook(
            total=self.blocks_max * slots,
            free=len(self._free) * slots,
            cached_idle=len(self._idle) * slots,
            filled=self._filled_slots,
            tail=self._started * slots - self._filled_slots,
            lookahead=(self._held - self._started) * slots,
            fenced=len(self._fenced) * slots,
        )

    @property
    def committed(self) -> int:
        """The newest step that the device has finished; -1: none."""
        return self._committed

    @property
    def filled(self) -> Many[int]:
        """Slots with keys and values, by block; of held ones only."""
        return self._filled

    @property
    def holders(self) -> Many[int]:
        """How many hold it, by block."""
        return self._refs

    def places(self) -> bytearray:
        """Where each block is, by its place in BLOCK_PLACES.  O(blocks_max)."""
        found = bytearray(_HELD if refs else _FREE for refs in self._refs)
        for block in self._idle:
            found[block] = _CACHED_IDLE
        for _, block in self._fenced:
            found[block] = _FENCED
        return found

    def check(self) -> None:
        """Every block is in exactly one state and the book is a recount.  O(blocks_max): for tests."""
        held = [block for block in range(self.blocks_max) if self._refs[block] > 0]
        assert len(held) == self._held
        assert self._held + len(self._fenced) + len(self._free) + len(self._idle) == self.blocks_max
        places = [*held, *self._free, *self._idle, *(block for _, block in self._fenced)]
        assert sorted(places) == list(range(self.blocks_max)), "a block is in two places"
        assert self._filled_slots == sum(self._filled[block] for block in held)
        assert self._started == sum(self._filled[block] > 0 for block in held)
        assert all(self._names[block] is None for block in self._free)
        assert all(self._names[block] is not None for block in self._idle)
        assert all(self._names[block] == name for name, block in self._named.items())
        assert self.book().imbalance() == 0
        self.prefixes.check(self._named)

    def _take_one(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            self._unname(block)
            self.evictions += 1
        assert self._refs[block] == 0
        self._refs[block] = 1
        self._held += 1
        return block

    def _rest(self, block: int) -> None:
        if self._names[block] is None:
            self._free.append(block)
        else:
            self._idle[block] = None

    def _unname(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._named[name]
            self._names[block] = None
            self.prefixes.left(name)

    def _account(self, block: int, filled: int) -> None:
        before = self._filled[block]
        self._filled[block] = filled
        self._filled_slots += filled - before
        self._started += (filled > 0) - (before > 0)
