"""
What each scheme costs on the default model: quality, size, time, memory; each by the real command.

    python -m tests.bench.bench_quantize [--model ...] [--only gptq] [--write]

With `--write` (`make quality`) the table goes into docs/quantization.md, between its marks.  Checkpoints go to a
temporary directory and are not kept.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from launch.known import DEFAULT_MODEL
from quant.table import Report

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/quantization.md"
BEGIN, END = "<!-- quality: begin, made by make quality -->", "<!-- quality: end -->"
RUNS = (
    ("int8", "--rotate", "none"),
    ("int8", "--rotate", "offline"),
    ("int8", "--rotate", "full"),
    ("fp8",),
    ("gptq", "--bits", "4", "--group-size", "64"),
    ("nf4",),
    ("llm-int8",),
)
MIB = 2**20


def convert(model: str, run: tuple[str, ...], out: Path) -> Report:
    """One conversion, above the gate or below it."""
    command = [sys.executable, str(ROOT / "pellucid.py"), "quantize", model, "--scheme", *run]
    done = subprocess.run([*command, "--out", str(out), "--json"], stdout=subprocess.PIPE, check=False, cwd=ROOT)
    if done.returncode not in (0, 3):
        raise SystemExit(f"--scheme {' '.join(run)} failed with {done.returncode}")
    return msgspec.json.decode(done.stdout, type=Report)


def commit() -> str:
    """The short name of what is checked out."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def table(reports: list[Report]) -> str:
    """Markdown, with what it was measured on."""
    first = reports[0]
    lines = [
        "| scheme | weights | bits per weight | perplexity | rise | top-1 | KL, nats | gate | seconds | peak memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += map(row, reports)
    quality, calibration = first.quality, first.calibration
    tokens = " or ".join(map(str, sorted({report.calibration.tokens for report in reports})))
    lines += [
        "",
        f"{first.source.name}: perplexity {quality.source_perplexity:.2f} in float32 on {first.evaluation.origin}",
        f"({quality.tokens} predictions); calibration {calibration.origin}, {tokens} tokens.",
        f"Bits are those of the linear layers, scales included.  Commit {commit()},",
        f"torch {first.versions.torch}, {first.host.processor}, {first.host.threads} threads.",
    ]
    return "\n".join(lines)


def row(report: Report) -> str:
    """One line of it."""
    quality, cost, rotate = report.quality, report.cost, report.settings.rotate
    label = report.label if rotate is None else f"{report.label}, `--rotate {rotate}`"
    return (
        f"| {label} | {report.size.result_bytes / MIB:.0f} MiB | {bits_per_weight(report):.2f} "
        f"| {quality.perplexity:.2f} | {quality.perplexity_increase:+.2%} | {quality.top1:.2%} "
        f"| {quality.kl_mean:.4f} | {'passes' if report.gate.passed else 'fails'} "
        f"| {cost.seconds:.0f} | {cost.peak_memory_bytes / MIB:.0f} MiB |"
    )


def bits_per_weight(report: Report) -> float:
    """Over all linear layers, each counted by its size."""
    weights = [linear.rows * linear.columns for linear in report.linears]
    bits = [linear.bits_per_weight * count for linear, count in zip(report.linears, weights, strict=True)]
    return sum(bits) / sum(weights)


def write(text: str, begin: str = BEGIN, end: str = END) -> None:
    """Put it between these marks of the document."""
    before, _, rest = DOCUMENT.read_text().partition(begin)
    _, _, after = rest.partition(end)
    DOCUMENT.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def main() -> None:
    """Convert by each scheme, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--only", help="the schemes whose name begins so")
    parser.add_argument("--write", action="store_true", help="into docs/quantization.md")
    arguments = parser.parse_args()
    runs = [run for run in RUNS if run[0].startswith(arguments.only or "")]
    print(f"load average before {os.getloadavg()[0]:.1f}")
    reports = []
    with tempfile.TemporaryDirectory(prefix="pellucid-bench-") as folder:
        for run in runs:
            reports.append(convert(arguments.model, run, Path(folder) / "-".join(run)))
            print(row(reports[-1]), file=sys.stderr, flush=True)
    text = table(reports)
    print(text)
    print(f"load average after {os.getloadavg()[0]:.1f}")
    if arguments.write:
        write(text)


if __name__ == "__main__":
    main()
