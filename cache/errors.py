"""
Every way in which this package fails.

    CacheError
      Misconfigured     a person can mend it: a bad URL, no embedded server; the text says how and never holds a secret
      Unavailable       the server is slow, away, or takes no writes; what then holds is the caller's policy
        ScriptMissing   it does not know this script any more: a new, restarted or flushed one
      NotAllowed        an administrator asked for what cannot be: an unknown tenant, a limit out of range
"""


class CacheError(Exception):
    """Any of them."""


class Misconfigured(CacheError):
    """Found before anything is served."""


class Unavailable(CacheError):
    """No answer that can be relied on."""

    def __init__(self, reason: str, *, maybe_ran: bool = False) -> None:
        super().__init__(reason)
        self.maybe_ran = maybe_ran
        """Whether the server may have done what it was asked to do."""


class ScriptMissing(Unavailable):
    """Nothing has run; the script itself must be sent."""


class NotAllowed(CacheError):
    """Refused, and nothing is changed."""
