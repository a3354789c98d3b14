"""
The metric catalogue: one table of everything that `/metrics` says, with the way each number is read from records.

`join` says what becomes of the numbers of several gateway workers (telemetry.numbers).

Names follow Prometheus: base units, `_total` on counters.  Durations are kept in integer nanoseconds and divided once,
at the scrape, so sums are exact.  Dashboards and alerts are rendered from this table, which is why it is in one file.
"""
# long: one table, and people look for a metric in one place.

from collections.abc import Callable
from typing import Literal

from telemetry.records import Exchange, RequestRecord, StepRecord
from telemetry.vocabulary import (
    FAULTS,
    FINISHED_OUTCOMES,
    GENERATING_ROUTES,
    KV_PLACES,
    LATENCY_BUCKETS_S,
    MEMORIES,
    MICROS,
    NS_PER_S,
    OBSERVING_ROUTES,
    PROMISES,
    STEP_BUCKETS_S,
    TOKEN_BUCKETS,
    UPSTREAM_RESULTS,
    WAITING_STATES,
    LimitsView,
    Metric,
    Point,
    Points,
    View,
)


def _status_class(status: int) -> str:
    return f"{status // 100}xx" if 100 <= status <= 599 else "none"


def _e2e_ns(record: RequestRecord) -> int:
    return record.finished_ns - record.accepted_ns


def _route_if(condition: bool, record: RequestRecord, amount: int) -> Points:
    return [((record.route,), amount)] if condition else []


def _token_gap(record: RequestRecord) -> Points:
    gap_ns = record.token_gap_mean_ns()
    return [] if gap_ns is None else [((record.route,), gap_ns)]


def _states(record: RequestRecord) -> Points:
    """Of who is served: those who look do so as long and as often as they like, which is nobody's latency."""
    if record.route in OBSERVING_ROUTES:
        return []
    return [((state,), spent_ns) for state, spent_ns in record.states.items()]


def _was_admitted(record: RequestRecord) -> bool:
    """Whether the engine began with it: only then was the prefix cache asked."""
    return not record.upstream and record.computed_tokens + record.cached_tokens > 0


def _here(record: RequestRecord, tokens: int) -> int:
    """Tokens of our engines: what upstreams say of theirs has a metric of its own."""
    return 0 if record.upstream else tokens


def _of_upstream(record: RequestRecord) -> Points:
    if not record.upstream:
        return []
    counts = {"prompt": record.prompt_tokens, "cached": record.cached_tokens, "output": record.output_tokens}
    return [((record.upstream, usage), count) for usage, count in counts.items()]


def _promises(record: RequestRecord) -> Points:
    if record.promised_tokens is None or not _was_admitted(record):
        return []
    kept = min(record.promised_tokens, record.cached_tokens)
    amounts = (kept, record.promised_tokens - kept, record.cached_tokens - kept)
    return [((promise,), amount) for promise, amount in zip(PROMISES, amounts, strict=True)]


def _if_limited(record: RequestRecord, *points: Point) -> Points:
    return points if record.reserved_tokens else ()


def _gen_ai(record: RequestRecord, amount: int | None) -> Points:
    if record.route not in GENERATING_ROUTES or amount is None:
        return []
    operation = "chat" if record.route == GENERATING_ROUTES[0] else "text_completion"
    return [((operation, "pellucid", record.model, record.outcome), amount)]


def _latency(name: str, help: str, labels: tuple[str, ...], read: Callable[[RequestRecord], Points]) -> Metric:
    return Metric(
        name=name,
        kind="histogram",
        help=help,
        unit="seconds",
        labels=labels,
        buckets=LATENCY_BUCKETS_S,
        divisor=NS_PER_S,
        of_request=read,
        exemplars=True,
        zeros=labels == ("route",),
        zeros_of={"route": GENERATING_ROUTES} if labels == ("route",) else {},
    )


def _request_counter(name: str, help: str, amount: Callable[[RequestRecord], int]) -> Metric:
    return Metric(name=name, kind="counter", help=help, of_request=lambda r: [((), amount(r))], zeros=True)


_GEN_AI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "outcome")

