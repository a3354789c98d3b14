"""
Run a Supervisor over fake children: `supervised.py GATEWAY_MODES ENGINE_MODES READY BACKOFF_JSON GRACE_S`.

Modes are separated by commas; the first engine is `engine`, the next one `engine-1`, and so are gateways.
A companion, that may die as it likes, is there if the variable COMPANION has a mode for it.
READY is `yes` (at once), `never` (the gateway never is), or `loading` (the first engine never listens).
Its exit code is the supervisor's.
"""

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from launch.supervise import Backoff, ChildSpec, Supervisor

CHILD = Path(__file__).with_name("fake_child.py")


def spec(name: str, mode: str, grace_s: float) -> ChildSpec:
    return ChildSpec(name=name, command=(sys.executable, "-I", str(CHILD), name, mode), grace_s=grace_s)


def several(name: str, modes: str, grace_s: float) -> list[ChildSpec]:
    return [spec(f"{name}-{number}" if number else name, mode, grace_s) for number, mode in enumerate(modes.split(","))]


def say(message: str) -> None:
    print(f"supervisor: {message}", flush=True)


async def run(gateway: str, engine: str, ready: str, backoff: str, grace: str) -> int:
    async def until_listening() -> None:
        if ready == "loading":
            await asyncio.Event().wait()
        say("listening")

    async def until_ready() -> None:
        if ready == "never":
            await asyncio.Event().wait()
        say("ready")

    mode = os.environ.get("COMPANION")
    companions = [msgspec.structs.replace(spec("valkey", mode, float(grace)), vital=False)] if mode else []
    supervisor = Supervisor(
        gateways=several("gateway", gateway, float(grace)),
        engines=several("engine", engine, float(grace)),
        companions=companions,
        environ=dict(os.environ),
        say=say,
        on_drained=lambda: say("drained"),
        backoff=msgspec.json.decode(backoff, type=Backoff),
    )
    return await supervisor.run(until_listening, until_ready)


if __name__ == "__main__":
    sys.exit(asyncio.run(run(*sys.argv[1:])))
