"""
A child for the supervisor's tests: `fake_child.py NAME MODE`.  What it does, it says on stdout, one line each.

All children write to the one pipe that the test reads: the order of the lines is the order of the events, and the pipe
ends when the last of them is gone.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType


def say(what: str) -> None:
    os.write(1, f"{name} {what}\n".encode())  # not print: a signal handler must not enter a buffer twice


def on_sigterm(_number: int, _frame: FrameType | None) -> None:
    if mode == "stubborn":
        say("ignores SIGTERM")
        return
    say("stops")
    done.set()


if __name__ == "__main__":
    name, mode = sys.argv[1:3]
    done = threading.Event()
    signal.signal(signal.SIGTERM, on_sigterm)
    if mode == "mistake" or (mode.startswith("mistake-if:") and Path(mode.partition(":")[2]).exists()):
        print(f"{name}: the model is broken", file=sys.stderr, flush=True)
        sys.exit(2)
    say("up")
    if mode.startswith("mistake-if:"):
        Path(mode.partition(":")[2]).touch()
        sys.exit(1)
    if mode == "dies" or (mode.startswith("dies-unless:") and not Path(mode.partition(":")[2]).exists()):
        Path(mode.partition(":")[2] or "/dev/null").touch()
        sys.exit(1)
    done.wait()
    say("gone")