REQUEST_METRICS = (
    Metric(
        name="pellucid_requests_total",
        kind="counter",
        help="Requests that have ended, whatever the end.",
        labels=("route", "outcome", "status_class"),
        of_request=lambda r: [((r.route, r.outcome, _status_class(r.status)), 1)],
        zeros=True,
        zeros_of={"route": GENERATING_ROUTES, "outcome": FINISHED_OUTCOMES + FAULTS, "status_class": ("2xx", "5xx")},
    ),
    _latency(
        "pellucid_request_duration_seconds",
        "From the acceptance of a request to its last byte.",
        ("route", "outcome"),
        lambda r: [((r.route, r.outcome), _e2e_ns(r))],
    ),
    _latency(
        "pellucid_request_time_to_first_token_seconds",
        "From the acceptance of a request to its first output token.",
        ("route",),
        lambda r: _route_if(r.first_token_ns > 0, r, r.first_token_ns),
    ),
    _latency(
        "pellucid_request_time_per_output_token_seconds",
        "Mean time between the output tokens of one request, after the first.",
        ("route",),
        _token_gap,
    ),
    _latency(
        "pellucid_request_token_gap_max_seconds",
        "Longest time between two output tokens of one request: the pause that a reader notices.",
        ("route",),
        lambda r: _route_if(r.gap_max_ns > 0, r, r.gap_max_ns),
    ),
    Metric(
        name="pellucid_request_state_seconds_total",
        kind="counter",
        help="Time that ended requests have spent in each state; they sum to durations.  Without those who only look.",
        unit="seconds",
        labels=("state",),
        divisor=NS_PER_S,
        of_request=_states,
        zeros=True,
    ),
    Metric(
        name="pellucid_request_first_token_state_seconds_total",
        kind="counter",
        help="The same up to the first token; the states sum to the times to first token.",
        unit="seconds",
        labels=("state",),
        divisor=NS_PER_S,
        of_request=lambda r: [((state,), spent_ns) for state, spent_ns in r.first_token_states.items()],
        zeros=True,
    ),
    _request_counter(
        "pellucid_request_repeated_tokens_total",
        "Prompt tokens that an earlier prompt began with, too: what a prefix cache of any size could find.",
        lambda r: r.repeated_tokens,
    ),
    Metric(
        name="pellucid_degenerate_outputs_total",
        kind="counter",
        help="Requests that failed because the model's output was none: a broken checkpoint, or too coarse numbers.",
        labels=("kind",),
        of_request=lambda r: [((r.degenerate,), 1)] if r.degenerate else [],
        zeros=True,
    ),
    Metric(
        name="pellucid_request_kv_block_seconds_total",
        kind="counter",
        help="KV blocks held by ended requests, times the time for which they held them.",
        unit="seconds",
        divisor=NS_PER_S,
        of_request=lambda r: [((), r.kv_block_ns)],
        zeros=True,
    ),
    Metric(
        name="pellucid_request_prompt_tokens",
        kind="histogram",
        help="Prompt tokens of a request that reached the engine.",
        labels=("route",),
        buckets=TOKEN_BUCKETS,
        of_request=lambda r: _route_if(r.prompt_tokens > 0, r, r.prompt_tokens),
    ),
    Metric(
        name="pellucid_request_output_tokens",
        kind="histogram",
        help="Output tokens of a request that reached the engine.",
        labels=("route",),
        buckets=TOKEN_BUCKETS,
        of_request=lambda r: _route_if(r.prompt_tokens > 0, r, r.output_tokens),
    ),
    Metric(
        name="pellucid_prompt_tokens_total",
        kind="counter",
        help="Prompt tokens of ended requests to our engines, computed or found in the prefix cache.",
        labels=("source",),
        of_request=lambda r: [(("computed",), r.computed_tokens), (("cached",), _here(r, r.cached_tokens))],
        zeros=True,
    ),
    _request_counter(
        "pellucid_recomputed_tokens_total",
        "Tokens paid again after a preemption; not a cache hit, and not in the prompt tokens.",
        lambda r: r.recomputed_tokens,
    ),
    _request_counter("pellucid_output_tokens_total", "Output tokens of ended requests.", lambda r: r.output_tokens),
    Metric(
        name="pellucid_draft_tokens_total",
        kind="counter",
        help="Tokens guessed ahead for ended requests; accepted and rejected sum to the drafted ones.",
        labels=("verdict",),
        of_request=lambda r: [(("accepted",), r.draft_accepted_tokens), (("rejected",), r.draft_rejected_tokens)],
        zeros=True,
    ),
    Metric(
        name="pellucid_prefix_cache_query_tokens_total",
        kind="counter",
        help="Prompt tokens that were looked up in the prefix cache.",
        of_request=lambda r: [((), r.prompt_tokens)] if _was_admitted(r) else [],
        zeros=True,
    ),
    _request_counter(
        "pellucid_prefix_cache_hit_tokens_total",
        "Prompt tokens that were found there; divide by the queries for the hit rate.",
        lambda r: _here(r, r.cached_tokens),
    ),
    Metric(
        name="pellucid_upstream_tokens_total",
        kind="counter",
        help="Tokens of ended requests as the upstream says, or estimated; prompt tokens include the cached ones.",
        labels=("upstream", "usage"),
        of_request=_of_upstream,
    ),
    Metric(
        name="pellucid_routed_requests_total",
        kind="counter",
        help="Requests that were given to a replica, by why it was that one.",
        labels=("routing",),
        of_request=lambda r: [((r.routing,), 1)] if r.routing else [],
        zeros=True,
    ),
    Metric(
        name="pellucid_prefix_index_tokens_total",
        kind="counter",
        help="Prompt tokens of requests that the prefix index was asked for: cached as it had promised, promised and "
        "not cached, cached and not promised (it knows beginnings of whole 64 tokens).",
        labels=("promise",),
        of_request=_promises,
        zeros=True,
    ),
    Metric(
        name="pellucid_limit_tokens_total",
        kind="counter",
        help="Tokens of requests that limits hold: reserved before they run, and charged instead at their end.",
        labels=("stage",),
        of_request=lambda r: _if_limited(r, (("reserved",), r.reserved_tokens), (("charged",), r.charged_tokens)),
        zeros=True,
    ),
    Metric(
        name="pellucid_limit_spend_total",
        kind="counter",
        help="What those tokens cost, in the currency of the prices.",
        divisor=MICROS,
        of_request=lambda r: _if_limited(r, ((), r.charged_micros)),
        zeros=True,
    ),
    _latency(
        "gen_ai_server_request_duration_seconds",
        "OpenTelemetry gen_ai.server.request.duration, all outcomes included.",
        _GEN_AI_LABELS,
        lambda r: _gen_ai(r, _e2e_ns(r)),
    ),
    _latency(
        "gen_ai_server_time_to_first_token_seconds",
        "OpenTelemetry gen_ai.server.time_to_first_token.",
        _GEN_AI_LABELS,
        lambda r: _gen_ai(r, r.first_token_ns or None),
    ),
    _latency(
        "gen_ai_server_time_per_output_token_seconds",
        "OpenTelemetry gen_ai.server.time_per_output_token.",
        _GEN_AI_LABELS,
        lambda r: _gen_ai(r, r.token_gap_mean_ns()),
    ),
)


