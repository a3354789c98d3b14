"""
The block pool against a plain model, over random sequences of calls.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.api import PrefixNews
from engine.blocks import BlockPool
from engine.prefix_news import NEWS_NAMES_MAX

BLOCKS_MAX = 6
BLOCK_SLOTS = 4


def is_indexed(name: bytes) -> bool:
    """Every second one."""
    return int(name) % 2 == 0


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, fill, name and release; steps are in flight and are committed."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(blocks_max=BLOCKS_MAX, block_slots=BLOCK_SLOTS)
        self.refs = dict.fromkeys(range(BLOCKS_MAX), 0)
        self.filled = dict.fromkeys(range(BLOCKS_MAX), 0)
        self.fenced: dict[int, int] = {}
        self.content: dict[int, bytes] = {}  # block -> the name that it was given, until it is overwritten
        self.step_id = 0
        self.serial = 0
        self.told: set[bytes] = set()  # what an index knows that has heard all reports

    @rule(count=st.integers(1, BLOCKS_MAX))
    def take(self, count: int) -> None:
        resting = [block for block, refs in self.refs.items() if refs == 0 and block not in self.fenced]
        taken = self.pool.take(count)
        if taken is None:
            assert count > len(resting)
            return
        assert len(set(taken)) == count
        assert set(taken) <= set(resting), "a held or fenced block was handed out"
        unnamed = [block for block in resting if block not in self.content]
        assert len(unnamed) < count or set(taken) <= set(unnamed), "a cached block went while empty ones were free"
        for block in taken:
            self.refs[block], self.filled[block] = 1, 0
            self.content.pop(block, None)

    @rule(block=st.integers(0, BLOCKS_MAX - 1), more=st.integers(1, BLOCK_SLOTS))
    def fill(self, block: int, more: int) -> None:
        if self.refs[block]:
            self.filled[block] = min(BLOCK_SLOTS, self.filled[block] + more)
            self.pool.fill(block, self.filled[block])

    @rule(block=st.integers(0, BLOCKS_MAX - 1), twin=st.booleans())
    def name(self, block: int, twin: bool) -> None:
        if self.refs[block] and self.filled[block] == BLOCK_SLOTS and block not in self.content:
            self.serial += 1
            others = sorted(self.content.values())
            name = others[0] if twin and others else str(self.serial).encode()
            self.pool.name(block, name, indexed=is_indexed(name))
            if name not in self.content.values():
                self.content[block] = name

    @rule(block=st.integers(0, BLOCKS_MAX - 1))
    def forget(self, block: int) -> None:
        if self.refs[block]:
            self.pool.forget([block])
            self.content.pop(block, None)

    @rule(block=st.integers(0, BLOCKS_MAX - 1))
    def hit(self, block: int) -> None:
        if block in self.content:
            found = self.pool.find(self.content[block])
            assert found == (None if block in self.fenced else block)
            if found is not None:
                self.pool.hold([found])
                self.refs[block] += 1
                self.filled[block] = BLOCK_SLOTS

    @rule(block=st.integers(0, BLOCKS_MAX - 1))
    def release(self, block: int) -> None:
        if self.refs[block]:
            self.pool.release([block], step_id=self.step_id)
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.filled[block] = 0
                self.fenced[block] = self.step_id

    @rule()
    def commit(self) -> None:
        self.pool.commit(self.step_id)
        self.fenced = {block: step for block, step in self.fenced.items() if step > self.step_id}
        self.step_id += 1

    @rule()
    def report(self) -> None:
        news = self.pool.prefixes.report()
        if news is not None:
            assert news.lost == 0 and not set(news.here) & set(news.gone)
            self.told = (self.told | set(news.here)) - set(news.gone)
        assert self.told == {name for name in self.content.values() if is_indexed(name)}
        assert self.pool.prefixes.report() is None

    @invariant()
    def books_close(self) -> None:
        self.pool.check()
        book = self.pool.book()
        assert book.imbalance() == 0
        assert book.filled == sum(self.filled[block] for block, refs in self.refs.items() if refs)
        assert book.fenced == len(self.fenced) * BLOCK_SLOTS
        resting = sum(refs == 0 and block not in self.fenced for block, refs in self.refs.items())
        assert self.pool.available == resting


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_block_is_not_released_twice() -> None:
    pool = BlockPool(blocks_max=2, block_slots=4)
    taken = pool.take(1)
    assert taken is not None
    pool.release(taken, step_id=0)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(taken, step_id=0)


def test_the_least_recently_released_cached_block_goes_first() -> None:
    pool = BlockPool(blocks_max=2, block_slots=1)
    first, second = pool.take(2) or ()
    pool.commit(0)
    for block, name in ((first, b"first"), (second, b"second")):
        pool.fill(block, 1)
        pool.name(block, name)
    pool.release([second], step_id=0)
    pool.release([first], step_id=0)
    assert pool.take(1) == (second,)
    assert pool.find(b"second") is None
    assert pool.find(b"first") == first


def test_a_hit_is_told_again_and_what_does_not_fit_into_a_report_is_counted() -> None:
    pool = BlockPool(blocks_max=NEWS_NAMES_MAX + 3, block_slots=1)
    blocks = pool.take(NEWS_NAMES_MAX + 3)
    assert blocks is not None
    for block in blocks:
        pool.fill(block, 1)
        pool.name(block, str(block).encode(), indexed=block != blocks[0])
    news = pool.prefixes.report()
    assert news is not None
    assert (len(news.here), news.gone, news.lost) == (NEWS_NAMES_MAX, (), 2)
    assert news.here[-1] == str(blocks[-1]).encode(), "the newest are told"
    pool.hold(blocks[:2])
    assert pool.prefixes.report() == PrefixNews(here=(str(blocks[1]).encode(),))
