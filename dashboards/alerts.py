"""
Alerts: when somebody should look, what has happened, and what to do.

`critical`: now, people are hurt or will be soon.  `warning`: today.
"""

from dataclasses import dataclass
from typing import Literal

from dashboards.boards.steps import busy
from dashboards.objectives import FAST, OBJECTIVES, SLOW, Objective, burns
from dashboards.promql import Scope, share

JOB = "pellucid"
"""Of the scrape configuration."""
TEN_MINUTES = Scope("10m", kept=("instance",))
NOW = Scope("", kept=("instance",))

KV_WAITING_MAX = 0.1
RECOMPUTE_MAX = 0.1
STALLED_MAX = 0.3
INTERCONNECT_WAIT_MAX = 0.2
LAG_S = 0.1
"""A bound of the buckets."""
LAGGING_MAX = 0.01
UPSTREAM_FAILED_MAX = 0.1
RESTARTS_MAX = 2

_SPENT = "pellucid_request_state_seconds_total"
_PARTS = "pellucid_engine_step_part_seconds_total"
_ATTEMPTS = "pellucid_upstream_attempts_total"
_SHOWN = "{{ $value | humanizePercentage }}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alerting rule."""

    name: str
    expr: str
    lasting: str = "0s"
    """How long it must be true before anybody is told."""
    severity: Literal["critical", "warning"]
    summary: str
    description: str
    action: str
    """What to do."""


def _burning(one: Objective) -> tuple[Alert, Alert]:
    shown = f"Of requests {one.target:.1%} are promised: {one.shown}"
    action = (
        "See `Failures of ours` and `Requests by outcome` on the dashboard Overview; the gateway's log and "
        "/debug/requests have each failed request."
        if one.slo == "errors"
        else "See on the dashboard Request latency which state has grown: queue_* wants a smaller load, another "
        "replica or more --kv-memory; stalled a smaller --max-step-tokens; decode and prefill a faster engine."
    )
    return (
        Alert(
            name=f"Pellucid{one.alert}BurnsFast",
            expr=burns(one, FAST),
            severity="critical",
            summary=f"The error budget for {one.slo} is burning fast",
            description=f"{shown}. The budget is being spent {{{{ $value | humanize }}}} times faster than it lasts.",
            action=action,
        ),
        Alert(
            name=f"Pellucid{one.alert}BurnsSlowly",
            expr=burns(one, SLOW),
            severity="warning",
            summary=f"The error budget for {one.slo} will not last",
            description=f"{shown}. The budget is being spent {{{{ $value | humanize }}}} times faster than it lasts.",
            action=action,
        ),
    )


_SLOW_REQUESTS = (
    Alert(
        name="PellucidWaitingForKv",
        expr=f"{share(TEN_MINUTES.rate(_SPENT, state='queue_kv_full'), TEN_MINUTES.rate(_SPENT))} > {KV_WAITING_MAX}",
        lasting="5m",
        severity="warning",
        summary="Requests wait for KV memory on {{ $labels.instance }}",
        description=f"{_SHOWN} of the lives of requests is spent in the queue because too few KV blocks are free.",
        action="Give more --kv-memory, an int8 --kv-dtype, a smaller --max-batch, or another replica. The dashboard KV "
        "memory shows whether the pool is filled, or reserved and fragmented.",
    ),
    Alert(
        name="PellucidPreemptionThrash",
        expr=share(
            TEN_MINUTES.rate("pellucid_engine_tokens_total", "replica", work="recompute"),
            TEN_MINUTES.rate("pellucid_engine_tokens_total", "replica"),
        )
        + f" > {RECOMPUTE_MAX}",
        lasting="5m",
        severity="warning",
        summary="Replica {{ $labels.replica }} of {{ $labels.instance }} computes again what it had to give up",
        description=f"{_SHOWN} of the rows are computed again after a preemption: more sequences are in the batch than "
        "KV memory has room for.",
        action="Lower --max-batch, or give more --kv-memory.",
    ),
    Alert(
        name="PellucidStalled",
        expr=share(
            TEN_MINUTES.rate(_SPENT, state="stalled"),
            TEN_MINUTES.rate(_SPENT, state=("prefill", "decode", "stalled", "recompute")),
        )
        + f" > {STALLED_MAX}",
        lasting="5m",
        severity="warning",
        summary="Requests in the batch of {{ $labels.instance }} wait while its steps serve others",
        description=f"{_SHOWN} of the time in the batch is stalled: long prompts of others take the steps.",
        action="Lower --max-step-tokens, or add a replica.",
    ),
    Alert(
        name="PellucidInterconnectWait",
        expr=share(TEN_MINUTES.rate(_PARTS, "replica", part="interconnect_wait"), busy(TEN_MINUTES, "replica"))
        + f" > {INTERCONNECT_WAIT_MAX}",
        lasting="5m",
        severity="warning",
        summary="Ranks of replica {{ $labels.replica }} of {{ $labels.instance }} wait for each other",
        description=f"{_SHOWN} of its busy time rank 0 waits for ranks that come later.",
        action="See `Stragglers` on the dashboard Engine steps: one rank that is always late has a slower or shared "
        "processor; late ones in turn share processors with each other, or with something else on the machine.",
    ),
    Alert(
        name="PellucidEventLoopLag",
        expr=f"{TEN_MINUTES.above('pellucid_event_loop_lag_seconds', LAG_S)} > {LAGGING_MAX}",
        lasting="5m",
        severity="warning",
        summary="The gateway's event loop on {{ $labels.instance }} is late",
        description=f"It wakes up more than {LAG_S:g} s late in {_SHOWN} of the cases, and every stream with it.",
        action="Add --workers, or processors: see whether engines and gateway share them, and `Garbage collection` on "
        "the dashboard Overview.",
    ),
)

