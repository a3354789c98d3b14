"""
What an index outside the engine is told of the prefix cache: which names have come, were used, or have left.

Only names that are indexed (engine.prefix).  Of each the newest news counts, so what comes and leaves within one step
is told as what it has come to.
"""

from collections.abc import Collection

from engine.api import PrefixNews

NEWS_NAMES_MAX = 512
"""In one report; what is beyond is lost and counted.  An index is a hint."""


class PrefixLedger:
    """Collects news between two reports."""

    def __init__(self) -> None:
        self._indexed: set[bytes] = set()  # in the cache now; only ever asked for membership
        self._news: dict[bytes, bool] = {}  # name -> whether it is there

    def came(self, name: bytes) -> None:
        """A block of that name is in the cache."""
        self._indexed.add(name)
        self._tell(name, there=True)

    def used(self, name: bytes) -> None:
        """Somebody holds the block of that name, which may be none that is indexed."""
        if name in self._indexed:
            self._tell(name, there=True)

    def left(self, name: bytes) -> None:
        """The block of that name, which may be none that is indexed, has another content now."""
        if name in self._indexed:
            self._indexed.discard(name)
            self._tell(name, there=False)

    def report(self) -> PrefixNews | None:
        """The news since the last report; None: there are none."""
        if not self._news:
            return None
        told = list(self._news.items())[-NEWS_NAMES_MAX:]  # the newest
        lost = len(self._news) - len(told)
        self._news = {}
        return PrefixNews(
            here=tuple(name for name, there in told if there),
            gone=tuple(name for name, there in told if not there),
            lost=lost,
        )

    def check(self, named: Collection[bytes]) -> None:
        """What is told to be there has a block.  For tests."""
        assert sum(name in self._indexed for name in named) == len(self._indexed)

    def _tell(self, name: bytes, *, there: bool) -> None:
        self._news.pop(name, None)
        self._news[name] = there
