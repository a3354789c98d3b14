"""
A crashing gateway under the real supervisor: `supervised_gateway.py OPTIONS_JSON`.  Its engine is somebody else's: here
is a child in its place that only waits.
"""

import asyncio
import os
import sys
from pathlib import Path

from launch.supervise import ChildSpec, Supervisor

GATEWAY = Path(__file__).with_name("crashing_gateway.py")
WAITING = "import signal; signal.pause()"


async def run(options: str) -> int:
    """Until a signal; the exit code."""

    async def at_once() -> None:
        return

    supervisor = Supervisor(
        gateways=[ChildSpec(name="gateway", command=(sys.executable, str(GATEWAY), "--options", options), grace_s=5.0)],
        engines=[ChildSpec(name="engine", command=(sys.executable, "-c", WAITING), grace_s=5.0)],
        environ=dict(os.environ),
        say=lambda message: print(f"pellucid: {message}", file=sys.stderr, flush=True),
    )
    return await supervisor.run(at_once, at_once)


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1])))
