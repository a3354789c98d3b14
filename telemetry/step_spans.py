"""
The trace of one engine step.

    engine step                         from its plan on; links to the requests that it served
      plan, batch, compute, commit ...  touching, sequential, summing to it

A step may serve many requests and a request is in thousands of steps, so neither can be a child of the other.
"""

import secrets

from telemetry import names
from telemetry.live import Attribute
from telemetry.records import STEP_PARTS, StepRecord
from telemetry.spans import SPANS_MAX, Link, SpanData, child, laid_out

BEFORE = ("publish", "idle")
"""Parts that are over when a step begins to have something to do."""


def step_name(step: StepRecord) -> str:
    """Its name among all steps that this process hears of; an engine that is started anew begins to count again."""
    return f"{step.replica}/{step.step_id}"


def busy_ns(step: StepRecord) -> int:
    """How long the step held up those that it served."""
    return step.step_ns - sum(step.parts.get(part, 0) for part in BEFORE)


def step_spans(step: StepRecord, links: tuple[Link, ...], *, offset_ns: int, because: str) -> list[SpanData]:
    """The tree of one step, root first, in a trace of its own."""
    started_ns = step.ended_ns - busy_ns(step) + offset_ns
    root = SpanData(
        name=names.ENGINE_STEP,
        trace_id=secrets.token_hex(16),
        span_id=secrets.token_hex(8),
        parent_id="",
        parent_is_remote=False,
        is_server=False,
        started_ns=started_ns,
        ended_ns=step.ended_ns + offset_ns,
        attributes=_attributes(step, because),
        failed=False,
        trace_state="",
        links=links,
    )
    spans = [root]
    parts = {part: spent_ns for part, spent_ns in step.parts.items() if part not in BEFORE}
    for part, spent_ns in laid_out(parts, STEP_PARTS, busy_ns(step)):
        attributes: dict[str, Attribute] = {names.PHASE: part, names.PHASE_NS: spent_ns}
        if part == "compute":
            attributes |= {names.COMPUTE_NS.format(part=name): ns for name, ns in step.compute_parts.items()}
        spans.append(child(root, part, started_ns, started_ns + spent_ns, attributes))
        started_ns += spent_ns
    assert len(spans) <= SPANS_MAX
    return spans


def _attributes(step: StepRecord, because: str) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        names.STEP_ID: step.step_id,
        names.REPLICA: step.replica,
        names.SAMPLED_BECAUSE: because,
        names.STEP_KV_UTILIZATION: step.kv.utilization,
        names.STEP_KV_TOKEN_OCCUPANCY: step.kv.token_occupancy,
        names.STEP_KV_INTERNAL_FRAGMENTATION: step.kv.internal_fragmentation,
        names.INTERCONNECT_KIND: step.interconnect.kind,
        names.INTERCONNECT_WAIT_NS: step.interconnect.wait_ns,
        names.INTERCONNECT_TRANSFER_NS: step.interconnect.transfer_ns,
        names.INTERCONNECT_STRAGGLER: step.interconnect.straggler,
    }
    attributes |= {names.STEP_BEFORE_NS.format(part=part): step.parts.get(part, 0) for part in BEFORE}
    return attributes | {name: getattr(step, field) for field, name in names.STEP_COUNTS.items()}
