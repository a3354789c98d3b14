"""
What a metric is, and the closed vocabularies of its labels.

Every label value is in a vocabulary, so the number of series has a bound that no client can move.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from telemetry.records import (
    COMPUTE_PARTS,
    DEGENERATE_KINDS,
    ENGINE_STATES,
    EXCHANGES,
    GATEWAY_STATES,
    STEP_PARTS,
    MemoryReading,
    RequestRecord,
    StepRecord,
)

NS_PER_S = 1_000_000_000
MICROS = 1_000_000
OTHER = "other"
"""What a label value outside its vocabulary becomes."""

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/{id}",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
    "/debug/requests",
    "/debug/requests/{id}",
    "/debug/steps",
    "/debug/why/{id}",
    "/debug/doctor",
    "/debug/kv",
    "/debug/live",
    "/",
    "/page/{name}",
    "/admin",
    OTHER,
)
OBSERVING_ROUTES = (
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
    "/debug/requests",
    "/debug/requests/{id}",
    "/debug/steps",
    "/debug/why/{id}",
    "/debug/doctor",
    "/debug/kv",
    "/debug/live",
    "/",
    "/page/{name}",
    "/admin",
)
"""Routes of those who look: counted, but not traced, logged or remembered among the requests."""
SERVED_ROUTES = tuple(route for route in ROUTES if route not in OBSERVING_ROUTES)
"""All others: whose time is in the sums over states."""
GENERATING_ROUTES = ("/v1/chat/completions", "/v1/completions")
OUTCOMES = (
    # As the engine ends requests.
    "stop",
    "length",
    "abort",
    "deadline",
    "overloaded",
    "refused",
    "failed",
    "shutdown",
    # As the gateway does.
    "ok",
    "client_gone",
    "invalid",
    "unauthorized",
    "forbidden",
    "not_found",
    "rate_limited",
    "quota",
    "timeout",
    "draining",
    "no_healthy_engine",
    "keys_unavailable",
    "limits_unavailable",
    "engine_lost",
    "poisonous",
    "upstream_failed",
    "error",
    OTHER,
)
TIME_TO_FIRST_TOKEN_S = 2.0
TIME_PER_OUTPUT_TOKEN_S = 0.2
"""What is promised to those who ask.  Bounds of the buckets, so that no share of them is interpolated."""
FINISHED_OUTCOMES = ("stop", "length")
"""The outcomes of a request that got all that it asked for."""
FAULTS = (
    "deadline", "overloaded", "failed", "shutdown", "timeout", "draining", "no_healthy_engine", "keys_unavailable",
    "limits_unavailable", "engine_lost", "upstream_failed", "error",
)  # fmt: skip
"""The outcomes that are our fault, also where the status had been sent before; with a 4xx a timeout is the client's."""
_BEFORE_ENGINE = GATEWAY_STATES.index("dispatch") + 1
STATES = GATEWAY_STATES[:_BEFORE_ENGINE] + ENGINE_STATES + GATEWAY_STATES[_BEFORE_ENGINE:]
"""All states in the order in which a life passes them."""
WAITING_STATES = (*(state for state in ENGINE_STATES if state.startswith("queue_")), "preempted")
MEMORIES = ("resident", "private", "heap_used", "heap_free")
PRESSURES = ("cpu", "memory", "io")
"""What the kernel keeps account of waiting for (PSI)."""
UPSTREAM_RESULTS = ("complete", "refused", "rate_limited", "failed", "abandoned")
"""What comes of a request to an upstream; refused: it was the client's fault; abandoned: the client left, or we did."""
KV_PLACES = ("free", "cached_idle", "filled", "tail", "lookahead", "fenced")
ROUTINGS = ("only", "turn", "least", "cached", "relief", "key", "first_block", "two_choices")
"""Why a request went to its replica: gateway.balance."""
PROMISES = ("kept", "broken", "unpromised")
"""Cached prompt tokens that the prefix index had foretold, those that it had and were not there, and the others."""
BOOKS = ("kv", "latency", "token", "step", "interconnect", "limit")
RANKS_MAX = 64
"""Of one engine."""
LEVELS = ("organisation", "tenant", "key")
"""Whose limits hold for a request, widest first."""
LIMITS = ("requests", "tokens", "concurrent", "spend")
DROP_REASONS = (
    "sink_full", "live_full", "consumer_failed", "spans_queue_full", "spans_export_failed", "spans_file_queue_full",
    "spans_file_failed", "log_lines", "flight",
)  # fmt: skip