def _of_replica(amount: Callable[[StepRecord], int]) -> Callable[[StepRecord], Points]:
    return lambda step: [((str(step.replica),), amount(step))]


def _step_counter(name: str, help: str, amount: Callable[[StepRecord], int]) -> Metric:
    return Metric(name=name, kind="counter", help=help, labels=("replica",), join="most", of_step=_of_replica(amount))


def _exchange_counter(name: str, help: str, amount: Callable[[Exchange], int], *, unit: str = "") -> Metric:
    return Metric(
        name=name,
        kind="counter",
        help=help,
        unit=unit,
        labels=("replica", "exchange"),
        join="most",
        divisor=NS_PER_S if unit == "seconds" else 1,
        of_step=lambda step: [
            ((str(step.replica), name), amount(one)) for name, one in step.interconnect.exchanges.items()
        ],
    )


def _step_work(step: StepRecord) -> Points:
    counts = {
        "prefill": step.prefill_tokens,
        "recompute": step.recompute_tokens,
        "decode": step.decode_tokens,
        "draft": step.drafted_tokens,
    }
    counts["abandoned"] = max(0, step.tokens - sum(counts.values()))  # of requests that ended while they were computed
    return [((str(step.replica), work), count) for work, count in counts.items()]


STEP_METRICS = (
    _step_counter("pellucid_engine_steps_total", "Engine steps.", lambda step: 1),
    Metric(
        name="pellucid_engine_step_busy_seconds",
        kind="histogram",
        help="Time of one engine step without the idle time before it.",
        unit="seconds",
        labels=("replica",),
        join="most",
        buckets=STEP_BUCKETS_S,
        divisor=NS_PER_S,
        of_step=_of_replica(lambda step: step.step_ns - step.parts.get("idle", 0)),
    ),
    Metric(
        name="pellucid_engine_step_part_seconds_total",
        kind="counter",
        help="Time of the engine by part of its steps; the parts sum to the engine's life.",
        unit="seconds",
        labels=("replica", "part"),
        join="most",
        divisor=NS_PER_S,
        of_step=lambda step: [((str(step.replica), part), spent_ns) for part, spent_ns in step.parts.items()],
    ),
    Metric(
        name="pellucid_engine_compute_part_seconds_total",
        kind="counter",
        help="Where the compute part of steps went, as far as the decoder can tell.",
        unit="seconds",
        labels=("replica", "part"),
        join="most",
        divisor=NS_PER_S,
        of_step=lambda step: [((str(step.replica), part), spent_ns) for part, spent_ns in step.compute_parts.items()],
    ),
    Metric(
        name="pellucid_engine_tokens_total",
        kind="counter",
        help="Rows computed by engine steps, by the reason for computing them.",
        labels=("replica", "work"),
        join="most",
        of_step=_step_work,
    ),
    _step_counter(
        "pellucid_engine_emitted_tokens_total",
        "Output tokens that engine steps have produced.",
        lambda step: step.emitted_tokens,
    ),
    _step_counter(
        "pellucid_engine_cached_tokens_total",
        "Prompt tokens found in the prefix cache at admission.",
        lambda step: step.cached_tokens,
    ),
    Metric(
        name="pellucid_engine_draft_tokens_total",
        kind="counter",
        help="Tokens guessed ahead by engine steps, by what came of them.",
        labels=("replica", "verdict"),
        join="most",
        of_step=lambda step: [
            ((str(step.replica), "accepted"), step.draft_accepted_tokens),
            ((str(step.replica), "rejected"), step.draft_rejected_tokens),
        ],
    ),
    Metric(
        name="pellucid_engine_draft_rejected_seconds_total",
        kind="counter",
        help="Compute time that went into rejected drafts, by the engine's model of what a row costs.",
        unit="seconds",
        labels=("replica",),
        join="most",
        divisor=NS_PER_S,
        of_step=_of_replica(lambda step: step.draft_rejected_ns),
    ),
    Metric(
        name="pellucid_engine_sequences_per_step",
        kind="histogram",
        help="Sequences that one step served.",
        labels=("replica",),
        join="most",
        buckets=(0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0),
        of_step=_of_replica(lambda step: step.sequences),
    ),
    _step_counter(
        "pellucid_engine_preemptions_total",
        "Sequences whose KV was taken away for others.",
        lambda step: step.preemptions,
    ),
    _step_counter(
        "pellucid_engine_evictions_total", "Cached KV blocks given up for new tokens.", lambda step: step.evictions
    ),
    Metric(
        name="pellucid_engine_gc_pause_seconds_total",
        kind="counter",
        help="Garbage collection of the engine; overlaps with the parts of its steps.",
        unit="seconds",
        labels=("replica",),
        join="most",
        divisor=NS_PER_S,
        of_step=_of_replica(lambda step: step.gc_pause_ns),
    ),
    Metric(
        name="pellucid_engine_starved_seconds_total",
        kind="counter",
        help="How long a thread of the engine could have run and had no processor, the one it happened to most.",
        unit="seconds",
        labels=("replica",),
        join="most",
        divisor=NS_PER_S,
        of_step=_of_replica(lambda step: step.starved_ns),
    ),
    _exchange_counter(
        "pellucid_engine_interconnect_calls_total",
        "Exchanges between ranks; zero where there is one.",
        lambda one: one.calls,
    ),
    _exchange_counter(
        "pellucid_engine_interconnect_bytes_total",
        "Bytes that rank 0 received from the other ranks.",
        lambda one: one.bytes,
        unit="bytes",
    ),
    _exchange_counter(
        "pellucid_engine_interconnect_wait_seconds_total",
        "How long rank 0 waited for ranks that came later.",
        lambda one: one.wait_ns,
        unit="seconds",
    ),
    _exchange_counter(
        "pellucid_engine_interconnect_transfer_seconds_total",
        "How long exchanges took once all ranks had come.",
        lambda one: one.transfer_ns,
        unit="seconds",
    ),
    Metric(
        name="pellucid_engine_rank_wait_seconds_total",
        kind="counter",
        help="How long each rank waited for ranks that came later.",
        unit="seconds",
        labels=("replica", "rank"),
        join="most",
        divisor=NS_PER_S,
        of_step=lambda step: [
            ((str(step.replica), str(rank)), wait_ns) for rank, wait_ns in enumerate(step.interconnect.rank_wait_ns)
        ],
    ),
    Metric(
        name="pellucid_engine_straggler_steps_total",
        kind="counter",
        help="Steps in which the other ranks waited for this one more than it did for them.",
        labels=("replica", "rank"),
        join="most",
        of_step=lambda step: (
            [((str(step.replica), str(step.interconnect.straggler)), 1)] if step.interconnect.straggler >= 0 else []
        ),
    ),
)


