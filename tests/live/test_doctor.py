"""
The doctor names what is done to an appliance, and nothing where nothing is: a few faults of tests.faults, at their
strongest.  All of them, at every strength: `make faults`.
"""

import tempfile
from pathlib import Path

import pytest

from tests.faults.appliance import started
from tests.faults.examination import examine, warm
from tests.faults.injections import DEFAULT, FAULTS, Strength

WINDOW_S = 6.0
CAUSES = ("speculation", "garbage_collection")  # others hit somebody or not, as requests happen to come
MACHINE = "cpu_starvation"  # other tests run beside this one: that it says so is right


@pytest.mark.timeout(240)
async def test_the_cause_comes_first(default_model: Path) -> None:
    assert default_model.exists()
    faults = {fault.cause: fault for fault in FAULTS if fault.cause in CAUSES}
    with tempfile.TemporaryDirectory(prefix="pellucid-doctor-") as folder:  # paths of sockets must be short
        async with started(DEFAULT, Path(folder)) as patient:
            await warm(patient)
            well = await examine(patient, None, Strength("healthy"), 1, WINDOW_S)
            ill = [await examine(patient, faults[cause], faults[cause].strengths[2], 1, WINDOW_S) for cause in CAUSES]
    assert [cause for cause in well.doctor if cause != MACHINE] == [], well.raw
    for verdict in ill:
        assert [cause for cause in verdict.doctor if cause != MACHINE][:1] == [verdict.cause], verdict.raw
        assert verdict.why is not None
        assert [cause for cause in verdict.why if cause != MACHINE][:1] == [verdict.cause], verdict.raw
