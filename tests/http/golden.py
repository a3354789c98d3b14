"""
Golden files of what a client sees, with the times replaced.

A missing file is written and fails the test, so that its content is looked at before it is committed.
"""

import re
from pathlib import Path

GOLDEN = Path(__file__).with_name("golden")
_CREATED = re.compile(r'"created":\d+')


def check_golden(name: str, text: str) -> None:
    """`text` is what the file says."""
    shown = _CREATED.sub('"created":0', text)
    file = GOLDEN / name
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(shown)
        raise AssertionError(f"{file.name} was not there: it is written now, look at it")
    assert shown == file.read_text(), f"{file.name} differs; delete it to write it anew"
