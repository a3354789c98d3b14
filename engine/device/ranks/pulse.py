"""
Signs of life between two processes, all the time, whatever else they do: compute, load, or nothing.

A process that is stopped gives none, and one that has ended has hung up.  What it says before it gives up is heard too.
"""

import math
import socket
import threading

from engine.device.ranks.collective import RankLost

MISSED_MAX = 4
"""Looks in a row that find nothing: after a pause of the whole machine, one does, and says nothing of the other end."""
TIMEOUT_S_MIN = 1.0  # A busy machine may keep a thread waiting for longer than an exchange takes.
WORDS_BYTES_MAX = 4096
_BEAT = b"\0"


class Pulse:
    """One end.  From now on this process gives signs of life, on a thread of its own."""

    def __init__(self, end: socket.socket, *, rank: int, timeout_s: float) -> None:
        """
        Args:
            end: of a pair of type SOCK_SEQPACKET.
            rank: who is at the other end.
            timeout_s: twice as long without a sign, and it counts as lost.
        """
        self.rank = rank
        self._interval_s = 2 * max(timeout_s, TIMEOUT_S_MIN) / MISSED_MAX
        self._end = end
        self._end.settimeout(self._interval_s)
        self._closed = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name=f"pulse {rank}").start()

    def attend(self, start_s: float) -> str:
        """
        Wait until the other end has hung up, for whose first sign there are `start_s`.

        Returns: its last words, or none.  Raises RankLost if it gives no sign of life.
        """
        missed, missed_max = 0, math.ceil(start_s / self._interval_s)
        while missed < missed_max:
            try:
                word = self._end.recv(WORDS_BYTES_MAX)
            except TimeoutError:
                missed += 1
                continue
            except OSError:
                return ""
            if word != _BEAT:
                return word.decode(errors="replace")
            missed, missed_max = 0, MISSED_MAX
        raise RankLost(self.rank, f"gave no sign of life for {missed_max * self._interval_s:g} s")

    def last_words(self, text: str) -> None:
        """Say why this process gives up, if somebody is there to hear it."""
        try:
            self._end.send(text.encode()[:WORDS_BYTES_MAX])
        except OSError:
            pass

    def close(self) -> None:
        """Both ends have hung up."""
        self._closed.set()
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _beat(self) -> None:
        while not self._closed.is_set():
            try:
                self._end.send(_BEAT)
            except TimeoutError:
                pass  # It has not listened for long, and can read enough when it does.
            except OSError:
                return
            self._closed.wait(self._interval_s)
