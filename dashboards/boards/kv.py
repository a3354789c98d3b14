"""KV memory: where the slots are, who waits for them, and what the prefix cache saves."""

from dashboards.board import HERE, REPLICA, REPLICA_LEGEND, Board, Line, Panel, Row
from dashboards.promql import share

_SPENT = "pellucid_request_state_seconds_total"

_POOL = Row(
    "The pool",
    (
        Panel(
            title="Slots by place",
            description="The KV book: every slot is in one place, so the stack is the pool, exactly.",
            unit="short",
            lines=(Line(HERE.now("pellucid_kv_slots", "place"), "{{place}}"),),
            stacked=True,
            width=12,
        ),
        Panel(
            title="Utilization and occupancy",
            description="Share of the pool that is not available to a new request, and share that holds keys and "
            "values in use: what lies between them is reserved, or lost in blocks that are not full.",
            unit="percentunit",
            lines=(
                Line(HERE.now("pellucid_kv_utilization_ratio", *REPLICA, how="max"), f"{REPLICA_LEGEND}, utilization"),
                Line(
                    HERE.now("pellucid_kv_token_occupancy_ratio", *REPLICA, how="max"), f"{REPLICA_LEGEND}, occupancy"
                ),
            ),
            most=1,
            width=12,
        ),
        Panel(
            title="Fragmentation",
            description="Internal: unfilled share of the started blocks. External: free memory that no request could "
            "use, which is none by construction.",
            unit="percentunit",
            lines=(
                Line(
                    HERE.now("pellucid_kv_internal_fragmentation_ratio", *REPLICA, how="max"),
                    f"{REPLICA_LEGEND}, internal",
                ),
                Line(
                    HERE.now("pellucid_kv_external_fragmentation_ratio", *REPLICA, how="max"),
                    f"{REPLICA_LEGEND}, external",
                ),
            ),
            most=1,
        ),
        Panel(
            title="Blocks held by requests",
            description="KV blocks times the time for which ended requests held them, a second: how many were held "
            "on average.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_request_kv_block_seconds_total"), "blocks"),),
        ),
        Panel(
            title="Waiting for KV",
            description="Share of the lives of ended requests that was spent in the queue because of too few free "
            "KV blocks.",
            unit="percentunit",
            lines=(Line(share(HERE.rate(_SPENT, state="queue_kv_full"), HERE.rate(_SPENT)), "queue_kv_full"),),
        ),
        Panel(
            title="Waiting sequences, by reason",
            description="Now: what those wait for that are not in the batch.",
            unit="short",
            lines=(Line(HERE.now("pellucid_engine_waits", "state"), "{{state}}"),),
            stacked=True,
        ),
        Panel(
            title="Preemptions a second",
            description="Sequences whose KV was taken away for others.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_engine_preemptions_total", *REPLICA), REPLICA_LEGEND),),
        ),
        Panel(
            title="Tokens paid again",
            description="Tokens of ended requests a second that were computed again after a preemption.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_recomputed_tokens_total"), "recomputed"),),
        ),
        Panel(
            title="Evictions a second",
            description="Cached blocks given up for new tokens.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_engine_evictions_total", *REPLICA), REPLICA_LEGEND),),
        ),
    ),
)

_PREFIX = Row(
    "Prefix cache and routing",
    (
        Panel(
            title="Hit rate",
            description="Share of the prompt tokens of ended requests that was found in the prefix cache; a "
            "recompute after a preemption is no hit.",
            unit="percentunit",
            lines=(
                Line(
                    share(
                        HERE.rate("pellucid_prefix_cache_hit_tokens_total"),
                        HERE.rate("pellucid_prefix_cache_query_tokens_total"),
                    ),
                    "hit rate",
                ),
            ),
            most=1,
        ),
        Panel(
            title="What repeats, and what of it was cached",
            description="Prompt tokens a second that an earlier prompt began with, too, and those found in a cache: "
            "between the lines is what a larger one would find.",
            unit="short",
            lines=(
                Line(HERE.rate("pellucid_request_repeated_tokens_total"), "repeated"),
                Line(HERE.rate("pellucid_engine_cached_tokens_total"), "cached"),
            ),
        ),
        Panel(
            title="Cached tokens a second",
            description="Prompt tokens found in the prefix cache at admission, by replica.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_engine_cached_tokens_total", *REPLICA), REPLICA_LEGEND),),
        ),
        Panel(
            title="Why requests went to their replica",
            description="`cached`: it had most of the prompt; `relief`: that one was busy; `least`, `turn`: as the "
            "policy says; `only`: there was no choice.",
            unit="reqps",
            lines=(Line(HERE.rate("pellucid_routed_requests_total", "routing"), "{{routing}}"),),
            stacked=True,
        ),
        Panel(
            title="What the prefix index knew",
            description="Prompt tokens a second: cached as promised (kept), promised and not there (broken), and "
            "there without a promise.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_prefix_index_tokens_total", "promise"), "{{promise}}"),),
            stacked=True,
            width=12,
        ),
        Panel(
            title="News that the index never had",
            description="Changes of the engines' prefix caches a second that were lost on the way to the index.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_prefix_index_news_lost_total"), "lost"),),
            width=12,
        ),
    ),
)

BOARD = Board(
    "pellucid-kv",
    "KV memory",
    "The KV book: every slot is free, cached, filled, tail, lookahead or fenced.",
    (_POOL, _PREFIX),
)