def _of_current(amount: Callable[[StepRecord], int | float]) -> Callable[[View], Points]:
    """A gauge of each replica that is known to be as its last step says: nothing is shown for the others."""
    return lambda view: [
        ((str(replica.replica),), amount(replica.step)) for replica in view.replicas if replica.step is not None
    ]


def _replica_gauge(name: str, help: str, amount: Callable[[StepRecord], int | float]) -> Metric:
    unit = "ratio" if name.endswith("_ratio") else ""
    return Metric(
        name=name, kind="gauge", help=help, unit=unit, labels=("replica",), join="first", of_view=_of_current(amount)
    )


def _kv_slots(view: View) -> Points:
    return [
        ((str(replica.replica), place), getattr(replica.step.kv, place))
        for replica in view.replicas
        if replica.step is not None
        for place in KV_PLACES
    ]


def _waits(view: View) -> Points:
    return [
        ((str(replica.replica), state), replica.step.waits.get(state, 0))
        for replica in view.replicas
        if replica.step is not None
        for state in WAITING_STATES
    ]


def _memory(view: View) -> Points:
    return [
        ((str(replica.replica), kind), getattr(replica.memory, f"{kind}_bytes"))
        for replica in view.replicas
        if replica.memory is not None
        for kind in MEMORIES
    ]


