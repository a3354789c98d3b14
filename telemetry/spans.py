"""
The span tree of a request, built once it has ended.

    POST /v1/chat/completions          SERVER
      chat {model}                     INTERNAL, the only one with gen_ai.*
        parse, tokenize, dispatch ...  one INTERNAL span per state: touching, sequential, summing to the request

A request passes through some states many times (decode, stalled, decode, ...).  All time in a state becomes one span,
and the spans are laid end to end in the order of a life: a bounded number of spans whatever the output length, and a
critical path that is true.  This module knows no SDK; `telemetry.export` does.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from telemetry import clock, names
from telemetry.live import Attribute, LiveRequest, TraceContext
from telemetry.records import RequestRecord
from telemetry.redact import clean_text
from telemetry.tail import is_fault
from telemetry.vocabulary import FINISHED_OUTCOMES, NS_PER_S, OBSERVING_ROUTES, OTHER, ROUTES, STATES

SPANS_MAX = 60
PHASES_MAX = SPANS_MAX - 3  # The request, its generation, and what no state accounts for.
PATH_CHARS_MAX = 200
UNACCOUNTED = "unaccounted"
"""The phase of time that no state claims: a book that does not close is shown, not hidden."""


class Link(NamedTuple):
    """A span of another trace that has to do with this one."""

    trace_id: str
    span_id: str


class SlowestSteps(NamedTuple):
    """Of those that a request was in, the slowest first."""

    names: tuple[str, ...]
    longest_ns: int
    links: tuple[Link, ...]
    """To those that have traces."""

    def attributes(self) -> dict[str, Attribute]:
        """For the request's generation."""
        if not self.names:
            return {}
        return {names.SLOWEST_STEPS: self.names, names.SLOWEST_STEP_NS: self.longest_ns}


NO_STEPS = SlowestSteps((), 0, ())


class SpanData(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One span, its times in nanoseconds of the wall clock."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    parent_is_remote: bool
    is_server: bool
    started_ns: int
    ended_ns: int
    attributes: dict[str, Attribute]
    failed: bool
    trace_state: str
    links: tuple[Link, ...] = ()


def wall_offset_ns() -> int:
    """What turns a stamp of `telemetry.clock` into time of day, now."""
    return time.time_ns() - clock.now_ns()


def request_spans(
    record: RequestRecord,
    live: LiveRequest | None,
    *,
    offset_ns: int,
    because: str = "",
    slowest: SlowestSteps = NO_STEPS,
) -> list[SpanData]:
    """
    The tree of one ended request, root first; empty where the caller has decided not to sample it.

    Args:
        record: what it came to.
        live: what was known of it in flight, if it was announced.
        offset_ns: from our clock to the time of day.
        because: why it is kept.
        slowest: the steps that it waited for longest.
    """
    trace = trace_of(record, live)
    if not trace.sampled or record.route in OBSERVING_ROUTES:
        return []
    failed = is_fault(record)
    started_ns = record.accepted_ns + offset_ns
    root = SpanData(
        name=_server_name(record, live),
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        parent_is_remote=True,
        is_server=True,
        started_ns=started_ns,
        ended_ns=record.finished_ns + offset_ns,
        attributes=_server_attributes(record, live, failed=failed, because=because),
        failed=failed,
        trace_state=trace.state,
    )
    spans = [root]
    operation = names.OPERATIONS.get(record.route)
    if operation is not None:
        attributes = _gen_ai_attributes(record, live, operation)
        name = f"{operation} {record.model}".rstrip()
        generation = child(root, name, root.started_ns, root.ended_ns, attributes | slowest.attributes(), failed)
        spans.append(msgspec.structs.replace(generation, links=slowest.links))
    spans += _phase_spans(record, spans[-1], started_ns)
    assert len(spans) <= SPANS_MAX
    return spans


def phases(record: RequestRecord) -> list[tuple[str, int]]:
    """The states of a life in their order, with nanoseconds; they sum to the life whatever the book says."""
    return laid_out(record.states, STATES, record.finished_ns - record.accepted_ns)


def laid_out(spent: Mapping[str, int], names: Sequence[str], whole_ns: int) -> list[tuple[str, int]]:
    """Times by name in the order of `names`; they sum to the whole, whatever the book says."""
    order = {name: position for position, name in enumerate(names)}
    known = sorted(
        ((name, spent_ns) for name, spent_ns in spent.items() if spent_ns > 0),
        key=lambda phase: (order.get(phase[0], len(order)), phase[0]),
    )
    if len(known) > PHASES_MAX:  # Nobody of ours makes up names; a bound all the same.
        known = [phase for phase in known if phase[0] in order]
    left_ns = whole_ns
    laid: list[tuple[str, int]] = []
    for state, spent_ns in known:
        laid.append((state, min(spent_ns, left_ns)))
        left_ns -= laid[-1][1]
    return [phase for phase in [*laid, (UNACCOUNTED, left_ns)] if phase[1] > 0]


def trace_of(record: RequestRecord, live: LiveRequest | None) -> TraceContext:
    """Where a request sits; for a record that nobody announced, in a trace of its own."""
    if live is not None:
        return live.trace
    return TraceContext(trace_id=record.trace_id or secrets.token_hex(16), span_id=secrets.token_hex(8))


def child(
    parent: SpanData, name: str, started_ns: int, ended_ns: int, attributes: dict[str, Attribute], failed: bool = False
) -> SpanData:
    """A span under `parent`."""
    return SpanData(
        name=name,
        trace_id=parent.trace_id,
        span_id=secrets.token_hex(8),
        parent_id=parent.span_id,
        parent_is_remote=False,
        is_server=False,
        started_ns=started_ns,
        ended_ns=ended_ns,
        attributes=attributes,
        failed=failed,
        trace_state=parent.trace_state,
    )


def _phase_spans(record: RequestRecord, parent: SpanData, started_ns: int) -> list[SpanData]:
    spans: list[SpanData] = []
    for state, spent_ns in phases(record):
        attributes: dict[str, Attribute] = {names.PHASE: state, names.PHASE_NS: spent_ns}
        spans.append(child(parent, state, started_ns, started_ns + spent_ns, attributes))
        started_ns += spent_ns
    return spans


def _is_known(route: str) -> bool:
    return route in ROUTES and route != OTHER


def _server_name(record: RequestRecord, live: LiveRequest | None) -> str:
    """The conventions want the method alone where no route was found: a raw path has no bound."""
    method = live.method if live else "POST"
    return f"{method} {record.route}" if _is_known(record.route) else method


def _server_attributes(
    record: RequestRecord, live: LiveRequest | None, *, failed: bool, because: str
) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        names.HTTP_REQUEST_METHOD: live.method if live else "POST",
        names.HTTP_RESPONSE_STATUS_CODE: record.status,
        names.URL_PATH: clean_text((live.path if live else "") or record.route)[:PATH_CHARS_MAX],
        names.REQUEST_ID: record.request_id,
        names.OUTCOME: record.outcome,
        names.LAYOUT: names.COALESCED,
    }
    if because:
        attributes[names.SAMPLED_BECAUSE] = because
    if _is_known(record.route):
        attributes[names.HTTP_ROUTE] = record.route
    if record.tenant:
        attributes[names.TENANT] = record.tenant
    if failed:
        attributes[names.ERROR_TYPE] = str(record.status) if record.status >= 500 else record.outcome
    if live is not None and live.error:
        attributes[names.ERROR_CODE] = live.error
    return attributes


