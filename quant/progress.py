"""
How far a conversion is: a bar on a terminal, now and then a line elsewhere.  All of it on stderr.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from quant.options import Progress

LINE_EVERY_S = 10.0


@contextmanager
def progress(*, silent: bool) -> Iterator[Progress]:
    """Whatever fits the place that stderr leads to."""
    if silent:
        yield lambda what, done, total: None
    elif sys.stderr.isatty():
        with _bar() as bar:
            yield Stages(bar)
    else:
        yield Lines(time.monotonic)


def _bar() -> Bar:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("remaining"),
    )
    return Bar(*columns, console=Console(stderr=True))


class Stages:
    """One bar for each thing that is done."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._tasks = {task.description: task.id for task in bar.tasks}

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show it."""
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done, total=total)


class Lines:
    """A line at the beginning of each thing that is done, at its end, and every ten seconds between."""

    def __init__(self, now_s: Callable[[], float], say: Callable[[str], None] | None = None) -> None:
        self._now_s = now_s
        self._say = say or (lambda line: click.echo(f"pellucid: {line}", err=True))
        self._what = ""
        self._began_s = self._said_s = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Say it, if it is time."""
        now_s = self._now_s()
        if what != self._what:
            self._what, self._began_s = what, now_s
        elif done < total and now_s - self._said_s < LINE_EVERY_S:
            return
        self._said_s = now_s
        elapsed_s = now_s - self._began_s
        left = (
            f", about {_clock((total - done) * elapsed_s / done)} remaining" if 0 < done < total and elapsed_s else ""
        )
        self._say(f"{what}: {done} of {total}, {_clock(elapsed_s)} elapsed{left}")


def _clock(duration_s: float) -> str:
    """83.2 -> `1:23`"""
    minutes, whole_s = divmod(int(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_s:02}" if hours else f"{minutes}:{whole_s:02}"