def _limits(
    name: str,
    kind: Literal["counter", "gauge"],
    help: str,
    amount: Callable[[LimitsView], int],
    join: Literal["sum", "most", "least"] = "sum",
) -> Metric:
    """A number of the server for keys and limits; nothing is shown where there is none."""

    def read(view: View) -> Points:
        return [((), amount(view.limits))] if view.limits is not None else []

    return Metric(name=name, kind=kind, help=help, join=join, of_view=read)


LIMIT_METRICS = (
    _limits(
        "pellucid_redis_up",
        "gauge",
        "Whether the server for keys and limits answers all gateway workers.",
        lambda view: int(view.up),
        join="least",
    ),
    _limits(
        "pellucid_redis_breaker_openings_total",
        "counter",
        "How often it was given up until a probe found it well again.",
        lambda view: view.openings,
    ),
    _limits(
        "pellucid_redis_commands_failed_total",
        "counter",
        "Commands to it that nobody could rely on: late, refused, lost.",
        lambda view: view.commands_failed,
    ),
    _limits(
        "pellucid_limit_workers",
        "gauge",
        "Gateway processes that share the limits: without the server each grants one part in so many.",
        lambda view: view.workers,
        join="most",
    ),
    _limits(
        "pellucid_limit_reservations_held",
        "gauge",
        "Reservations that are not settled: those of requests in flight.",
        lambda view: view.held,
    ),
    _limits(
        "pellucid_limit_settlements_owed",
        "gauge",
        "Settlements that wait for the server to be back.",
        lambda view: view.owed,
    ),
    _limits(
        "pellucid_limit_settlements_forgotten_total",
        "counter",
        "Settlements that never were, for lack of room or of time: what they would give back stays charged.",
        lambda view: view.forgotten,
    ),
    _limits(
        "pellucid_limit_reservations_unknown_total",
        "counter",
        "Reservations that the server had lost when they were settled: flushed, or expired.",
        lambda view: view.unknown,
    ),
    Metric(
        name="pellucid_limit_refusals_total",
        kind="counter",
        help="Requests that a limit has refused, by whose limit and which.",
        labels=("level", "limit"),
        of_view=lambda view: list(view.limits.refusals.items()) if view.limits is not None else [],
        zeros=True,
    ),
)

