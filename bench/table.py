"""
What `pellucid bench scaling` found, for programs and for people.
"""

import msgspec
from rich.console import Console
from rich.table import Table

from bench.verdict import Row

FORMAT = 1
COLUMNS_MIN = 120


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it; the JSON has these fields.  Shares and efficiencies are of 1; `format` rises when one is read anew."""

    format: int = FORMAT
    commit: str
    """Empty: not known."""
    host: str
    processors: int
    model: str
    settings: dict[str, object]
    """With the seed and the load."""
    rows: tuple[Row, ...]
    verdict: str


def print_report(report: Report) -> None:
    """The table, where and what was measured, and the verdict."""
    terminal = Console()
    columns = max(terminal.width, COLUMNS_MIN) if terminal.is_terminal else COLUMNS_MIN  # wrapped is better than cut
    console = Console(width=columns, highlight=False, soft_wrap=True, markup=False)
    console.print(scaling_table(report))
    for row in report.rows:
        if row.refused:
            console.print(f"{row.name} did not run: {row.refused}")
    load = report.settings["load"]
    assert isinstance(load, dict)
    console.print(
        f"{report.model}, {load['streams']} streams of {load['requests']} requests: {load['prompt_words']} words, "
        f"{load['output_tokens']} tokens; times in ms, medians of {report.settings['rounds']} rounds; "
        f"seed {load['seed']}; commit {report.commit or 'unknown'}"
    )
    console.print(f"{report.host}; {report.processors} processors may be used\n")
    console.print(report.verdict)


def scaling_table(report: Report) -> Table:
    """
    One row for each configuration.

    TTFT, the time to the first token, and gaps are in milliseconds; efficiency is the speedup by the number of
    processes; others is the share of the processors' time that programs had which were not measured.
    """
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for column in (
        "tokens/s", "TTFT p50", "p99", "gap p50", "p99", "speedup", "efficiency",
        "wait", "transfer", "idle", "straggler", "others",
    ):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for row in report.rows:
        table.add_row(row.name, *_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    if row.refused:
        return ["refused"]
    shares = [row.shares.get(part, 0.0) for part in ("interconnect_wait", "interconnect_transfer", "idle")]
    rank, straggles = row.straggler
    return [
        f"{row.tokens_per_s:.1f}",
        *(f"{value:.1f}" for value in (row.first_p50_ms, row.first_p99_ms, row.gap_p50_ms, row.gap_p99_ms)),
        f"{row.speedup:.2f}" if row.speedup else "",
        f"{row.efficiency:.2f}" if row.speedup else "",
        *(f"{share:.1%}" for share in shares),
        f"{rank}: {straggles:.0%}" if straggles else "",
        f"{row.others_share:.0%}",
    ]
