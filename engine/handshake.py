"""
How a gateway and an engine on different machines prove to each other that they know one secret, before anything else.

    engine  -> gateway    MAGIC, and a nonce
    gateway -> engine     a nonce of its own, and HMAC-SHA256(secret, "gateway", both)
    engine  -> gateway    HMAC-SHA256(secret, "engine", both); from here on frames, as on a Unix socket

The lengths are fixed, so nobody is made to wait for, or to keep, more than that.  A proof names its maker: none can be
sent back to whom it came from.  The secret itself never crosses the line, but a short one could be guessed from what
does.  What follows is neither encrypted nor signed: the line must be one that others cannot read or touch.
"""

import hashlib
import hmac
from collections.abc import Mapping

SECRET_VARIABLE = "PELLUCID_ENGINE_SECRET"
SECRET_BYTES_MIN = 32
MAGIC = b"pellucid engine 1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
HANDSHAKE_S = 10.0
"""For all of it.  An engine looks at its sockets between two steps, and those may take a second."""
TCP_OPTIONS = (
    ("TCP_NODELAY", 1),
    ("TCP_KEEPIDLE", 10),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 25_000),
)
"""For both ends, where the system has them, beside SO_KEEPALIVE: who has vanished is given up after 25 s."""


class HandshakeError(Exception):
    """The other side is not who it should be."""


def secret_in(environ: Mapping[str, str]) -> bytes:
    """The secret; empty where there is none.  Raises HandshakeError, without a word of it."""
    secret = environ.get(SECRET_VARIABLE, "").encode(errors="surrogateescape")
    if 0 < len(secret) < SECRET_BYTES_MIN:
        raise HandshakeError(f"{SECRET_VARIABLE}: the secret of the engines has at least {SECRET_BYTES_MIN} bytes")
    return secret


def prove(secret: bytes, maker: str, engine_nonce: bytes, gateway_nonce: bytes) -> bytes:
    """That `maker`, "engine" or "gateway", knows the secret now: both nonces are new for each connection."""
    assert len(engine_nonce) == len(gateway_nonce) == NONCE_BYTES and len(secret) >= SECRET_BYTES_MIN
    return hmac.digest(secret, maker.encode() + b"\0" + engine_nonce + gateway_nonce, hashlib.sha256)


class Challenge:
    """The engine's side, for one peer that has said nothing yet."""

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        self.greeting = MAGIC + nonce
        """To be sent first."""
        self._secret = secret
        self._nonce = nonce
        self._said = b""

    def take(self, data: bytes) -> bytes | None:
        """
        What the peer says, piece by piece, at most ANSWER_BYTES of it in all.

        Returns: None until that is complete, then our own proof.  Raises HandshakeError.
        """
        self._said += data
        assert len(self._said) <= ANSWER_BYTES
        if len(self._said) < ANSWER_BYTES:
            return None
        nonce, proof = self._said[:NONCE_BYTES], self._said[NONCE_BYTES:]
        if not hmac.compare_digest(proof, prove(self._secret, "gateway", self._nonce, nonce)):
            raise HandshakeError("it does not know the secret")
        return prove(self._secret, "engine", self._nonce, nonce)


class Answer:
    """The gateway's side of it."""

    def __init__(self, secret: bytes, greeting: bytes, nonce: bytes) -> None:
        """`greeting`: GREETING_BYTES from the engine.  Raises HandshakeError."""
        if not greeting.startswith(MAGIC):
            raise HandshakeError("what answers there is no engine of this version")
        engine_nonce = greeting[len(MAGIC) :]
        self.text = nonce + prove(secret, "gateway", engine_nonce, nonce)
        """To be sent."""
        self._expected = prove(secret, "engine", engine_nonce, nonce)

    def check(self, proof: bytes) -> None:
        """`proof`: PROOF_BYTES from the engine.  Raises HandshakeError."""
        if not hmac.compare_digest(proof, self._expected):
            raise HandshakeError("the engine does not know the secret")
