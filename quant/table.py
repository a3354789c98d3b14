"""
What a conversion cost, for programs and for people: `report.json` and the printed table.

`report.json` is one object with the fields of `Report`, in that order, each object in it with the fields of its struct
here or in `quant.report`.  Errors are relative and Frobenius, sizes in bytes, times in seconds; a number that is
infinite, such as the SQNR of a layer without noise, is null.  `format` rises when a field changes its meaning.
"""

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from launch.sizes import format_bytes
from quant.formats.scheme import Scheme
from quant.report import LinearReport, Measured, Quality

FORMAT = 1
WORST = 10


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """What made it."""

    pellucid: str
    torch: str
    python: str
    bitsandbytes: str | None  # nf4 and llm-int8 only


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was made."""

    processor: str
    system: str
    threads: int
    device: str


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What it was made of."""

    name: str
    identity: str  # SHA-256 of the SHA-256 of each of its files
    size_bytes: int  # of its weight files


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A text that was looked at."""

    origin: str  # the file's name, or `sampled from the model itself, seed 0`
    sha256: str | None  # of the file
    tokens: int


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, beside the scheme."""

    seed: int
    damp: float | None  # gptq and fp8 only
    smooth: float | None  # null: searched, or not of this scheme
    rotate: str | None  # int8 only: none, offline or full
    keep: tuple[str, ...]


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """What was demanded, and whether it was met."""

    max_ppl_increase: float
    min_top1: float
    passed: bool
    complaints: tuple[str, ...]
    suggestions: tuple[str, ...]  # layers to --keep, worst first; empty if it passed


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What the conversion itself took."""

    seconds: float
    peak_memory_bytes: int  # resident, of the whole process
    peak_device_bytes: int | None  # cuda only


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the weights on disk."""

    source_bytes: int
    result_bytes: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    format: int = FORMAT
    label: str  # gptq-4bit-g64
    scheme: Scheme
    settings: Settings
    source: Source
    gate: Gate
    quality: Quality
    size: Size
    cost: Cost
    calibration: Text
    evaluation: Text
    versions: Versions
    host: Host
    worst: tuple[str, ...]  # the ten quantized layers with the largest output error, worst first
    linears: tuple[LinearReport, ...]

    def encode(self) -> bytes:
        """As JSON for people."""
        return pretty(self)


def pretty(value: object) -> bytes:
    """JSON for people."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def judge(measured: Measured, *, max_ppl_increase: float, min_top1: float) -> Gate:
    """Hold the quality against the gate.  What is no number does not pass."""
    quality = measured.quality
    complaints = []
    if not quality.perplexity_increase <= max_ppl_increase:
        complaints.append(f"perplexity rose by {quality.perplexity_increase:.2%}, at most {max_ppl_increase:.2%}")
    if not quality.top1 >= min_top1:
        complaints.append(f"top-1 agreement is {quality.top1:.2%}, at least {min_top1:.2%}")
    return Gate(
        max_ppl_increase=max_ppl_increase,
        min_top1=min_top1,
        passed=not complaints,
        complaints=tuple(complaints),
        suggestions=measured.suggestions if complaints else (),
    )


def worst(linears: tuple[LinearReport, ...]) -> tuple[str, ...]:
    """The quantized layers with the largest output error.  What is no number is worse than any."""

    def error(linear: LinearReport) -> float:
        return linear.output_error if linear.output_error == linear.output_error else float("inf")

    quantized = [linear for linear in linears if not linear.kept]
    return tuple(linear.name for linear in sorted(quantized, key=error, reverse=True)[:WORST])


def print_report(report: Report, place: Path, console: Console) -> None:
    """The worst layers, the summary, the verdict.  `place` is where the result, or else its report, lies."""
    console.print(_worst_table(report))
    for name, value in summary(report, place):
        console.print(f"{name:<20}{value}")


def _worst_table(report: Report) -> Table:
    by_name = {linear.name: linear for linear in report.linears}
    table = Table(title=f"{report.label} of {report.source.name}: the worst layers", title_justify="left")
    table.add_column("layer", no_wrap=True)
    columns = ["SQNR dB", "weights", "inputs", "output", "bits"]
    plain = any(linear.rounded_error is not None for linear in report.linears)
    columns[4:4] = ["plain rounding"] if plain else []
    for column in columns:
        table.add_column(column, justify="right")
    for name in report.worst:
        linear = by_name[name]
        noise = "" if linear.sqnr_db is None else f"{linear.sqnr_db:.1f}"
        peaks = f"{linear.source_input_peak:.1f} -> {linear.input_peak:.1f}"
        cells = [noise, f"{linear.relative_error:.4f}", peaks, f"{linear.output_error:.4f}"]
        if plain:
            cells.append("" if linear.rounded_error is None else f"{linear.rounded_error:.4f}")
        table.add_row(name.removeprefix("model.layers."), *cells, f"{linear.bits_per_weight:.2f}")
    return table


def _rotation(report: Report) -> list[tuple[str, str]]:
    kind = report.settings.rotate
    if kind is None:
        return []
    if kind == "none":
        return [("rotation", "none; --rotate full costs less quality, if only Pellucid is to read the result")]
    count = len(report.linears)
    before = sum(linear.source_input_peak for linear in report.linears) / count
    after = sum(linear.input_peak for linear in report.linears) / count
    peaks = f"a token's largest input is {before:.1f} -> {after:.1f} times the typical one, mean over layers"
    readers = "; only Pellucid reads it, and others what --rotate offline or none makes" if report.scheme.mix else ""
    return [("rotation", f"{kind}: {peaks}{readers}")]


def summary(report: Report, place: Path) -> list[tuple[str, str]]:
    """(name, value) of what else a person wants to know."""
    quality, size, cost = report.quality, report.size, report.cost
    kept = sum(linear.kept for linear in report.linears)
    verdict = "passed" if report.gate.passed else f"failed: {'; '.join(report.gate.complaints)}"
    return [
        ("layers", f"{len(report.linears) - kept} quantized, {kept} kept"),
        *_rotation(report),
        (
            "perplexity",
            f"{quality.source_perplexity:.3f} -> {quality.perplexity:.3f} ({quality.perplexity_increase:+.2%}) "
            f"on {quality.tokens} tokens",
        ),
        ("top-1 agreement", f"{quality.top1:.2%}"),
        ("KL divergence", f"{quality.kl_mean:.4f} nats mean, {quality.kl_p99:.4f} at the 99th percentile"),
        ("size", f"{format_bytes(size.source_bytes)} -> {format_bytes(size.result_bytes)}"),
        ("took", f"{cost.seconds:.0f} s, {format_bytes(cost.peak_memory_bytes)} of memory at the peak"),
        ("calibration", f"{report.calibration.origin}, {report.calibration.tokens} tokens"),
        ("evaluation", f"{report.evaluation.origin}, {report.evaluation.tokens} tokens"),
        ("gate", verdict),
        ("result" if report.gate.passed else "report", str(place)),
    ]
