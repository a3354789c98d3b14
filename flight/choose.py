"""
Which recording is meant.
"""

from pathlib import Path

from launch.errors import UserError
from launch.parse import nearest
from telemetry.flight import FIRST_WORKER, recordings, together


def chosen(folder: Path, name: str | None, *, kind: str) -> Path:
    """The directory of the recording `name`, or of the newest one of that kind.  Raises UserError."""
    if name is not None and "/" in name:
        return Path(name).expanduser()
    found = recordings(folder)
    if not found:
        raise UserError(f"no recordings in {folder}: `pellucid serve` makes them, unless --flight-memory is 0")
    if name is None:
        fitting = [one for one in found if (header := one.header) is not None and header.kind == kind]
        if not fitting:
            raise UserError(
                f"no recording in {folder} holds a readable {kind}; `pellucid flight list` shows what is there"
            )
        newest = fitting[-1]
        several = together(newest.path)
        parts = several.parts if several is not None else ()
        return next((one for one in reversed(parts) if one.process == FIRST_WORKER), newest).path  # it has the steps
    fitting = [one for one in found if f"{one.path.name}-".startswith(f"{name}-")] or [
        one for one in found if one.path.name.startswith(name)
    ]
    if not fitting:
        known = [one.path.name for one in found] + [one.process for one in found]
        raise UserError(f"no recording {name!r} in {folder}{nearest(name, known)}; see `pellucid flight list`")
    return fitting[-1].path
