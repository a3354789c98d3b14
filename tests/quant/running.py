"""
The conversion in this process, with what most tests want.
"""

from pathlib import Path

import pytest

from launch.errors import UserError
from quant.run import Convert, run
from quant.settings import Given, read_settings
from tests.quant.plainly import Plainly
from tests.quant.small import leftovers


class Runner:
    """`run`, with what most tests want."""

    def __init__(self, source: Path, calibration: Path, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.out = folder / "out"
        self._model = str(source)
        self._calibration = str(calibration)

    def __call__(self, work: Convert, model: str = "", **given: str | bool | tuple[str, ...]) -> int:
        chosen: Given = {"scheme": "int8", "out": str(self.out), "calibration": self._calibration, **given}
        return run(read_settings(model or self._model, chosen), {"HOME": str(self.folder)}, work)

    def refused(self, model: str = "", **given: str | bool | tuple[str, ...]) -> str:
        return self.refused_by(Plainly(), model, **given)

    def refused_by(self, work: Convert, model: str = "", **given: str | bool | tuple[str, ...]) -> str:
        with pytest.raises(UserError) as caught:
            self(work, model, **given)
        assert leftovers(self.folder) == []
        return str(caught.value)
