"""
The loop with a made-up clock: parts sum to steps, steps touch, and a device that blows up harms one request only.
"""

import itertools
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from engine.api import Delta, GenerateRequest, Message, Sampling, StepFrame
from engine.config import SchedulerConfig
from engine.device import Drafting
from engine.device.drafting import DraftModel
from engine.device.fake import FakeRunner
from engine.draft_model import ModelSpeculator
from engine.loop import Loop
from engine.plan import Slice, StepPlan
from engine.scheduler import Scheduler
from engine.speculate import Speculation
from telemetry.books import request_mismatches, step_mismatches
from telemetry.disturbance import Disturbed, Disturbing
from telemetry.records import StepRecord
from tests.core.test_draft_model import Always
from tests.sim.guesses import Guesser


class Clock:
    """Every look at it costs a different number of nanoseconds."""

    def __init__(self) -> None:
        self.now = 10_000
        self.looks = 0

    def __call__(self) -> int:
        self.looks += 1
        self.now += 7 + self.looks % 13
        return self.now


class Script:
    """A link whose messages are given per poll."""

    def __init__(self, clock: Clock, polls: Iterator[list[Message]]) -> None:
        self.clock = clock
        self.polls = polls
        self.frames: list[StepFrame] = []
        self.waits: list[float | None] = []

    def poll(self, timeout_s: float | None) -> list[Message]:
        self.waits.append(timeout_s)
        self.clock.now += 1_000 if timeout_s is None else 3
        return next(self.polls, [])

    def publish(self, frame: StepFrame) -> list[Message]:
        self.frames.append(frame)
        return []


def play(
    polls: list[list[Message]],
    device: FakeRunner | None = None,
    steps: int = 40,
    speculation: Speculation | None = None,
    drafter: Drafting | None = None,
    disturbances: Disturbing | None = None,
) -> Script:
    """Run a loop over the script and stop it."""
    clock = Clock()
    link = Script(clock, iter(polls))
    config = SchedulerConfig(blocks_max=32, block_slots=4, context_max=64, vocab_size=100)
    scheduler = Scheduler(config, speculation=speculation)
    loop = Loop(scheduler, device or fake(), link, drafter=drafter, clock=clock, disturbances=disturbances)
    for _ in range(steps):
        loop.step()
    loop.stop()
    loop.run()
    return link


def fake() -> FakeRunner:
    return FakeRunner(vocab_size=100, context_max=64, blocks_max=32, block_slots=4)


def request(request_id: str, count: int = 5, tokens_max: int = 4) -> GenerateRequest:
    sampling = Sampling(temperature=0)
    return GenerateRequest(request_id=request_id, prompt=tuple(range(count)), sampling=sampling, tokens_max=tokens_max)


def records(link: Script) -> list[StepRecord]:
    return [frame.step for frame in link.frames if frame.step]


def test_parts_sum_to_the_step_and_steps_touch() -> None:
    link = play([[], [request("a")], [request("b"), request("none", 0)], [], [], [], [], [], [request("c")]])
    steps = records(link)
    assert len(steps) > 6
    assert all(step.imbalance() == 0 for step in steps)
    for before, after in itertools.pairwise(steps):
        assert after.ended_ns - after.step_ns == before.ended_ns
    assert any(step.parts["idle"] >= 1_000 for step in steps)
    for step in steps:
        for record in step.finished:
            assert record.imbalance() == 0


def test_what_a_processor_was_wanted_for_while_nobody_had_work_is_forgotten() -> None:
    class Delays:
        """Implements `Disturbing`: another nanosecond whenever it is asked."""

        def __init__(self) -> None:
            self.skipped = 0
            self.told = 0

        def take(self) -> Disturbed:
            self.told += 1
            return Disturbed(starved_ns=1)

        def skip(self) -> None:
            self.skipped += 1

    delays = Delays()
    link = play([[], [request("a")], [], [], [], [], []], disturbances=delays)
    steps = records(link)
    assert delays.skipped == link.waits.count(None) > 0
    assert delays.told == len(steps) and {step.starved_ns for step in steps} == {1}


def test_a_deltas_record_is_in_the_same_frame_and_every_request_ends_once() -> None:
    link = play([[request("a"), request("none", 0)], [request("b")]])
    ends = {delta.request_id: frame for frame in link.frames for delta in frame.deltas if delta.finish}
    assert set(ends) == {"a", "b", "none"}
    for request_id, frame in ends.items():
        assert frame.step is not None
        assert [record.request_id for record in frame.step.finished].count(request_id) == 1