_PARTS_DOWN = (
    Alert(
        name="PellucidUnreachable",
        expr=NOW.now("up", how="max", job=JOB) + " == 0",
        lasting="1m",
        severity="critical",
        summary="{{ $labels.instance }} does not answer Prometheus",
        description="Its /metrics cannot be read: the gateway is down, or not reachable from Prometheus.",
        action="See whether `pellucid serve` runs there and what its log says.",
    ),
    Alert(
        name="PellucidEngineDown",
        expr=NOW.now("pellucid_engine_up", "replica", how="min") + " == 0",
        lasting="1m",
        severity="critical",
        summary="Engine {{ $labels.replica }} of {{ $labels.instance }} is down",
        description="The gateway, or one of its workers, is not connected to it. Other replicas serve what they can.",
        action="/health says what is missing; the log of `pellucid serve` has the engine's last words.",
    ),
    Alert(
        name="PellucidEngineRestarts",
        expr=Scope("30m", kept=("instance",)).increase("pellucid_engine_restarts_total", "replica")
        + f" > {RESTARTS_MAX}",
        severity="warning",
        summary="Engine {{ $labels.replica }} of {{ $labels.instance }} keeps dying",
        description="It came back as a new process {{ $value | humanize }} times in 30 minutes.",
        action="The log of `pellucid serve` has its last words: no memory (lower --kv-memory), a lost rank, or a bug.",
    ),
    Alert(
        name="PellucidWorkerSilent",
        expr=NOW.now("pellucid_gateway_workers_silent") + " > 0",
        lasting="2m",
        severity="warning",
        summary="{{ $value }} gateway workers of {{ $labels.instance }} do not answer the others",
        description="What they see now is missing from /metrics, and their clients may be waiting.",
        action="The log of `pellucid serve` says whether it restarts them; /health which.",
    ),
    Alert(
        name="PellucidUpstreamDown",
        expr=NOW.now("pellucid_upstream_up", "upstream", how="min") + " == 0",
        lasting="2m",
        severity="warning",
        summary="{{ $labels.instance }} sends nothing to the upstream {{ $labels.upstream }}",
        description="Its breaker is open, or its probe fails; its models are served by the others, if there are any.",
        action="/health says why. See whether that server runs and is reachable, and whether its key is good.",
    ),
    Alert(
        name="PellucidUpstreamFailing",
        expr=share(TEN_MINUTES.rate(_ATTEMPTS, "upstream", result="failed"), TEN_MINUTES.rate(_ATTEMPTS, "upstream"))
        + f" > {UPSTREAM_FAILED_MAX}",
        lasting="5m",
        severity="warning",
        summary="The upstream {{ $labels.upstream }} fails, says {{ $labels.instance }}",
        description=f"{_SHOWN} of the requests sent to it failed.",
        action="The gateway's log has the errors; look at that server.",
    ),
    Alert(
        name="PellucidLimitsServerDown",
        expr=NOW.now("pellucid_redis_up", how="min") + " == 0",
        lasting="1m",
        severity="critical",
        summary="The server for keys and limits does not answer {{ $labels.instance }}",
        description="Each gateway keeps to its share of the limits; new keys are unknown, revoked ones stay good.",
        action="Restart it, or mend the way to it: it is the one of --redis-url, or the embedded Valkey, whose last "
        "words are in the log of `pellucid serve`.",
    ),
    Alert(
        name="PellucidSettlementsForgotten",
        expr=TEN_MINUTES.increase("pellucid_limit_settlements_forgotten_total") + " > 0",
        severity="warning",
        summary="{{ $labels.instance }} has forgotten what it owes the limits",
        description="What {{ $value | humanize }} requests have not used stays charged: it was away for too long.",
        action="See `It answers` on the dashboard Tenants and limits; spend limits are right again the next day.",
    ),
)

_OURSELVES = (
    Alert(
        name="PellucidBookDoesNotClose",
        expr=TEN_MINUTES.increase("pellucid_book_mismatches_total", "book") + " > 0",
        severity="warning",
        summary="The {{ $labels.book }} book of {{ $labels.instance }} does not close",
        description="{{ $value | humanize }} records in 10 minutes do not add up. No request is hurt, but a number "
        "that you see is wrong.",
        action="It is a bug of Pellucid: report it with the line of the log that names the request or step.",
    ),
    Alert(
        name="PellucidTelemetryLost",
        expr=TEN_MINUTES.increase("pellucid_telemetry_drops_total", "reason") + " > 0",
        severity="warning",
        summary="{{ $labels.instance }} loses telemetry: {{ $labels.reason }}",
        description="{{ $value | humanize }} records, spans or log lines in 10 minutes; no request has waited.",
        action="spans_file_*: the disk of --export-trace is full or slow. Other spans_*: the collector behind "
        "--otlp-endpoint is slow or away. sink_full, live_full: the gateway has too little processor. "
        "log_lines: whoever reads its stderr does not. consumer_failed: a bug, see the log.",
    ),
    Alert(
        name="PellucidDegenerateOutput",
        expr=TEN_MINUTES.increase("pellucid_degenerate_outputs_total", "kind") + " > 0",
        severity="warning",
        summary="A model of {{ $labels.instance }} gives no output: {{ $labels.kind }}",
        description="{{ $value | humanize }} requests in 10 minutes failed because the model's output was none.",
        action="The checkpoint is broken, or its numbers are too coarse: compare with --quantization none.",
    ),
)

ALERTS = (*(alert for one in OBJECTIVES for alert in _burning(one)), *_SLOW_REQUESTS, *_PARTS_DOWN, *_OURSELVES)
