"""
Signs of life: heard while they come, missed when they do not, and last words are the last.
"""

import socket

import pytest

from engine.device.ranks.collective import RankLost
from engine.device.ranks.pulse import WORDS_BYTES_MAX, Pulse

START_S = 30.0


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.mark.parametrize("words", ["", "no memory: choose a smaller model"])
def test_who_hangs_up_has_said_why_or_nothing(words: str) -> None:
    ours, theirs = _pair()
    with ours, theirs:
        here, there = Pulse(ours, rank=3, timeout_s=1), Pulse(theirs, rank=0, timeout_s=1)
        if words:
            there.last_words(words)
        there.close()
        assert here.attend(START_S) == words
        here.last_words("to nobody")
        here.close()
        here.close()


def test_last_words_have_a_bound() -> None:
    ours, theirs = _pair()
    with ours, theirs:
        here, there = Pulse(ours, rank=3, timeout_s=1), Pulse(theirs, rank=0, timeout_s=1)
        there.last_words("x" * 3 * WORDS_BYTES_MAX)
        assert here.attend(START_S) == "x" * WORDS_BYTES_MAX
        here.close()


def test_who_gives_no_sign_is_lost_after_twice_the_timeout() -> None:
    """It has given one, so it has started: there is no more time for that."""
    ours, theirs = _pair()
    with ours, theirs:
        theirs.send(b"\0")
        here = Pulse(ours, rank=3, timeout_s=0.01)
        with pytest.raises(RankLost, match="^rank 3 gave no sign of life for 2 s$"):
            here.attend(START_S)
        here.close()


def test_who_has_not_started_has_longer() -> None:
    ours, theirs = _pair()
    with ours, theirs:
        here = Pulse(ours, rank=3, timeout_s=1)
        with pytest.raises(RankLost, match="for 0.5 s"):
            here.attend(0.3)  # rounded up to whole looks
        here.close()
