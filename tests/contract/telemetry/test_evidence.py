"""
What is remembered of a stretch of time.
"""

from telemetry.hub import Hub
from telemetry.recent import SAMPLES_MAX, Samples
from telemetry.records import StepRecord


def test_steps_of_an_engine_that_is_gone_are_not_taken_for_those_of_the_next() -> None:
    """Both count their steps and sequences from the beginning."""
    listening = Hub()
    for epoch in ("a", "b"):
        listening.engine_up(0, epoch=epoch)
        for number in (1, 2):
            requests = {0: f"{epoch}#1-0"}
            listening.step(StepRecord(step_id=number, ended_ns=number, step_ns=1, parts={"plan": 1}, requests=requests))
        listening.debug_steps()
    evidence = listening.evidence(0)
    assert {spot: step.requests[0] for spot, step in evidence.steps.items()} == {(0, 1): "b#1-0", (0, 2): "b#1-0"}
    assert evidence.starts == 2


def test_samples_reach_back_ever_further_and_are_never_too_many() -> None:
    samples = Samples()
    for second in range(100_000):
        samples.add(second, second)
        assert len(samples.since(0)) < SAMPLES_MAX
    kept = samples.since(0)
    assert kept[0] == (0, 0) and kept[-1][0] > 99_000 and len(kept) > SAMPLES_MAX // 3
    assert samples.since(50_000) == [one for one in kept if one[0] >= 50_000]
