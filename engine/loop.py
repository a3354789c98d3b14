"""
The engine's loop: the only place where the clock, the socket, the scheduler and the device meet.

    publish the last step | wait | take messages, plan | run | commit   -> one StepRecord, whose parts sum to the step

A draft model, where there is one, guesses before the plan is made: it is asked what the scheduler wishes, and what
it has guessed is handed to the scheduler as messages are.
"""

from collections.abc import Callable
from typing import Protocol

import structlog

from engine.api import Message, StepFrame
from engine.device import Device, DeviceLost, Drafting
from engine.outcome import Outcome
from engine.plan import DraftPlan, DraftResult, SliceResult, StepPlan, StepResult
from engine.scheduler import Scheduler
from telemetry.clock import now_ns
from telemetry.disturbance import Disturbing, Undisturbed
from telemetry.records import STEP_PARTS, StepRecord

STARVED_POLL_S = 0.001  # work, but nothing could be planned: ask again soon, without spinning

log = structlog.get_logger("engine")


class Link(Protocol):
    """The way to the gateways: `engine.server.Server`, or a test's own."""

    def poll(self, timeout_s: float | None) -> list[Message]:
        """What has arrived, waiting up to `timeout_s` for it (None: for ever)."""
        ...

    def publish(self, frame: StepFrame) -> list[Message]:
        """Tell everybody; returns what their absence means for us."""
        ...


class Recorder(Protocol):
    """
    Is told what goes into the core and what comes out, as it happens: `engine.recorder.Journal`.

    It raises nothing, and what it takes is a part of the step.
    """

    def applied(self, message: Message, now_ns: int) -> None:
        """The scheduler has taken a message in."""
        ...

    def planned(self, plan: StepPlan, now_ns: int) -> None:
        """The scheduler has chosen a step, which is now computed."""
        ...

    def committed(self, result: StepResult, outcome: Outcome, now_ns: int) -> None:
        """The scheduler has booked it: nothing is in flight."""
        ...

    def stopped(self, now_ns: int) -> None:
        """The scheduler has ended everything."""
        ...


class NoRecorder:
    """Implements `Recorder`: forgets."""

    def applied(self, message: Message, now_ns: int) -> None:
        """Nothing."""

    def planned(self, plan: StepPlan, now_ns: int) -> None:
        """Nothing."""

    def committed(self, result: StepResult, outcome: Outcome, now_ns: int) -> None:
        """Nothing."""

    def stopped(self, now_ns: int) -> None:
        """Nothing."""


