"""
The engines and the gateway's workers of one `pellucid serve`: what each of several is told that an only one is not.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.config import EngineOptions
from gateway.config import GatewayOptions
from launch.cores import Share, share_of, usable_cpus
from launch.options import ServeOptions
from launch.supervise import ChildSpec, python_command

DRAIN_MARGIN_S = 15.0  # after its own drain time the gateway ends what is left, closes, and delivers its last spans
ENGINE_GRACE_S = 10.0


def engine_socket(folder: Path, replica: int = 0) -> Path:
    """Where an engine replica listens."""
    return folder / f"engine-{replica}.sock"


def worker_socket(folder: Path, worker: int = 0) -> Path:
    """Where a gateway worker answers the others."""
    return folder / f"gateway-{worker}.sock"


def all_engines(one: EngineOptions, options: ServeOptions, folder: Path) -> list[EngineOptions]:
    """What each replica is told, where `one` is what an only one would be."""
    cpus = usable_cpus()
    engines = []
    for replica in range(options.replicas):
        share = share_of(replica, options.replicas, options.ranks, options.threads, cpus)
        changes: dict[str, object] = {
            "replica": replica,
            "listen": f"unix:{engine_socket(folder, replica)}",
            "kv_memory_bytes": one.kv_memory_bytes // options.replicas,
        }
        engines.append(msgspec.structs.replace(placed(one, share), **changes))
    return engines


def placed(engine: EngineOptions, share: Share) -> EngineOptions:
    """The same with the threads and processors of `share`."""
    return msgspec.structs.replace(engine, threads=share.threads, rank_cpus=share.rank_cpus)


def all_workers(one: GatewayOptions, options: ServeOptions, folder: Path) -> list[GatewayOptions]:
    """What each worker is told, where `one` is what an only one would be."""
    if options.workers == 1:
        return [one]
    sockets = tuple(str(worker_socket(folder, worker)) for worker in range(options.workers))
    return [msgspec.structs.replace(one, worker=worker, worker_sockets=sockets) for worker in range(options.workers)]


def engine_children(engines: Sequence[EngineOptions]) -> list[ChildSpec]:
    """As programs to keep alive."""
    return [
        ChildSpec(
            name=_numbered("engine", number, engines),
            command=python_command("engine", engine),
            grace_s=ENGINE_GRACE_S,
        )
        for number, engine in enumerate(engines)
    ]


def worker_children(workers: Sequence[GatewayOptions]) -> list[ChildSpec]:
    """As programs to keep alive, that inherit the sockets they listen on."""
    return [
        ChildSpec(
            name=_numbered("gateway", number, workers),
            command=python_command("gateway", worker),
            grace_s=worker.drain_s + DRAIN_MARGIN_S,
            descriptors=tuple(one for one in (worker.listener, worker.admin_listener) if one >= 0),
        )
        for number, worker in enumerate(workers)
    ]


def _numbered(name: str, number: int, all_of_them: Sequence[object]) -> str:
    """What one of several is called; an only one needs no number."""
    return f"{name}-{number}" if len(all_of_them) > 1 else name
