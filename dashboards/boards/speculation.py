"""Speculation and quantization: whether guessing ahead pays, and whether coarse numbers break the output."""

from dashboards.board import HERE, REPLICA, REPLICA_LEGEND, Board, Line, Panel, Row
from dashboards.boards.steps import busy
from dashboards.promql import share

_DRAFTS = "pellucid_engine_draft_tokens_total"
_WASTE = "pellucid_engine_draft_rejected_seconds_total"
_COMPUTE = "pellucid_engine_compute_part_seconds_total"
_PARTS = "pellucid_engine_step_part_seconds_total"
_EMITTED = "pellucid_engine_emitted_tokens_total"

_SPECULATION = Row(
    "Speculation",
    (
        Panel(
            title="Guessed tokens by verdict",
            description="Tokens a second that steps have guessed ahead, by what came of them.",
            unit="short",
            lines=(Line(HERE.rate(_DRAFTS, "verdict"), "{{verdict}}"),),
            stacked=True,
        ),
        Panel(
            title="Acceptance",
            description="Share of the guessed tokens that was right. Empty while nothing is guessed.",
            unit="percentunit",
            lines=(
                Line(
                    share(HERE.rate(_DRAFTS, *REPLICA, verdict="accepted"), HERE.rate(_DRAFTS, *REPLICA)),
                    REPLICA_LEGEND,
                ),
            ),
            most=1,
        ),
        Panel(
            title="Output that was guessed",
            description="Share of the emitted tokens that came from a guess: what speculation gains.",
            unit="percentunit",
            lines=(Line(share(HERE.rate(_DRAFTS, verdict="accepted"), HERE.rate(_EMITTED)), "guessed"),),
            most=1,
        ),
        Panel(
            title="What wrong guesses cost",
            description="Share of the busy time that went into rejected drafts, by the engine's model of what a row "
            "costs, and that of a draft model's guessing.",
            unit="percentunit",
            lines=(
                Line(share(HERE.rate(_WASTE), busy(HERE)), "rejected rows"),
                Line(share(HERE.rate(_PARTS, part="draft"), busy(HERE)), "draft model"),
            ),
        ),
        Panel(
            title="The same in ended requests",
            description="Guessed tokens a second of requests that have ended, as their records say.",
            unit="short",
            lines=(Line(HERE.rate("pellucid_draft_tokens_total", "verdict"), "{{verdict}}"),),
            stacked=True,
        ),
        Panel(
            title="Tokens a step",
            description="Output tokens that one step emits, by replica; with guesses a sequence may get several.",
            unit="short",
            lines=(
                Line(
                    share(HERE.rate(_EMITTED, *REPLICA), HERE.rate("pellucid_engine_steps_total", *REPLICA)),
                    REPLICA_LEGEND,
                ),
            ),
        ),
    ),
)

_QUANTIZATION = Row(
    "Quantization",
    (
        Panel(
            title="Output that is none",
            description="Requests a second that failed because the model's output was none, by kind: a broken "
            "checkpoint, or numbers too coarse for it.",
            unit="reqps",
            lines=(Line(HERE.rate("pellucid_degenerate_outputs_total", "kind"), "{{kind}}"),),
        ),
        Panel(
            title="Share of each part of compute",
            description="Matrix products, attention, elements (norms, rounding to 8 bits, positions), head: what "
            "rounding costs beside the products that it makes cheap.",
            unit="percentunit",
            lines=(Line(share(HERE.rate(_COMPUTE, "part"), HERE.rate(_COMPUTE), each="part"), "{{part}}"),),
            stacked=True,
            most=1,
        ),
        Panel(
            title="Compute time of a row",
            description="Seconds of compute divided by the rows computed, by replica: compare schemes with this, at "
            "the same load.",
            unit="s",
            lines=(
                Line(
                    share(
                        HERE.rate(_PARTS, *REPLICA, part="compute"), HERE.rate("pellucid_engine_tokens_total", *REPLICA)
                    ),
                    REPLICA_LEGEND,
                ),
            ),
        ),
    ),
)

BOARD = Board(
    "pellucid-speculation",
    "Speculation and quantization",
    "Whether guessing ahead pays, and what coarse numbers cost.",
    (_SPECULATION, _QUANTIZATION),
)
