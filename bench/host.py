"""
What is measured, and where: a figure without them is none.
"""

import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """The commit that is measured, with a plus where files differ from it; empty outside a clone."""
    if not (ROOT / ".git").exists():  # installed: a clone around it is another project's
        return ""
    git = ["git", "describe", "--always", "--abbrev=10", "--dirty=+"]
    try:
        return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # there is no git
        return ""


def host() -> str:
    """Processor, cores, kernel."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{platform.node()}: {processor}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def busy_s() -> float:
    """Processor seconds that all cores together have spent on anything, ever; 0 where nobody says."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def tree_s(process: int) -> float:
    """Processor seconds that `process` and all that it has started have spent; 0 where nobody says."""
    spent: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        number = int(stat.parent.name)
        children.setdefault(int(fields[1]), []).append(number)
        spent[number] = sum(map(int, fields[11:15]))  # in user and system mode, and of children that have ended
    ticks, todo = 0, [process]
    while todo:
        number = todo.pop()
        ticks += spent.get(number, 0)
        todo += children.get(number, [])
    return ticks / os.sysconf("SC_CLK_TCK")
