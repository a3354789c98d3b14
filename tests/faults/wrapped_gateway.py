"""
`python -m gateway` whose event loop can be made to stand still.
"""

import asyncio
import sys
import time

import gateway.__main__ as gateway
from tests.faults.dials import Dials

PERIOD_S = 0.7


async def block_now_and_then(dials: Dials) -> None:
    """As code does that computes, or reads a file, where it should have waited."""
    while True:
        await asyncio.sleep(PERIOD_S)
        time.sleep(dials["loop_block_s"])


def wrap(dials: Dials) -> None:
    """From the gateway's start on."""
    serve = gateway.serve

    async def wrapped(*arguments: object) -> None:
        blocking = asyncio.create_task(block_now_and_then(dials))
        try:
            await serve(*arguments)  # type: ignore[arg-type]  # whatever they are
        finally:
            blocking.cancel()

    gateway.serve = wrapped  # type: ignore[assignment]  # as above


if __name__ == "__main__":
    wrap(Dials.ours())
    sys.exit(gateway.main(sys.argv[1:]))
