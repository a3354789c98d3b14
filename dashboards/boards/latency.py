"""Request latency: the ledger, stacked."""

from dashboards.board import HERE, Board, Line, Panel, Row
from dashboards.boards.overview import FIRST_TOKEN, PER_TOKEN, quantiles
from dashboards.promql import share
from telemetry.vocabulary import GENERATING_ROUTES, SERVED_ROUTES

_SPENT = "pellucid_request_state_seconds_total"
_QUEUED = ("queue_batch_full", "queue_kv_full", "queue_token_budget", "queue_fairness")
_GATEWAY = (
    "auth", "parse", "tokenize", "limit", "route", "dispatch",
    "deliver", "detokenize", "send", "send_blocked", "finalize",
)  # fmt: skip
_ENDED = HERE.rate("pellucid_request_duration_seconds_count", route=SERVED_ROUTES)
"""Those whose time is in the states: who only looks is in neither."""

_LEDGER = Row(
    "The ledger",
    (
        Panel(
            title="Where the time of a request goes",
            description="Mean time of an ended request in each state. A request is in one state at any time, so the "
            "stack is the mean duration, exactly. Probes, and people who look, are not counted.",
            unit="s",
            lines=(Line(share(HERE.rate(_SPENT, "state"), _ENDED, each="state"), "{{state}}"),),
            stacked=True,
            width=24,
        ),
        Panel(
            title="Where the time to the first token goes",
            description="Mean time in each state up to the first output token; the stack is the mean time to it.",
            unit="s",
            lines=(
                Line(
                    share(
                        HERE.rate("pellucid_request_first_token_state_seconds_total", "state"),
                        HERE.rate("pellucid_request_time_to_first_token_seconds_count"),
                        each="state",
                    ),
                    "{{state}}",
                ),
            ),
            stacked=True,
            width=24,
        ),
        Panel(
            title="The same as shares",
            description="Share of each state in the lives of ended requests; they sum to 1.",
            unit="percentunit",
            lines=(Line(share(HERE.rate(_SPENT, "state"), HERE.rate(_SPENT), each="state"), "{{state}}"),),
            stacked=True,
            most=1,
            width=12,
        ),
        Panel(
            title="Waiting in the queue, by reason",
            description="Mean time in the queue of an ended request: no place in the batch, too few free KV blocks, "
            "the step's tokens spent, or held back for fairness.",
            unit="s",
            lines=(Line(share(HERE.rate(_SPENT, "state", state=_QUEUED), _ENDED, each="state"), "{{state}}"),),
            stacked=True,
            width=12,
        ),
        Panel(
            title="In the batch, and not served",
            description="Mean time stalled (the step served others), preempted, and paying again what had been "
            "computed before.",
            unit="s",
            lines=(
                Line(
                    share(
                        HERE.rate(_SPENT, "state", state=("stalled", "preempted", "recompute")),
                        _ENDED,
                        each="state",
                    ),
                    "{{state}}",
                ),
            ),
            stacked=True,
            width=12,
        ),
        Panel(
            title="In the gateway",
            description="Mean time outside of the engine; send_blocked is a client that does not read.",
            unit="s",
            lines=(Line(share(HERE.rate(_SPENT, "state", state=_GATEWAY), _ENDED, each="state"), "{{state}}"),),
            stacked=True,
            width=12,
        ),
    ),
)

_TIMES = Row(
    "What people notice",
    (
        FIRST_TOKEN,
        PER_TOKEN,
        Panel(
            title="Longest pause",
            description="Longest time between two tokens of one request: the pause that a reader notices.",
            unit="s",
            lines=quantiles("pellucid_request_token_gap_max_seconds"),
        ),
        Panel(
            title="Duration by outcome",
            description="95 % of requests take no longer, by how they end.",
            unit="s",
            lines=(
                Line(
                    HERE.quantile(0.95, "pellucid_request_duration_seconds", "outcome", route=GENERATING_ROUTES),
                    "{{outcome}}",
                ),
            ),
        ),
        Panel(
            title="Prompt tokens of a request",
            description="How long prompts are: longer ones are prefilled for longer.",
            unit="short",
            lines=quantiles("pellucid_request_prompt_tokens"),
        ),
        Panel(
            title="Output tokens of a request",
            description="How long answers are.",
            unit="short",
            lines=quantiles("pellucid_request_output_tokens"),
        ),
    ),
)

BOARD = Board(
    "pellucid-latency",
    "Request latency",
    "The latency book: every nanosecond of every ended request is in exactly one state.",
    (_LEDGER, _TIMES),
)
