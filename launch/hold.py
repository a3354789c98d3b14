"""
Become a program once a lock is ours, and hold the lock for as long as the program lives.

One Valkey at a time may use a directory, and several `pellucid serve` may share one.  Each keeps one of these: the
first becomes the server, the others wait, and when it ends, however it ends, the kernel lets go of its lock and the
next one becomes the server, in the same directory and on the same socket.  Nobody has to notice, or to decide.

What the program says goes to a file that begins anew with each life, so it is bounded by what one life says.
"""

import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def holding(lock: Path, log: Path, command: Sequence[str]) -> tuple[str, ...]:
    """`command`, to be started once `lock` is free; what it says is in `log`."""
    return (sys.executable, "-I", "-S", str(Path(__file__)), str(lock), str(log), *command)


def main(arguments: Sequence[str]) -> None:
    """Wait for the lock `arguments[0]`, however long, and become `arguments[2:]`, which writes to `arguments[1]`."""
    lock, log, command = arguments[0], arguments[1], list(arguments[2:])
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.set_inheritable(descriptor, True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
