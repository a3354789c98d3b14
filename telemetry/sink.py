"""
The bounded, non-blocking place where producers leave records.

`put` costs one append and never waits: a full sink drops the newcomer and counts it.  It may be called from any
thread and even from a garbage-collector callback, because `deque.append` and `popleft` are atomic.
"""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Sink(Generic[Item]):
    """First in, first out, at most `items_max` of them."""

    def __init__(self, *, items_max: int) -> None:
        assert items_max > 0
        self.items_max = items_max
        self.dropped = 0
        self._items: deque[Item] = deque()

    def put(self, item: Item) -> bool:
        """Leave one item.  False, and one more in `dropped`, when the sink is full."""
        # Two threads may both see the last free place: the bound is then missed by one, which hurts nobody.
        if len(self._items) >= self.items_max:
            self.dropped += 1
            return False
        self._items.append(item)
        return True

    def drain(self) -> Iterator[Item]:
        """Take out what lies here now, oldest first; what is put meanwhile waits for the next call."""
        for _ in range(len(self._items)):
            try:
                item = self._items.popleft()
            except IndexError:
                return  # Another consumer was faster.
            yield item

    def __len__(self) -> int:
        return len(self._items)