LABELS: dict[str, tuple[str, ...]] = {
    "route": ROUTES,
    "outcome": OUTCOMES,
    "status_class": ("1xx", "2xx", "3xx", "4xx", "5xx", "none"),
    "state": (*STATES, OTHER),
    "part": (*STEP_PARTS, *COMPUTE_PARTS, OTHER),
    "place": KV_PLACES,
    "memory": MEMORIES,
    "resource": PRESSURES,
    "book": BOOKS,
    "source": ("computed", "cached"),
    "verdict": ("accepted", "rejected"),
    "work": ("prefill", "recompute", "decode", "draft", "abandoned"),
    "reason": DROP_REASONS,
    "kind": (*DEGENERATE_KINDS, OTHER),
    "routing": (*ROUTINGS, OTHER),
    "promise": PROMISES,
    "result": UPSTREAM_RESULTS,
    "usage": ("prompt", "cached", "output"),
    "exchange": (*EXCHANGES, OTHER),
    "rank": (*(str(rank) for rank in range(RANKS_MAX)), OTHER),
    "generation": ("0", "1", "2"),
    "level": LEVELS,
    "limit": LIMITS,
    "stage": ("reserved", "charged"),
    "gen_ai_operation_name": ("chat", "text_completion"),
    "gen_ai_provider_name": ("pellucid",),
}
"""The vocabularies that are known when this is written."""
DEPLOYMENT_LABELS = ("model", "gen_ai_request_model", "replica", "upstream", "version", "epoch", "fingerprint")
"""Labels whose few values come from the deployment's configuration, never from a request."""

LATENCY_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75,
    1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0,
)  # fmt: skip
"""Those of the GenAI conventions, extended at both ends; each value that an SLO may name is an exact bound."""
STEP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TOKEN_BUCKETS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)

Point = tuple[tuple[str, ...], int | float]
"""Label values in the order of the metric's labels, and the amount: added, observed or shown, after its kind."""
Points = Iterable[Point]


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica at the time of a scrape; `step` is None when its last one says nothing about now."""

    replica: int
    up: bool
    restarts: int
    silent_ns: int
    step: StepRecord | None
    memory: MemoryReading | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsView:
    """Keys, limits and their server at the time of a scrape."""

    up: bool
    """Whether the breaker is closed."""
    openings: int
    commands_failed: int
    workers: int
    """Gateway processes that share the limits."""
    held: int
    """Reservations of requests in flight."""
    owed: int
    """Settlements that wait for the server."""
    forgotten: int
    """Settlements that never were."""
    unknown: int
    """Settlements of what the server had lost."""
    refusals: dict[tuple[str, str], int]
    """By level and limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamView:
    """One upstream at the time of a scrape."""

    name: str
    up: bool
    in_flight: int
    results: dict[str, int]
    """By UPSTREAM_RESULTS."""


@dataclass(frozen=True, slots=True)
class View:
    """What is not in any record but true now."""

    replicas: tuple[ReplicaView, ...] = ()
    upstreams: tuple[UpstreamView, ...] = ()
    live: dict[str, int] = field(default_factory=dict)
    """Requests in flight by route."""
    drops: dict[str, int] = field(default_factory=dict)
    pending_records: int = 0
    pending_spans: int = 0
    resident_bytes: int = 0
    starved_ns: int = 0
    pressure_ns: dict[str, int] = field(default_factory=dict)
    """Of this machine, by PRESSURES; empty: the kernel does not say."""
    loop_tasks: int = 0
    """Tasks of the event loop: what a request leaves behind would show here."""
    workers: int = 1
    """Gateway processes that share the port."""
    workers_silent: int = 0
    """Of those, the ones that do not say what they see now."""
    build: tuple[tuple[str, str], ...] = ()
    """(version, model), one a model."""
    limits: LimitsView | None = None
    """None: there is no server for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the catalogue.  At most one of the three readers is set; with none, the hub feeds it by name."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    divisor: int = 1
    """What an amount is divided by at the scrape: 1e9 where records hold nanoseconds and the unit is seconds."""
    of_request: Callable[[RequestRecord], Points] | None = None
    of_step: Callable[[StepRecord], Points] | None = None
    of_view: Callable[[View], Points] | None = None
    join: Literal["sum", "most", "least", "first"] = "sum"
    """What becomes of the numbers of several gateway workers; see `telemetry.numbers`."""
    absolute: bool = False
    """Whether a view tells all of it, also what was before this process: no life of it goes on from the one before."""
    exemplars: bool = False
    """Whether the buckets name the last request in them whose trace is kept."""
    zeros: bool = False
    """
    Whether all series of its closed labels are there, at zero, before anything has happened.

    What comes into being with its first event has no rate then: an alert does not see it.
    """
    zeros_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of these labels, the values for which that holds, where it does not for all."""