def test_it_waits_without_limit_only_when_there_is_nothing_to_do() -> None:
    link = play([[], [request("a")]], steps=7)
    assert link.waits[:2] == [None, None]
    assert set(link.waits[2:5]) == {0.0}
    assert link.waits[-1] is None


def test_a_device_that_blows_up_harms_only_the_guilty() -> None:
    device = fake()

    def blow_up(_plan: StepPlan, piece: Slice) -> str:
        if piece.sequence == 1:
            raise RuntimeError("foreign library")
        return ""

    device.fault_of = blow_up
    link = play([[request("a", 5), request("bad", 6), request("c", 7)]], device)
    ends = {delta.request_id: delta.finish for frame in link.frames for delta in frame.deltas if delta.finish}
    assert {name: finish.reason for name, finish in ends.items()} == {"a": "length", "bad": "failed", "c": "length"}
    quiet = play([[request("a", 5), request("c", 7)]])
    assert tokens(link, "a") == tokens(quiet, "a")
    assert tokens(link, "c") == tokens(quiet, "c")
    assert ends["bad"].fault is not None and "foreign library" not in ends["bad"].fault.message


def tokens(link: Script, request_id: str) -> list[int]:
    deltas: list[Delta] = [delta for frame in link.frames for delta in frame.deltas if delta.request_id == request_id]
    return [token for delta in deltas for token in delta.tokens]


def test_stopping_tells_everybody() -> None:
    link = play([[request("a")]], steps=1)
    last = link.frames[-1]
    assert [delta.finish.reason for delta in last.deltas if delta.finish] == ["shutdown"]


def test_drafts_are_in_the_records_and_their_books_close() -> None:
    guesser = Guesser(1, drafts_max=6, vocab_size=100)
    link = play([[request("a", tokens_max=50), request("b", tokens_max=50)]], speculation=guesser)
    steps = records(link)
    assert sum(step.draft_accepted_tokens for step in steps) > 10
    assert sum(step.draft_rejected_tokens for step in steps) > 10
    for step in steps:
        assert list(step_mismatches(step)) == []
        assert (step.draft_rejected_ns > 0) == (step.draft_rejected_tokens > 0)
        assert step.draft_rejected_ns <= step.parts["compute"]
        assert step.tokens == step.prefill_tokens + step.decode_tokens + step.drafted_tokens
    ended = [record for step in steps for record in step.finished]
    assert [list(request_mismatches(record)) for record in ended] == [[], []]
    assert sum(record.drafted_tokens for record in ended) == sum(step.drafted_tokens for step in steps)


DRAFTING = SchedulerConfig(
    blocks_max=32, block_slots=4, context_max=64, drafts_max=5, draft_blocks_max=32, draft_context_max=64
)


def test_guesses_of_a_draft_model_have_a_part_of_their_own() -> None:
    polls: list[list[Message]] = [[request("a", tokens_max=30), request("b", tokens_max=30)]]
    link = play(polls, speculation=ModelSpeculator(DRAFTING, Always(3)), drafter=DraftModel(fake()))
    plain = play([[request("a", tokens_max=30), request("b", tokens_max=30)]])
    assert [tokens(link, name) for name in ("a", "b")] == [tokens(plain, name) for name in ("a", "b")]
    steps = records(link)
    assert sum(step.draft_accepted_tokens for step in steps) > 10
    for step in steps:
        assert step.imbalance() == 0 and list(step_mismatches(step)) == []
        assert (step.parts["draft"] > 0) == (step.drafted_tokens > 0)
    assert all(step.parts["draft"] == 0 for step in records(plain))


@pytest.mark.parametrize("trouble", ["raises", "no numbers"])
def test_a_draft_model_in_trouble_is_one_line_in_the_log(trouble: str) -> None:
    small = fake()

    def fault(_plan: StepPlan, _piece: Slice) -> str:
        if trouble == "raises":
            raise RuntimeError("foreign library")
        return "NaN"

    small.fault_of = fault
    polls: list[list[Message]] = [[request("a", tokens_max=30)], [], [], [request("b", tokens_max=30)]]
    with capture_logs() as logged:
        link = play(polls, speculation=ModelSpeculator(DRAFTING, Always(3)), drafter=DraftModel(small), steps=80)
    assert [entry["event"] for entry in logged] == [
        "draft_model_failed" if trouble == "raises" else "draft_model_not_a_number"
    ]
    ends = [delta.finish.reason for frame in link.frames for delta in frame.deltas if delta.finish]
    assert ends == ["length", "length"]
    assert sum(step.drafted_tokens for step in records(link)) == 0
