"""Tenants and limits: who is refused, what is reserved and charged, and whether the server for limits is well."""

from dashboards.board import HERE, Board, Line, Panel, Row
from dashboards.promql import share

_TOKENS = "pellucid_limit_tokens_total"

_LIMITS = Row(
    "Limits",
    (
        Panel(
            title="Refused by a limit",
            description="Requests a second, by whose limit (organisation, tenant, key) and which. Tenants have no "
            "labels of their own, so that nobody can make series: /debug/requests and the log name them.",
            unit="reqps",
            lines=(Line(HERE.rate("pellucid_limit_refusals_total", "level", "limit"), "{{level}}, {{limit}}"),),
            stacked=True,
            width=12,
        ),
        Panel(
            title="Refused and unauthorized",
            description="Requests a second that keys and limits have kept out, by outcome.",
            unit="reqps",
            lines=(
                Line(
                    HERE.rate(
                        "pellucid_requests_total",
                        "outcome",
                        outcome=(
                            "unauthorized",
                            "forbidden",
                            "rate_limited",
                            "quota",
                            "keys_unavailable",
                            "limits_unavailable",
                        ),
                    )
                    + " or vector(0)",
                    "{{outcome}}",
                ),
            ),
            width=12,
        ),
        Panel(
            title="Tokens reserved and charged",
            description="Tokens a second of requests that limits hold: reserved before they run, charged in their "
            "place at their end.",
            unit="short",
            lines=(Line(HERE.rate(_TOKENS, "stage"), "{{stage}}"),),
        ),
        Panel(
            title="Charged of what was reserved",
            description="Share of the reserved tokens that was charged: much below 1 the estimates keep others out.",
            unit="percentunit",
            lines=(Line(share(HERE.rate(_TOKENS, stage="charged"), HERE.rate(_TOKENS, stage="reserved")), "charged"),),
        ),
        Panel(
            title="Spend an hour",
            description="What the charged tokens cost at the present rate, in the currency of the prices.",
            unit="short",
            lines=(Line(f"3600 * {HERE.rate('pellucid_limit_spend_total')}", "spend"),),
        ),
    ),
)

_SERVER = Row(
    "The server for keys and limits",
    (
        Panel(
            title="It answers",
            description="1: it answers all gateway workers.",
            unit="none",
            lines=(Line(HERE.now("pellucid_redis_up", "instance", how="min"), "{{instance}}"),),
            most=1,
        ),
        Panel(
            title="Given up, and failed commands",
            description="How often a second a gateway gave it up until a probe found it well again, and commands that "
            "were late, refused or lost.",
            unit="short",
            lines=(
                Line(HERE.rate("pellucid_redis_breaker_openings_total"), "given up"),
                Line(HERE.rate("pellucid_redis_commands_failed_total"), "failed commands"),
            ),
        ),
        Panel(
            title="Gateways that share the limits",
            description="Without the server each grants one part in so many.",
            unit="short",
            lines=(Line(HERE.now("pellucid_limit_workers", "instance", how="max"), "{{instance}}"),),
        ),
        Panel(
            title="Reservations and settlements",
            description="Reservations of requests in flight, and settlements that wait for the server to be back.",
            unit="short",
            lines=(
                Line(HERE.now("pellucid_limit_reservations_held"), "held"),
                Line(HERE.now("pellucid_limit_settlements_owed"), "owed"),
            ),
            width=12,
        ),
        Panel(
            title="Settlements gone wrong",
            description="A second: forgotten for lack of room or time, so what they would give back stays charged; "
            "and unknown to the server when they came.",
            unit="short",
            lines=(
                Line(HERE.rate("pellucid_limit_settlements_forgotten_total"), "forgotten"),
                Line(HERE.rate("pellucid_limit_reservations_unknown_total"), "unknown"),
            ),
            width=12,
        ),
    ),
)

BOARD = Board(
    "pellucid-limits",
    "Tenants and limits",
    "The limit book: who is refused, what is reserved and charged.",
    (_LIMITS, _SERVER),
)
