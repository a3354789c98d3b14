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
