"""
`pellucid engine`: an engine alone, for gateways on other machines.

It is kept alive as the engines of `pellucid serve` are.  Gateways must know the secret; nothing else protects the line.
"""

import asyncio
import socket
import time
from collections.abc import Callable

import msgspec

from launch.address import bound, reachable
from launch.cores import share_of, usable_cpus
from launch.errors import UserError
from launch.fleet import engine_children, placed
from launch.options import ServeOptions
from launch.parse import parse_engine
from launch.probe import until_connects
from launch.secret import engine_secret
from launch.serve import (
    check_memory,
    check_ranks,
    child_environ,
    engine_options,
    models_of,
    refuse_optimized,
    speaker,
)
from launch.sizes import format_bytes
from launch.store import data_dir
from launch.supervise import Supervisor

LISTEN = "--listen"


def run_engine(options: ServeOptions, listen: str, environ: dict[str, str], out: Callable[[str], None]) -> int:
    """Serve gateways until a signal; the exit code.  `out` gets what the person asked for.  Raises UserError."""
    started_s = time.monotonic()
    say = speaker(options.log_format)
    refuse_optimized()
    check_ranks(options)
    host, port = _address(listen)
    secret = engine_secret(options, environ)
    with bound(host, port, LISTEN) as free:
        port = int(free.getsockname()[1])
    data = data_dir(options.data_dir, environ)
    model, draft = models_of(options, data)
    kv_bytes = check_memory(options, model, draft)
    alone = engine_options(options, model, data, kv_bytes, draft)
    share = share_of(0, 1, options.ranks, options.threads, usable_cpus())
    engine = msgspec.structs.replace(placed(alone, share), listen=f"tcp:{host}:{port}")
    supervisor = Supervisor(
        engines=engine_children([engine]), gateways=(), environ=child_environ(environ) | secret, say=say
    )
    memory = f"{format_bytes(kv_bytes)} for keys and values"
    out(f"Starting an engine for {engine.model_name} from {model.path}, with {memory}.")

    async def listening() -> None:
        await until_connects(reachable(host), port, say)

    async def ready() -> None:
        out(banner(engine.model_name, host, port, time.monotonic() - started_s))

    return asyncio.run(supervisor.run(listening, ready))


def _address(listen: str) -> tuple[str, int]:
    try:
        host, _, port = parse_engine(listen).removeprefix("tcp:").rpartition(":")
    except ValueError as error:
        raise UserError(f"{LISTEN}: {error}") from error
    return host, int(port)


def banner(model_name: str, host: str, port: int, start_s: float) -> str:
    """What the person sees when it is there: what to say on the other machine."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return (
        f"\nAn engine for {model_name} waits for gateways, {start_s:.1f} s after the start.  Where they run:\n\n"
        f"pellucid serve --replicas 0 --engine tcp://{name}:{port} --engine-secret-file FILE   # with this --model\n\n"
        "The line between them is not encrypted: keep it to a network of your own, or put it into a tunnel.\n"
    )
