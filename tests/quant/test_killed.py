"""
Whenever the conversion is killed, there is a whole checkpoint under its name or none, and the next run cleans up.
"""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quant.formats.checkpoint import open_checkpoint
from quant.write import PREFIX
from tests.quant.nursery import Life, Nursery, nursery
from tests.quant.small import leftovers, write_model
from tests.tidy.imports import ROOT

MOMENTS = 20
SEED = 20251
STATUS = {int(signal.SIGKILL): -9, int(signal.SIGTERM): 143, int(signal.SIGINT): 130}
TEXT = "The quick brown fox jumps over the lazy dog, and one two three four five six tokens follow.\n" * 12


class Place:
    """A source, a text, and a folder in which checkpoints are to come into being."""

    def __init__(self, folder: Path) -> None:
        self.source = write_model(folder / "source")
        self.text = folder / "text.txt"
        self.text.write_text(TEXT)
        self.folder = folder / "place"
        self.folder.mkdir()
        self.log = folder / "log"

    def arguments(self, name: str, *more: str) -> tuple[str, ...]:
        options = ("--scheme", "int8", "--max-ppl-increase", "1000", "--min-top1", "0", "--eval", str(self.text))
        return ("quantize", str(self.source), "--out", str(self.folder / name), *options, *more)

    def quick(self, name: str) -> tuple[str, ...]:
        return self.arguments(name, "--calibration", str(self.text), "--calibration-tokens", "256")

    def left(self) -> list[str]:
        return [name for name in leftovers(self.folder) if name.startswith(PREFIX)]


@pytest.fixture(scope="module")
def children() -> Iterator[Nursery]:
    with nursery() as found:
        yield found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def content(out: Path) -> dict[str, bytes]:
    """All files but the report, which has times in it."""
    return {file.name: file.read_bytes() for file in out.iterdir() if file.name != "report.json"}


def test_killed_at_random_moments(children: Nursery, place: Place) -> None:
    whole = children.run(Life(arguments=place.quick("whole"), log=str(place.log)))
    assert whole.status == 0, place.log.read_text()
    shell = children.run(Life(arguments=place.quick("again"), log=str(place.log), file="write.py"))
    assert shell.status == 0 and content(place.folder / "again") == content(place.folder / "whole")
    dice = random.Random(SEED)
    for number in range(MOMENTS):
        name = f"out-{number}"
        file, lines = ("write.py", shell.lines) if number % 2 else ("", whole.lines)
        life = Life(
            arguments=place.quick(name),
            log=str(place.log),
            file=file,
            line=dice.randrange(1, lines + 1),
            signal=dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]),
        )
        left_before = place.left()
        death = children.run(life)
        out = place.folder / name
        told = f"seed {SEED}: {life}, {death}: {place.log.read_text()}"
        assert death.status == STATUS[life.signal], told
        if out.exists():
            assert content(out) == content(place.folder / "whole"), told
            open_checkpoint(out)
        if life.signal != signal.SIGKILL:
            assert set(place.left()) <= set(left_before), told
    last = children.run(Life(arguments=place.quick("last"), log=str(place.log)))
    assert last.status == 0 and place.left() == []
    assert content(place.folder / "last") == content(place.folder / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_real_command_is_killed_at_work(number: signal.Signals, place: Place) -> None:
    command = [sys.executable, str(ROOT / "pellucid.py"), *place.arguments("out")]
    # Who runs the suite in the background may have been told to ignore Ctrl-C, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()  # it tells how far it is
        assert " of " in first, first
        process.send_signal(number)
        said = process.stderr.read()
        code = process.wait(30)
    assert code == STATUS[number], said
    assert "Traceback" not in said
    if number == signal.SIGKILL:
        assert [name[: len(PREFIX)] for name in leftovers(place.folder)] == [PREFIX]
    else:
        assert leftovers(place.folder) == []
