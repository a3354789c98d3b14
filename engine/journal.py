"""
The journal: what went into the core, in order, and what it decided.

Because the core is a function of its messages, of the times and of the device's results, a journal replays an incident
without the device and without the clients, and the first plan that differs names the step where the code changed.
"""

from collections.abc import Iterable

import msgspec

from engine.api import Message
from engine.config import SchedulerConfig
from engine.plan import DraftPlan, DraftResult, StepPlan, StepResult
from engine.scheduler import Scheduler
from engine.speculate import Speculation


class Applied(msgspec.Struct, frozen=True, tag="applied"):
    """A message was taken in."""

    message: Message
    now_ns: int


class Wished(msgspec.Struct, frozen=True, tag="wished"):
    """A draft model was asked."""

    plan: DraftPlan


class Drafted(msgspec.Struct, frozen=True, tag="drafted"):
    """What it guessed was taken in."""

    result: DraftResult


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """A step was chosen."""

    plan: StepPlan
    now_ns: int


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """The device's answer was booked."""

    result: StepResult
    now_ns: int


Entry = Applied | Wished | Drafted | Planned | Committed


class Divergence(msgspec.Struct, frozen=True):
    """The first step whose replayed plan is not the recorded one."""

    recorded: StepPlan | DraftPlan
    replayed: StepPlan | DraftPlan


def replay(
    config: SchedulerConfig, entries: Iterable[Entry], speculation: Speculation | None = None
) -> Divergence | None:
    """Run a journal through a fresh scheduler.  None: every plan came out the same."""
    scheduler = Scheduler(config, speculation=speculation)
    plan, draft_plan = StepPlan(step_id=0, slices=()), DraftPlan()
    for entry in entries:
        match entry:
            case Applied(message, now_ns):
                scheduler.apply(message, now_ns)
            case Wished(wished):
                draft_plan = scheduler.wishes()
                if draft_plan != wished:
                    return Divergence(wished, draft_plan)
            case Drafted(drafts):
                scheduler.drafted(draft_plan, drafts)
            case Planned(recorded, now_ns):
                plan = scheduler.plan(now_ns)
                if plan != recorded:
                    return Divergence(recorded, plan)
            case Committed(result, now_ns):
                scheduler.commit(plan, result, now_ns)
    return None
