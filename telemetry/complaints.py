"""
Logging about our own trouble without making more of it: once per kind and minute.
"""

import logging

from telemetry import clock

PERIOD_NS = 60_000_000_000


class Complaints:
    """Lets the first message of a kind through, and then one a minute with the number of those held back."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last_ns: dict[str, int] = {}
        self._held_back: dict[str, int] = {}

    def log(self, kind: str, message: str, *values: str | int, exc_info: bool = False) -> None:
        """Complain, unless the same kind has been heard within the last minute.  Kinds are few and ours."""
        now_ns = clock.now_ns()
        last_ns = self._last_ns.get(kind)
        if last_ns is not None and now_ns - last_ns < PERIOD_NS:
            self._held_back[kind] = self._held_back.get(kind, 0) + 1
            return
        self._last_ns[kind] = now_ns
        self._logger.error(message + " (%d more held back)", *values, self._held_back.pop(kind, 0), exc_info=exc_info)


class Outage:
    """Says when something begins to fail and when it works again, and nothing in between."""

    def __init__(self, logger: logging.Logger, what: str, where: str) -> None:
        """`what` does not get to `where`."""
        self._logger = logger
        self._what = what
        self._where = where
        self._working = True

    def tell(self, reason: str, *, lost: int) -> None:
        """How it went this time; empty: well."""
        if (not reason) == self._working:
            return
        self._working = not reason
        if self._working:
            self._logger.warning("%s reach %s again; %d were lost", self._what, self._where, lost)
        else:
            text = "%s do not reach %s; requests are not affected (%s)"
            self._logger.error(text, self._what, self._where, reason)
