"""
Many short lives of the real command, at the price of loading torch once: a process that forks a child for each.

    python -m tests.quant.nursery      a JSON `Life` per line on stdin, a JSON `Death` per line on stdout

A child may be told to send itself a signal before its N-th line of Python inside quant/, or inside one file of it: that
is a random moment which can be repeated.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the command."""

    arguments: tuple[str, ...]
    log: str  # where stdout and stderr go
    file: str = ""  # whose lines count; empty: all of quant/
    line: int = 0  # before which one the signal comes; 0: never
    signal: int = 0


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended."""

    status: int  # as Popen has it: negative for a signal
    lines: int  # how many counted; 0 if it was killed


class Nursery:
    """The process that forks, from the test's side."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def run(self, life: Life) -> Death:
        """Live it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(life) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Death)


@contextmanager
def nursery() -> Iterator[Nursery]:
    """Start it, and end it."""
    command = [sys.executable, "-m", "tests.quant.nursery"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Nursery(process)  # the end of its stdin is its end


class _Counter:
    """A trace function that counts lines, and sends the signal before one of them."""

    def __init__(self, life: Life) -> None:
        self.lines = 0
        self._place = str(ROOT / "quant" / life.file)
        self._life = life

    def call(self, frame: FrameType, event: str, argument: object) -> Any:
        """For each function that is entered."""
        return self._line if frame.f_code.co_filename.startswith(self._place) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event == "line":
            self.lines += 1
            if self.lines == self._life.line:
                os.kill(os.getpid(), self._life.signal)
        return self._line


def _live(life: Life, report: int, main: Callable[[Sequence[str]], None]) -> int:
    """In the child.  The exit code."""
    log = os.open(life.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    counter = _Counter(life)
    sys.settrace(counter.call)
    code: object = None
    try:
        main(life.arguments)
    except SystemExit as end:
        code = end.code
    finally:
        sys.settrace(None)
        os.write(report, str(counter.lines).encode())
    return code if isinstance(code, int) else 1


def _serve() -> None:
    import torch

    import quant.run  # noqa: F401 - so that no child has to load it
    from pellucid import main

    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    for line in sys.stdin.buffer:
        life = msgspec.json.decode(line, type=Life)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _live(life, writing, main)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading, "rb") as report:
            lines = report.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.buffer.write(msgspec.json.encode(Death(status=status, lines=int(lines or 0))) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
