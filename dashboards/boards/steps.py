"""Engine steps: their parts, where compute went, what ranks waited for."""

from dashboards.board import HERE, REPLICA, REPLICA_LEGEND, Board, Line, Panel, Row
from dashboards.promql import Scope, share

_PARTS = "pellucid_engine_step_part_seconds_total"
_COMPUTE = "pellucid_engine_compute_part_seconds_total"
_EXCHANGES = ("pellucid_engine_interconnect_wait_seconds_total", "pellucid_engine_interconnect_transfer_seconds_total")
_BETWEEN_RANKS = ("interconnect_wait", "interconnect_transfer", "bubble")


def busy(scope: Scope, *by: str) -> str:
    """Seconds a second in steps that had something to do."""
    return scope.rate(_PARTS, *by, part="!idle")


_TIME = Row(
    "Steps",
    (
        Panel(
            title="Time of the engines by part",
            description="Seconds a second, of all replicas. The parts of a step sum to the step, so the stack is the "
            "number of replicas; `idle` is waiting for something to do.",
            unit="s",
            lines=(Line(HERE.rate(_PARTS, "part"), "{{part}}"),),
            stacked=True,
            width=12,
        ),
        Panel(
            title="Mean step by part",
            description="Time of one step, without the idle time before it.",
            unit="s",
            lines=(
                Line(
                    share(
                        HERE.rate(_PARTS, "part", part="!idle"), HERE.rate("pellucid_engine_steps_total"), each="part"
                    ),
                    "{{part}}",
                ),
            ),
            stacked=True,
            width=12,
        ),
        Panel(
            title="Compute by part",
            description="Seconds a second in each part of compute, as far as the decoder can tell.",
            unit="s",
            lines=(Line(HERE.rate(_COMPUTE, "part"), "{{part}}"),),
            stacked=True,
        ),
        Panel(
            title="Time of a step",
            description="Without the idle time before it, by replica.",
            unit="s",
            lines=tuple(
                Line(HERE.quantile(q, "pellucid_engine_step_busy_seconds", *REPLICA), f"{REPLICA_LEGEND}, p{q * 100:g}")
                for q in (0.5, 0.99)
            ),
        ),
        Panel(
            title="Steps a second",
            description="By replica.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_engine_steps_total", *REPLICA), REPLICA_LEGEND),),
        ),
        Panel(
            title="Busy",
            description="Share of the time in which the engine had something to do.",
            unit="percentunit",
            lines=(Line(share(busy(HERE, *REPLICA), HERE.rate(_PARTS, *REPLICA)), REPLICA_LEGEND),),
            most=1,
        ),
        Panel(
            title="Sequences in a step",
            description="How many sequences one step serves, on average.",
            unit="short",
            lines=(Line(HERE.mean("pellucid_engine_sequences_per_step", *REPLICA), REPLICA_LEGEND),),
        ),
        Panel(
            title="Silence",
            description="Time since the last step; there is none without work.",
            unit="s",
            lines=(Line(HERE.now("pellucid_engine_silent_seconds", *REPLICA, how="max"), REPLICA_LEGEND),),
        ),
        Panel(
            title="Rows computed a second, by work",
            description="`recompute`: paid again after a preemption; `draft`: guessed ahead; `abandoned`: of requests "
            "that ended meanwhile.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_engine_tokens_total", "work"), "{{work}}"),),
            stacked=True,
            width=12,
        ),
        Panel(
            title="Tokens emitted a second",
            description="Output tokens that steps have produced, by replica.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_engine_emitted_tokens_total", *REPLICA), REPLICA_LEGEND),),
            width=12,
        ),
    ),
)

_DISTURBED = Row(
    "What disturbs the engines",
    (
        Panel(
            title="Garbage collection, and no processor",
            description="Seconds a second, beside the parts of steps; no processor: the thread it happened to most.",
            unit="s",
            lines=(
                Line(HERE.rate("pellucid_engine_gc_pause_seconds_total", *REPLICA), f"{REPLICA_LEGEND}, collection"),
                Line(HERE.rate("pellucid_engine_starved_seconds_total", *REPLICA), f"{REPLICA_LEGEND}, no processor"),
                Line(HERE.rate("pellucid_gateway_starved_seconds_total", "instance"), "{{instance}} gateway"),
            ),
        ),
        Panel(
            title="Pressure on the machine",
            description="Share of the time in which something waited for a processor, for memory or for a disk (PSI).",
            unit="percentunit",
            lines=(Line(HERE.rate("pellucid_host_pressure_seconds_total", "instance", "resource"), "{{resource}}"),),
            most=1,
        ),
        Panel(
            title="Memory below the KV pool",
            description="Of rank 0. `heap_free` is what the C library keeps in pieces: fragmentation, if it grows.",
            unit="bytes",
            lines=(Line(HERE.now("pellucid_engine_memory_bytes", *REPLICA, "memory"), REPLICA_LEGEND + " {{memory}}"),),
        ),
    ),
)

_RANKS = Row(
    "Between ranks",
    (
        Panel(
            title="Share of a step lost between ranks",
            description="Of the time that engines are busy: waiting for ranks that came later, transfer once all had "
            "come, and the bubble of a pipeline. Zero with one rank.",
            unit="percentunit",
            lines=(Line(share(HERE.rate(_PARTS, "part", part=_BETWEEN_RANKS), busy(HERE), each="part"), "{{part}}"),),
            stacked=True,
            width=12,
        ),
        Panel(
            title="Wait and transfer by exchange",
            description="Seconds a second of rank 0. A high wait is imbalance, a high transfer is the wire.",
            unit="s",
            lines=(
                Line(HERE.rate(_EXCHANGES[0], "exchange"), "{{exchange}}, wait"),
                Line(HERE.rate(_EXCHANGES[1], "exchange"), "{{exchange}}, transfer"),
            ),
            width=12,
        ),
        Panel(
            title="Wait of each rank",
            description="Seconds a second that the rank waited for ranks that came later. Who waits least is waited "
            "for.",
            unit="s",
            lines=(
                Line(
                    HERE.rate("pellucid_engine_rank_wait_seconds_total", *REPLICA, "rank"),
                    f"{REPLICA_LEGEND} rank {{{{rank}}}}",
                ),
            ),
            width=6,
        ),
        Panel(
            title="Stragglers",
            description="Share of the steps in which the others waited for this rank more than it did for them.",
            unit="percentunit",
            lines=(
                Line(
                    share(
                        HERE.rate("pellucid_engine_straggler_steps_total", *REPLICA, "rank"),
                        HERE.rate("pellucid_engine_steps_total", *REPLICA),
                        each="rank",
                    ),
                    f"{REPLICA_LEGEND} rank {{{{rank}}}}",
                ),
            ),
            most=1,
            width=6,
        ),
        Panel(
            title="Received by rank 0",
            description="Bytes a second from the other ranks, by exchange.",
            unit="Bps",
            lines=(Line(HERE.rate("pellucid_engine_interconnect_bytes_total", "exchange"), "{{exchange}}"),),
            width=6,
        ),
        Panel(
            title="Exchanges a second",
            description="Between ranks, by kind.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_engine_interconnect_calls_total", "exchange"), "{{exchange}}"),),
            width=6,
        ),
    ),
)

BOARD = Board(
    "pellucid-steps",
    "Engine steps",
    "Inside a step: its parts sum to it.",
    (_TIME, _DISTURBED, _RANKS),
)
