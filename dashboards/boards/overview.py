"""Overview: does it serve, how well, and is anything of it missing."""

from dashboards.board import HERE, REPLICA, REPLICA_LEGEND, Board, Line, Panel, Row
from dashboards.objectives import OBJECTIVES, burn_rate
from dashboards.promql import Scope
from telemetry.vocabulary import GENERATING_ROUTES, TIME_PER_OUTPUT_TOKEN_S, TIME_TO_FIRST_TOKEN_S

_BY_SLO = {one.slo: one for one in OBJECTIVES}
_QUANTILES = (0.5, 0.95, 0.99)


def quantiles(histogram: str) -> tuple[Line, ...]:
    """Of the requests that generate."""
    return tuple(Line(HERE.quantile(q, histogram, route=GENERATING_ROUTES), f"p{q * 100:g}") for q in _QUANTILES)


FIRST_TOKEN = Panel(
    title="Time to first token",
    description="From the acceptance of a request to its first output token.",
    unit="s",
    lines=quantiles("pellucid_request_time_to_first_token_seconds"),
)
PER_TOKEN = Panel(
    title="Time per output token",
    description="Mean time between the tokens of one request, after the first.",
    unit="s",
    lines=quantiles("pellucid_request_time_per_output_token_seconds"),
)
_PROMISES = Row(
    "At a glance",
    (
        Panel(
            title="Requests a second",
            description="Requests that have ended and were to generate, whatever the end.",
            unit="reqps",
            lines=(Line(HERE.rate("pellucid_requests_total", route=GENERATING_ROUTES), "requests"),),
            kind="stat",
            width=4,
        ),
        Panel(
            title="In flight",
            description="Requests that have begun and not ended.",
            unit="short",
            lines=(Line(HERE.now("pellucid_requests_live") + " or vector(0)", "requests"),),
            kind="stat",
            width=4,
        ),
        Panel(
            title="Failures of ours",
            description="Share of generating requests that ended in a failure that is not the client's; those whose "
            "status had been sent already are counted too.",
            unit="percentunit",
            lines=(Line(_BY_SLO["errors"].bad(HERE), "failed"),),
            kind="stat",
            width=4,
        ),
        Panel(
            title="First token in time",
            description=f"Share of requests whose first token came within {TIME_TO_FIRST_TOKEN_S:g} s.",
            unit="percentunit",
            lines=(
                Line(
                    HERE.within(
                        "pellucid_request_time_to_first_token_seconds", TIME_TO_FIRST_TOKEN_S, route=GENERATING_ROUTES
                    ),
                    "in time",
                ),
            ),
            kind="stat",
            width=4,
        ),
        Panel(
            title="Tokens in time",
            description=f"Share of requests with at most {TIME_PER_OUTPUT_TOKEN_S:g} s between tokens, on average.",
            unit="percentunit",
            lines=(
                Line(
                    HERE.within(
                        "pellucid_request_time_per_output_token_seconds",
                        TIME_PER_OUTPUT_TOKEN_S,
                        route=GENERATING_ROUTES,
                    ),
                    "in time",
                ),
            ),
            kind="stat",
            width=4,
        ),
        Panel(
            title="Alerts firing",
            description="Of Pellucid's alerts in Prometheus; its page /alerts says which, and what to do.",
            unit="short",
            lines=(Line('count(ALERTS{alertstate="firing", alertname=~"Pellucid.+"}) or vector(0)', "alerts"),),
            kind="stat",
            width=4,
        ),
    ),
)

_TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            title="Requests by outcome",
            description="How requests have ended: `stop` and `length` got all that they asked for.",
            unit="reqps",
            lines=(Line(HERE.rate("pellucid_requests_total", "outcome", route=GENERATING_ROUTES), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            title="Tokens a second",
            description="Tokens of ended requests: prompts that were computed, those found in the prefix cache, and "
            "output.",
            unit="short",
            lines=(
                Line(HERE.rate("pellucid_prompt_tokens_total", "source"), "prompt, {{source}}"),
                Line(HERE.rate("pellucid_output_tokens_total"), "output"),
            ),
        ),
        Panel(
            title="Error budget burn",
            description="How many times faster than it lasts the budget of bad requests is spent, over 5 minutes and "
            "an hour; from the recording rules. At 1 it lasts 30 days.",
            unit="short",
            lines=tuple(
                Line(f"max by (slo) ({Scope('').select(burn_rate(window))})", f"{{{{slo}}}}, {window}")
                for window in ("5m", "1h")
            ),
        ),
        FIRST_TOKEN,
        PER_TOKEN,
        Panel(
            title="Duration",
            description="From the acceptance of a request to its last byte, all outcomes included.",
            unit="s",
            lines=quantiles("pellucid_request_duration_seconds"),
        ),
    ),
)