class Loop:
    """Runs steps until it is told to stop."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        link: Link,
        *,
        drafter: Drafting | None = None,
        recorder: Recorder | None = None,
        replica: int = 0,
        clock: Callable[[], int] = now_ns,
        disturbances: Disturbing | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._device = device
        self._link = link
        self._drafter = drafter
        self._recorder = recorder or NoRecorder()
        self._drafts_doubted = False  # somebody has been told that its numbers were none
        self._replica = replica
        self._clock = clock
        self._disturbances = disturbances or Undisturbed()
        self._stopping = False
        self._starved = False
        self._frame: StepFrame | None = None  # of the step before, not yet published
        self._parts = dict.fromkeys(STEP_PARTS, 0)
        self._opened_ns = clock()  # where the record before ended
        self._marked_ns = self._opened_ns  # up to here `_parts` accounts for all time

    def stop(self) -> None:
        """Finish the step in flight, end every request, and leave `run`; safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Serve until `stop`.  Raises DeviceLost: nobody can be served here any more, and others must hear of it."""
        while not self._stopping:
            self.step()
        now_ns = self._clock()
        self._scheduler.stop(now_ns)
        self._recorder.stopped(now_ns)
        self._advance()
        self._publish()

    def step(self) -> None:
        """Publish, take what has arrived, and compute one step if there is any work."""
        messages = self._publish()
        self._spend("publish")
        busy = self._scheduler.has_work or bool(messages)
        timeout_s = (STARVED_POLL_S if self._starved else 0.0) if busy else None
        messages += self._link.poll(timeout_s)
        self._spend("plan" if timeout_s == 0.0 else "idle")
        if not busy:
            self._disturbances.skip()
        for message in messages:
            self._scheduler.apply(message, self._marked_ns)
            self._recorder.applied(message, self._marked_ns)
        if self._scheduler.has_work or self._scheduler.has_news:
            self._advance()

    def _advance(self) -> None:
        """Plan, run, commit, and write it down.  A step without slices only carries news of the door."""
        if self._drafter is not None:
            self._draft(self._drafter)
        planned_ns = self._clock()
        plan = self._scheduler.plan(planned_ns)
        self._recorder.planned(plan, planned_ns)
        self._starved = not plan.slices
        self._spend("plan")
        result = self._compute(plan)
        away = {
            "batch": result.batch_ns,
            "sample": result.sample_ns,
            "interconnect_wait": result.interconnect.wait_ns,
            "interconnect_transfer": result.interconnect.transfer_ns,
            "bubble": result.interconnect.bubble_ns,
        }
        for part, spent_ns in away.items():
            self._parts[part] += spent_ns
        self._parts["compute"] -= sum(away.values())
        self._spend("compute")
        outcome = self._scheduler.commit(plan, result, self._marked_ns)
        self._recorder.committed(result, outcome, self._marked_ns)
        self._spend("commit")
        if plan.slices or outcome.deltas or outcome.finished or outcome.prefixes:
            self._close(plan, result, outcome)

    def _draft(self, drafter: Drafting) -> None:
        """Ask the draft model, if the scheduler wishes; whatever befalls it, no request fails."""
        wishes = self._scheduler.wishes()
        self._spend("plan")
        if not wishes.slices:
            return
        try:
            result = drafter.draft(wishes)
        except Exception:  # as in `_compute`
            log.exception("draft_model_failed", consequence="no drafts from it until the engine is started again")
            result = DraftResult(failed=True)
        if not result.failed and not self._drafts_doubted and _falls_short(wishes, result):
            self._drafts_doubted = True
            log.warning("draft_model_not_a_number", consequence="no drafts from it for such sequences")
        self._spend("draft")
        self._scheduler.drafted(wishes, result)

    def _spend(self, part: str) -> None:
        """Everything since the last mark was `part`."""
        now = self._clock()
        self._parts[part] += now - self._marked_ns
        self._marked_ns = now

    def _close(self, plan: StepPlan, result: StepResult, outcome: Outcome) -> None:
        """Write the step's record.  It begins where the last one ended, so nothing falls between two records."""
        disturbed = self._disturbances.take()
        record = StepRecord(
            step_id=plan.step_id,
            replica=self._replica,
            ended_ns=self._marked_ns,
            step_ns=self._marked_ns - self._opened_ns,
            parts=self._parts,
            compute_parts=result.compute_parts,
            tokens=plan.tokens,
            prefill_tokens=outcome.prefill_tokens,
            recompute_tokens=outcome.recompute_tokens,
            decode_tokens=outcome.decode_tokens,
            emitted_tokens=outcome.emitted_tokens,
            sequences=len(plan.slices),
            running=outcome.load.running,
            waiting=outcome.load.waiting,
            preemptions=outcome.preemptions,
            cached_tokens=outcome.cached_tokens,
            evictions=outcome.evictions,
            drafted_tokens=outcome.drafted_tokens,
            draft_accepted_tokens=outcome.draft_accepted_tokens,
            draft_rejected_tokens=outcome.drafted_tokens - outcome.draft_accepted_tokens,
            draft_rejected_ns=int(outcome.draft_rejected_share * max(0, self._parts["compute"])),
            interconnect=result.interconnect,
            slices=tuple((piece.sequence, len(piece.tokens)) for piece in plan.slices),
            requests=outcome.requests,
            served_ns=outcome.served_ns,
            waits=outcome.waits,
            gc_pause_ns=disturbed.gc_pause_ns,
            starved_ns=disturbed.starved_ns,
            memory=disturbed.memory,
            kv=outcome.kv,
            finished=outcome.finished,
        )
        self._frame = StepFrame(deltas=outcome.deltas, step=record, load=outcome.load, prefixes=outcome.prefixes)
        self._parts = dict.fromkeys(STEP_PARTS, 0)
        self._opened_ns = self._marked_ns

    def _publish(self) -> list[Message]:
        frame, self._frame = self._frame, None
        return self._link.publish(frame) if frame is not None else []

    def _compute(self, plan: StepPlan) -> StepResult:
        """Run the plan; if it blows up, run each slice by itself, so that only the guilty one fails."""
        if not plan.slices:
            return StepResult(step_id=plan.step_id, slices=())
        try:
            return self._device.run(plan)
        except DeviceLost:
            raise
        except Exception:  # The device is a foreign library: anything may come, and nobody else may suffer.
            log.exception("step_failed", step_id=plan.step_id, sequences=len(plan.slices))
            answers = tuple(self._run_alone(plan.step_id, index, plan) for index in range(len(plan.slices)))
            return StepResult(step_id=plan.step_id, slices=answers)

    def _run_alone(self, step_id: int, index: int, plan: StepPlan) -> SliceResult:
        try:
            return self._device.run(StepPlan(step_id=step_id, slices=(plan.slices[index],))).slices[0]
        except DeviceLost:
            raise
        except Exception:
            log.exception("slice_failed", step_id=step_id, sequence=plan.slices[index].sequence)
            return SliceResult(fault="The engine failed to compute this request.")


def _falls_short(plan: DraftPlan, result: DraftResult) -> bool:
    return any(len(drafts) < count for drafts, count in zip(result.drafts, plan.counts, strict=True))
