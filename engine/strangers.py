"""
Connections over TCP that have proven nothing yet: few of them, for a short time, with few bytes.

One that has proven that it knows the secret is a gateway, and is the server's from then on.  Others are told nothing.
"""

import logging
import secrets
import selectors
import socket

from engine.handshake import ANSWER_BYTES, HANDSHAKE_S, NONCE_BYTES, TCP_OPTIONS, Challenge, HandshakeError
from telemetry.clock import now_ns
from telemetry.complaints import Complaints

STRANGERS_MAX = 16
"""One more, and the oldest has to go: who knows the secret is through in a moment."""


class _Stranger:
    def __init__(self, peer: socket.socket, secret: bytes) -> None:
        self.peer = peer
        self.challenge = Challenge(secret, secrets.token_bytes(NONCE_BYTES))
        self.until_ns = now_ns() + int(HANDSHAKE_S * 1e9)


class Strangers:
    """All of them."""

    def __init__(self, secret: bytes, selector: selectors.BaseSelector) -> None:
        self._secret = secret
        self._selector = selector
        self._strangers: dict[int, _Stranger] = {}  # by descriptor, the oldest first
        self._complaints = Complaints(logging.getLogger("engine"))

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._strangers

    def patience_s(self, timeout_s: float | None) -> float | None:
        """How long may be waited without forgetting about them, where nobody else minds waiting for `timeout_s`."""
        oldest = next(iter(self._strangers.values()), None)
        if oldest is None:
            return timeout_s
        left_s = max(0, oldest.until_ns - now_ns()) / 1e9
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def add(self, peer: socket.socket) -> None:
        """A new connection, which does not block."""
        if len(self._strangers) >= STRANGERS_MAX:
            self._refuse(next(iter(self._strangers.values())), "there are too many like it")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in TCP_OPTIONS:
            if hasattr(socket, name):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        stranger = self._strangers[peer.fileno()] = _Stranger(peer, self._secret)
        self._selector.register(peer, selectors.EVENT_READ)
        try:
            peer.sendall(stranger.challenge.greeting)  # a new socket takes these few bytes
        except OSError:
            self._refuse(stranger, "")

    def hear(self, descriptor: int) -> tuple[socket.socket, bytes] | None:
        """It says something.  Once it has proven who it is: the connection, and our proof, which goes out first."""
        stranger = self._strangers[descriptor]
        try:
            data = stranger.peer.recv(ANSWER_BYTES)
            if not data:
                raise HandshakeError  # it has only looked whether somebody listens
            proof = stranger.challenge.take(data)
        except BlockingIOError:
            return None
        except OSError:
            self._refuse(stranger, "")
            return None
        except HandshakeError as error:
            self._refuse(stranger, str(error))
            return None
        if proof is None:
            return None
        self._forget(stranger)
        return stranger.peer, proof

    def expire(self) -> None:
        """End those that have had their time."""
        for stranger in list(self._strangers.values()):
            if now_ns() < stranger.until_ns:
                return
            self._refuse(stranger, f"it has not proven who it is within {HANDSHAKE_S:g} s")

    def close(self) -> None:
        """End all of them."""
        for stranger in list(self._strangers.values()):
            self._forget(stranger)
            stranger.peer.close()

    def _refuse(self, stranger: _Stranger, reason: str) -> None:
        if reason:
            self._complaints.log(reason, "a connection was refused: %s", reason)
        self._forget(stranger)
        stranger.peer.close()

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.peer.fileno()]
        self._selector.unregister(stranger.peer)
