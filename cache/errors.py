"""
Every way in which this package fails.

    CacheError
      Misconfigured     a person can mend it: a bad URL, no embedded server; the text says how and never holds a secret
      Unavailable       the server is slow, away, or takes no writes; what then holds is the caller's policy
      NotAllowed        an administrator asked for what cannot be: an unknown tenant, a limit out of range
"""


class CacheError(Exception):
    """Any of them."""


class Misconfigured(CacheError):
    """Found before anything is served."""


class Unavailable(CacheError):
    """No answer that can be relied on.  The command may have run all the same."""


class NotAllowed(CacheError):
    """Refused, and nothing is changed."""
