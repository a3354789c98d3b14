"""
Start a program that dies when its parent dies, whatever kills the parent.

The kernel does it (PR_SET_PDEATHSIG): also after `kill -9` nobody is left holding a port or a gigabyte.  It is asked
for here, in a program of its own that then becomes the real one, and not between fork and exec, where Python code may
deadlock.  Linux only; elsewhere the child runs without a leash.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def leashed(command: Sequence[str]) -> list[str]:
    """`command`, to be started by this very thread: it is killed when the thread's process ends."""
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), *command]


def main(arguments: Sequence[str]) -> None:
    """Become `arguments[1:]`, child of process `arguments[0]`."""
    parent, command = int(arguments[0]), list(arguments[1:])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
