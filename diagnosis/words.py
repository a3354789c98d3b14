"""
Answers as lines for a terminal.
"""

from diagnosis.causes import BY_NAME
from diagnosis.doctor import QUANTITIES, Report
from diagnosis.why import Why, duration

_BAR = 24


def why_lines(answer: Why) -> list[str]:
    """Why one request took so long."""
    lines = [f"{answer.request_id}  {answer.outcome or 'still running'}  {duration(answer.e2e_ns)}", answer.summary, ""]
    for one in answer.causes:
        bar = ("#" * round(one.share * _BAR)).ljust(_BAR)
        usual = "" if one.baseline_ns is None else f"  usually {duration(one.baseline_ns)}"
        about = "~" if one.estimate else " "
        lines.append(f"  {bar} {one.share:4.0%} {about}{duration(one.ns):>9}  {one.title}{usual}")
    if answer.others:
        lines += ["", f"Who else was in its steps ({answer.steps_known} of them are remembered):"]
        lines += [f"  {duration(one.ns):>9}  {one.request_id}" for one in answer.others]
    changes = {BY_NAME[answer.blamed].title: answer.change} if answer.blamed else {}
    changes |= {one.title: one.change for one in answer.causes if not BY_NAME[one.cause].ordinary and one.share >= 0.1}
    if changes:
        lines += ["", "What would help:"]
        lines += [f"  {title}: {change}" for title, change in changes.items()]
    if answer.absent:
        lines += ["", "What it is not: " + "; ".join(one.words for one in answer.absent) + "."]
    return lines + _silent(answer.workers_silent)


def report_lines(report: Report) -> list[str]:
    """What is the matter with a system."""
    window = f" in {report.window_s:.0f} s" if report.window_s else ""
    lines = [f"{_count(report.requests, 'request')} and {_count(report.steps, 'step')}{window}."]
    for quantity in QUANTITIES:
        tails = [
            f"{name.partition('_')[2]} {duration(tail.quantile_ns)}"
            for name, tail in report.tails.items()
            if name.startswith(f"{quantity.name}_")
        ]
        if tails:
            lines.append(f"  {quantity.title}: {', '.join(tails)}")
    if report.in_flight:
        lines.append(f"In flight: {_count(report.in_flight, 'request')}, the oldest for {duration(report.oldest_ns)}.")
    lines.append("")
    if not report.requests:
        lines.append("No request has ended in that time: there is nothing to judge.")
    elif not report.findings:
        lines.append("Nothing is the matter: no cause but their own work carries the slow requests.")
    for number, one in enumerate(report.findings, 1):
        lines.append(f"{number}. {one.title}: {one.words}.")
        lines += [f"     {name} = {_shown(value)}" for name, value in one.evidence.items()]
        lines.append(f"   What would help: {one.change}.")
    return lines + _silent(report.workers_silent)


def _silent(workers: list[int]) -> list[str]:
    if not workers:
        return []
    numbers = ", ".join(map(str, workers))
    return ["", f"Workers of the gateway that did not answer, so that their part is missing: {numbers}."]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _shown(value: int | float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