def _engine_attributes(record: RequestRecord) -> dict[str, Attribute]:
    """What an upstream cannot tell us."""
    readings = {"at_admission": record.kv_at_admission, "worst": record.kv_worst, "at_end": record.kv_at_end}
    kv: dict[str, Attribute] = {}
    for when, reading in readings.items():
        if reading is not None:
            kv[names.KV_UTILIZATION.format(when=when)] = reading.utilization
            kv[names.KV_TOKEN_OCCUPANCY.format(when=when)] = reading.token_occupancy
            kv[names.KV_INTERNAL_FRAGMENTATION.format(when=when)] = reading.internal_fragmentation
    return kv | {
        names.ENGINE_NS: record.engine_ns,
        names.INTERCONNECT_WAIT_MAX_NS: record.interconnect_wait_max_ns,
        names.PREEMPTIONS: record.preemptions,
        names.STEPS: record.steps,
        names.COMPUTED_TOKENS: record.computed_tokens,
        names.RECOMPUTED_TOKENS: record.recomputed_tokens,
        names.DRAFTED_TOKENS: record.drafted_tokens,
        names.DRAFT_ACCEPTED_TOKENS: record.draft_accepted_tokens,
        names.DRAFT_REJECTED_TOKENS: record.draft_rejected_tokens,
        names.KV_BLOCK_SECONDS: record.kv_block_ns / NS_PER_S,
        names.INTERCONNECT_WAIT_NS: record.interconnect_wait_ns,
        names.INTERCONNECT_TRANSFER_NS: record.interconnect_transfer_ns,
    }


def _gen_ai_attributes(record: RequestRecord, live: LiveRequest | None, operation: str) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        names.GEN_AI_OPERATION_NAME: operation,
        names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
        names.GEN_AI_REQUEST_MODEL: record.model,
        names.GEN_AI_REQUEST_STREAM: record.stream,
        names.GEN_AI_RESPONSE_ID: record.request_id,
        names.GEN_AI_RESPONSE_MODEL: record.model,
        names.GEN_AI_USAGE_INPUT_TOKENS: record.prompt_tokens,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: record.output_tokens,
        names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: record.cached_tokens,
        names.TOKEN_GAP_MAX_SECONDS: record.gap_max_ns / NS_PER_S,
        names.GC_PAUSE_NS: record.gc_pause_ns,
        names.LOOP_LAG_NS: record.loop_lag_ns,
        names.STARVED_NS: record.starved_ns,
        names.UNREAD_NS: record.unread_ns,
        names.REPEATED_TOKENS: record.repeated_tokens,
    }
    if record.routing:
        attributes |= {names.REPLICA: record.replica, names.ROUTING: record.routing}
    if record.promised_tokens is not None:
        attributes[names.PROMISED_TOKENS] = record.promised_tokens
    if record.upstream:
        attributes |= {names.UPSTREAM: record.upstream, names.USAGE_ESTIMATED: record.usage_estimated}
    else:
        attributes |= _engine_attributes(record)
    if record.choices != 1:
        attributes[names.GEN_AI_REQUEST_CHOICE_COUNT] = record.choices
    if record.stream and record.first_token_ns > 0:
        attributes[names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = record.first_token_ns / NS_PER_S
    if record.outcome in FINISHED_OUTCOMES:
        attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] = (record.outcome,) * record.choices
    else:
        attributes[names.ERROR_TYPE] = (live.error if live else "") or record.outcome
    for parameter, name in names.REQUEST_PARAMETERS.items():
        if live is not None and parameter in live.parameters:
            attributes[name] = live.parameters[parameter]
    return attributes