VIEW_METRICS = (
    Metric(
        name="pellucid_requests_live",
        kind="gauge",
        help="Requests in flight.",
        labels=("route",),
        of_view=lambda view: [((route,), count) for route, count in view.live.items()],
    ),
    Metric(
        name="pellucid_engine_up",
        kind="gauge",
        help="Whether the gateway, all of its workers, is connected to the engine replica.",
        labels=("replica",),
        join="least",
        of_view=lambda view: [((str(replica.replica),), int(replica.up)) for replica in view.replicas],
    ),
    Metric(
        name="pellucid_engine_restarts_total",
        kind="counter",
        help="How often the engine replica came back as a new process.",
        labels=("replica",),
        join="most",
        of_view=lambda view: [((str(replica.replica),), replica.restarts) for replica in view.replicas],
    ),
    Metric(
        name="pellucid_engine_silent_seconds",
        kind="gauge",
        help="Time since the last step of the engine replica; it makes none while it has no work.",
        unit="seconds",
        labels=("replica",),
        join="least",
        divisor=NS_PER_S,
        of_view=lambda view: [((str(replica.replica),), replica.silent_ns) for replica in view.replicas],
    ),
    Metric(
        name="pellucid_upstream_up",
        kind="gauge",
        help="Whether the upstream would be sent a request, by all gateway workers.",
        labels=("upstream",),
        join="least",
        of_view=lambda view: [((one.name,), int(one.up)) for one in view.upstreams],
    ),
    Metric(
        name="pellucid_upstream_requests_live",
        kind="gauge",
        help="Requests in the hands of the upstream.",
        labels=("upstream",),
        of_view=lambda view: [((one.name,), one.in_flight) for one in view.upstreams],
    ),
    Metric(
        name="pellucid_upstream_attempts_total",
        kind="counter",
        help="Requests sent to the upstream, by what came of them; one that is sent to another as well counts at both.",
        labels=("upstream", "result"),
        of_view=lambda view: [
            ((one.name, result), one.results.get(result, 0)) for one in view.upstreams for result in UPSTREAM_RESULTS
        ],
    ),
    Metric(
        name="pellucid_kv_slots",
        kind="gauge",
        help="KV slots by place; the places sum to the pool.",
        labels=("replica", "place"),
        join="first",
        of_view=_kv_slots,
    ),
    _replica_gauge(
        "pellucid_kv_utilization_ratio",
        "Share of the KV pool that is not available to a new request.",
        lambda step: step.kv.utilization,
    ),
    _replica_gauge(
        "pellucid_kv_token_occupancy_ratio",
        "Share of the KV pool that holds keys and values somebody uses now.",
        lambda step: step.kv.token_occupancy,
    ),
    _replica_gauge(
        "pellucid_kv_internal_fragmentation_ratio",
        "Share of the started KV blocks that is unfilled.",
        lambda step: step.kv.internal_fragmentation,
    ),
    _replica_gauge(
        "pellucid_kv_external_fragmentation_ratio",
        "Free KV memory that no request could use: zero by construction, any free block serves any request.",
        lambda step: 0,
    ),
    _replica_gauge("pellucid_engine_running_sequences", "Sequences that hold KV.", lambda step: step.running),
    _replica_gauge(
        "pellucid_engine_waiting_sequences",
        "Sequences that wait for a place in the batch or for KV.",
        lambda step: step.waiting,
    ),
    Metric(
        name="pellucid_engine_waits",
        kind="gauge",
        help="The same by what they wait for.",
        labels=("replica", "state"),
        join="first",
        of_view=_waits,
    ),
    Metric(
        name="pellucid_engine_memory_bytes",
        kind="gauge",
        help="Memory of rank 0 of the engine below its KV pool: resident, private, and what the C library has handed "
        "out and what it keeps in pieces between.",
        unit="bytes",
        labels=("replica", "memory"),
        join="first",
        of_view=_memory,
    ),
    Metric(
        name="pellucid_gateway_starved_seconds_total",
        kind="counter",
        help="How long the gateway's event loop could have run and had no processor.",
        unit="seconds",
        divisor=NS_PER_S,
        of_view=lambda view: [((), view.starved_ns)],
    ),
    Metric(
        name="pellucid_host_pressure_seconds_total",
        kind="counter",
        help="Time in which something on this machine waited for a processor, for memory or for a disk (PSI, some).",
        unit="seconds",
        labels=("resource",),
        join="most",
        absolute=True,
        divisor=NS_PER_S,
        of_view=lambda view: [((resource,), spent_ns) for resource, spent_ns in view.pressure_ns.items()],
    ),
    Metric(
        name="pellucid_telemetry_drops_total",
        kind="counter",
        help="Records, spans and log lines that were lost, never at a request's expense.",
        labels=("reason",),
        of_view=lambda view: [((reason,), count) for reason, count in view.drops.items()],
        zeros=True,
    ),
    Metric(
        name="pellucid_telemetry_pending_records",
        kind="gauge",
        help="Records that nobody has read yet.",
        of_view=lambda view: [((), view.pending_records)],
    ),
    Metric(
        name="pellucid_telemetry_pending_spans",
        kind="gauge",
        help="Spans that wait for the collector.",
        of_view=lambda view: [((), view.pending_spans)],
    ),
    Metric(
        name="pellucid_event_loop_tasks",
        kind="gauge",
        help="Tasks of the gateway's event loops; without requests it is a small constant.",
        of_view=lambda view: [((), view.loop_tasks)] if view.loop_tasks else [],
    ),
    Metric(
        name="pellucid_process_resident_memory_bytes",
        kind="gauge",
        help="Resident memory of the gateway; of all its workers.",
        unit="bytes",
        of_view=lambda view: [((), view.resident_bytes)] if view.resident_bytes else [],
    ),
    Metric(
        name="pellucid_gateway_workers",
        kind="gauge",
        help="Gateway processes that share the port.",
        join="first",
        of_view=lambda view: [((), view.workers)],
    ),
    Metric(
        name="pellucid_gateway_workers_silent",
        kind="gauge",
        help="Of those, the ones that did not answer: of them there is what they have counted, not what they see now.",
        join="first",
        of_view=lambda view: [((), view.workers_silent)],
    ),
    Metric(
        name="pellucid_build_info",
        kind="gauge",
        help="Always 1; the labels say what runs.",
        labels=("version", "model"),
        join="first",
        of_view=lambda view: [(labels, 1) for labels in view.build],
    ),
)

FED_METRICS = (
    Metric(
        name="pellucid_prefix_index_news_lost_total",
        kind="counter",
        help="News of the engines' prefix caches that the index never had; it is right again when they are used again.",
        zeros=True,
    ),
    Metric(
        name="pellucid_book_mismatches_total",
        kind="counter",
        help="Books that did not close: a bug of ours, always.",
        labels=("book",),
        zeros=True,
    ),
    Metric(
        name="pellucid_event_loop_lag_seconds",
        kind="histogram",
        help="How late the gateway's event loop woke up; overlaps with the states of requests.",
        unit="seconds",
        buckets=LATENCY_BUCKETS_S,
        divisor=NS_PER_S,
        zeros=True,
    ),
    Metric(
        name="pellucid_gc_pause_seconds",
        kind="histogram",
        help="Pauses of the gateway for garbage collection; overlaps with the states of requests.",
        unit="seconds",
        labels=("generation",),
        buckets=LATENCY_BUCKETS_S,
        divisor=NS_PER_S,
        zeros=True,
    ),
)

CATALOGUE = REQUEST_METRICS + STEP_METRICS + VIEW_METRICS + LIMIT_METRICS + FED_METRICS
