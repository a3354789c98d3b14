"""How far it is: a bar on a terminal, sparse lines elsewhere, nothing if it is to be silent."""

import os
import pty
import sys

import pytest

from quant.progress import Lines, progress


def test_lines_are_sparse() -> None:
    said: list[str] = []
    clock = iter([0.0, 1.0, 2.0, 12.0, 13.0, 14.0, 15.0])
    lines = Lines(lambda: next(clock), said.append)
    for done in (0, 1, 2, 3, 30):
        lines("sampling", done, 30)
    lines("converting", 1, 2)
    lines("converting", 2, 2)
    assert said == [
        "sampling: 0 of 30, 0:00 elapsed",
        "sampling: 3 of 30, 0:12 elapsed, about 1:48 remaining",
        "sampling: 30 of 30, 0:13 elapsed",
        "converting: 1 of 2, 0:00 elapsed",
        "converting: 2 of 2, 0:01 elapsed",
    ]


def test_hours_have_their_own_place() -> None:
    said: list[str] = []
    clock = iter([0.0, 4000.0])
    lines = Lines(lambda: next(clock), said.append)
    lines("a", 0, 2)
    lines("a", 1, 2)
    assert said[-1] == "a: 1 of 2, 1:06:40 elapsed, about 1:06:40 remaining"


def test_a_terminal_has_a_bar_with_layer_elapsed_and_remaining(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        with progress(silent=False) as tell:
            tell("sampling calibration text", 10, 10)
            tell("quantizing layers", 1, 30)
            tell("quantizing layers", 7, 30)
    shown = b""
    try:
        while piece := os.read(master, 65536):
            shown += piece
    except OSError:
        pass  # the terminal is closed, and all is read
    os.close(master)
    text = shown.decode()
    assert "quantizing layers" in text and "7/30" in text and "elapsed" in text and "remaining" in text
    assert "10/10" in text


def test_elsewhere_there_are_lines_and_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(silent=True) as tell:
        tell("quantizing layers", 1, 2)
    assert capsys.readouterr() == ("", "")
    with progress(silent=False) as tell:
        tell("quantizing layers", 0, 2)
    assert capsys.readouterr() == ("", "pellucid: quantizing layers: 0 of 2, 0:00 elapsed\n")