_ENGINES = Row(
    "Engines and upstreams",
    (
        Panel(
            title="Engines connected",
            description="1: all gateway workers are connected to the replica.",
            unit="none",
            lines=(Line(HERE.now("pellucid_engine_up", *REPLICA, how="min"), REPLICA_LEGEND),),
            most=1,
        ),
        Panel(
            title="Engine restarts",
            description="How often the replica has come back as a new process.",
            unit="short",
            lines=(Line(HERE.now("pellucid_engine_restarts_total", *REPLICA), REPLICA_LEGEND),),
        ),
        Panel(
            title="Sequences",
            description="Sequences that hold KV memory, and those that wait for a place in the batch or for KV.",
            unit="short",
            lines=(
                Line(HERE.now("pellucid_engine_running_sequences", *REPLICA), f"{REPLICA_LEGEND}, running"),
                Line(HERE.now("pellucid_engine_waiting_sequences", *REPLICA), f"{REPLICA_LEGEND}, waiting"),
            ),
        ),
        Panel(
            title="Upstreams",
            description="1: the upstream would be sent a request, by all gateway workers. Empty without upstreams.",
            unit="none",
            lines=(Line(HERE.now("pellucid_upstream_up", "upstream", how="min"), "{{upstream}}"),),
            most=1,
            width=6,
        ),
        Panel(
            title="Requests in their hands",
            description="Requests that the upstream has not answered yet.",
            unit="short",
            lines=(Line(HERE.now("pellucid_upstream_requests_live", "upstream"), "{{upstream}}"),),
            width=6,
        ),
        Panel(
            title="Upstream attempts",
            description="Requests sent to the upstream, by what came of them; `refused` was the client's fault.",
            unit="reqps",
            lines=(
                Line(HERE.rate("pellucid_upstream_attempts_total", "upstream", "result"), "{{upstream}} {{result}}"),
            ),
            width=6,
        ),
        Panel(
            title="Upstream tokens a second",
            description="As the upstream says, or estimated; prompt tokens include the cached ones.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_upstream_tokens_total", "upstream", "usage"), "{{upstream}} {{usage}}"),),
            width=6,
        ),
    ),
)

_GATEWAY = Row(
    "Gateway and telemetry",
    (
        Panel(
            title="Event loop lag",
            description="How late the gateway's event loop wakes up; it overlaps with the states of requests.",
            unit="s",
            lines=tuple(
                Line(HERE.quantile(q, "pellucid_event_loop_lag_seconds"), f"p{q * 100:g}") for q in (0.5, 0.99)
            ),
            width=6,
        ),
        Panel(
            title="Garbage collection",
            description="Share of the time that the gateway stands still for garbage collection, by generation.",
            unit="percentunit",
            lines=(Line(HERE.rate("pellucid_gc_pause_seconds_sum", "generation"), "generation {{generation}}"),),
            width=6,
        ),
        Panel(
            title="Memory",
            description="Resident memory of the gateway, of all its workers.",
            unit="bytes",
            lines=(Line(HERE.now("pellucid_process_resident_memory_bytes", "instance"), "{{instance}}"),),
            width=6,
        ),
        Panel(
            title="Workers and tasks",
            description="Gateway processes that share the port, those of them that did not answer, and the tasks of "
            "their event loops: without requests a small constant.",
            unit="short",
            lines=(
                Line(HERE.now("pellucid_gateway_workers", "instance"), "{{instance}} workers"),
                Line(HERE.now("pellucid_gateway_workers_silent", "instance"), "{{instance}} silent"),
                Line(HERE.now("pellucid_event_loop_tasks", "instance"), "{{instance}} tasks"),
            ),
            width=6,
        ),
        Panel(
            title="Books that do not close",
            description="Mismatches a second, by book. It is always a bug of ours, and never crashes a request.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_book_mismatches_total", "book"), "{{book}}"),),
            width=6,
        ),
        Panel(
            title="Telemetry lost",
            description="Records, spans and log lines lost a second, never at a request's expense; by reason.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_telemetry_drops_total", "reason"), "{{reason}}"),),
            width=6,
        ),
        Panel(
            title="Telemetry pending",
            description="Records that nobody has read yet, and spans that wait for the collector.",
            unit="short",
            lines=(
                Line(HERE.now("pellucid_telemetry_pending_records"), "records"),
                Line(HERE.now("pellucid_telemetry_pending_spans"), "spans"),
            ),
            width=6,
        ),
        Panel(
            title="What runs",
            description="Versions and models, by how many instances serve them.",
            unit="short",
            lines=(Line(HERE.now("pellucid_build_info", "version", "model"), "{{version}} {{model}}"),),
            width=6,
        ),
    ),
)

BOARD = Board(
    "pellucid-overview",
    "Overview",
    "Does it serve, how well, and is anything of it missing.",
    (_PROMISES, _TRAFFIC, _ENGINES, _GATEWAY),
)
