"""
`python -m engine --options JSON`: load a model, listen, serve until SIGTERM.

Exit codes: 0 after SIGTERM or SIGINT, 1 if the device is lost (a rank of several), 2 after one line on stderr for what
the person who started it can mend.
"""

import ctypes
import os
import secrets
import signal
import sys
from types import FrameType

import msgspec
import structlog

from engine.api import Hello
from engine.config import EngineOptions, SchedulerConfig
from engine.device import Device, DeviceFacts, DeviceLost
from engine.device.drafting import DraftModel
from engine.device.errors import ModelError
from engine.handshake import HandshakeError, secret_in
from engine.loop import Loop
from engine.recorder import open_journal
from engine.scheduler import Scheduler
from engine.server import ListenError, Server
from engine.sight import sight_of
from telemetry import logs
from telemetry.clock import CLOCK_ID, now_ns
from telemetry.disturbance import Disturbances

EXIT_LOST, EXIT_USAGE = 1, 2
SPIN_COUNT = "10000"
"""
How long libgomp's threads spin at a barrier before they sleep.  Its own default is thirty times as long.  On an idle
machine that is worth some percent; but a step has hundreds of barriers, and with one busy neighbour on two cores (a
gateway, say) each of them waits for the kernel's scheduler then, and a step takes twenty times as long.
"""

PR_SET_PDEATHSIG = 1  # linux/prctl.h
STARTED_NS = now_ns()  # torch, the model, the warm-up: all that a cold start is made of comes after it

log = structlog.get_logger("engine")


def main(arguments: list[str]) -> int:
    """Run an engine.  Returns its exit code."""
    if not __debug__:
        return _refuse("python -O removes the assertions that guard the books: start without it")
    if len(arguments) != 2 or arguments[0] != "--options":
        return _refuse("usage: python -m engine --options JSON (see engine.config.EngineOptions)")
    try:
        options = msgspec.json.decode(arguments[1], type=EngineOptions)
        logs.configure(options.log_level, options.log_format)
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
        if options.rank_cpus:
            _keep_to(options.rank_cpus[options.rank])  # threads inherit it
        if options.rank:
            _die_with_parent()
        from engine import group  # noqa: PLC0415 torch takes seconds to load

        if options.rank:
            return group.follow_leader(options)
        with group.led(options, _refuse) as (device, drafter):
            said = hello(options, device)
            server = Server(options.listen, said, secret_in(os.environ))
            serve(options, device, server, drafter, epoch=said.epoch)
    except msgspec.MsgspecError as error:
        return _refuse(f"--options: {error}")
    except (ModelError, ListenError, HandshakeError) as error:
        return _refuse(str(error))
    except DeviceLost as lost:
        log.critical("device_lost", error=str(lost), consequence="this engine ends, and has to be started again")
        return EXIT_LOST
    return 0


def serve(
    options: EngineOptions, device: Device, server: Server, drafter: DraftModel | None = None, *, epoch: str = ""
) -> None:
    """Serve `device` over `server` until a signal.  Raises DeviceLost."""
    scheduler = Scheduler(scheduler_config(options, device, drafter.facts if drafter is not None else None))
    journal = open_journal(
        options.flight_directory,
        f"engine-{options.replica}",
        scheduler,
        ring_bytes=options.flight_memory_bytes,
        epoch=epoch,
    )
    disturbances = Disturbances()
    loop = Loop(
        scheduler,
        device,
        server,
        drafter=drafter,
        recorder=journal,
        replica=options.replica,
        disturbances=disturbances,
    )
    server.shows(lambda: sight_of(scheduler.pool, [*scheduler.running, *scheduler.waiting], now_ns()))

    def stop(_number: int, _frame: FrameType | None) -> None:
        loop.stop()
        server.wake()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    log.info(
        "engine_ready",
        replica=options.replica,
        model=options.model_name,
        weights=device.facts.weights.label,
        **device.facts.details,
    )
    if drafter is not None:
        log.info("draft_model_ready", model=options.draft_model, **drafter.facts.details)
    disturbances.start()
    try:
        loop.run()
    finally:
        disturbances.stop()
        server.close()
        if journal is not None:
            journal.close()


def scheduler_config(options: EngineOptions, device: Device, draft: DeviceFacts | None = None) -> SchedulerConfig:
    """The core's bounds: what was asked for, and what the device and that of the draft model have."""
    facts = device.facts
    return SchedulerConfig(
        blocks_max=facts.blocks_max,
        block_slots=facts.block_slots,
        context_max=facts.context_max,
        sequences_max=options.sequences_max,
        tokens_step_max=options.tokens_step_max,
        waiting_max=options.waiting_max,
        vocab_size=facts.vocab_size,
        prefix_cache=options.prefix_cache,
        drafts_max=options.drafts_max,
        draft_blocks_max=draft.blocks_max if draft is not None else 0,
        draft_context_max=draft.context_max if draft is not None else 0,
    )


def hello(options: EngineOptions, device: Device) -> Hello:
    """What this engine says of itself."""
    facts = device.facts
    return Hello(
        epoch=secrets.token_hex(8),
        replica=options.replica,
        clock_id=CLOCK_ID,
        model=options.model_name,
        fingerprint=facts.fingerprint,
        reproducible=facts.reproducible,
        vocab_size=facts.vocab_size,
        context_max=scheduler_config(options, device).sequence_tokens_max,
        block_slots=facts.block_slots,
        blocks_max=facts.blocks_max,
        sequences_max=options.sequences_max,
        waiting_max=options.waiting_max,
        eos_ids=facts.eos_ids,
        details=facts.details
        | {
            "first_token_s": f"{(facts.first_token_ns - STARTED_NS) / 1e9:.2f}",
            "tokens_step_max": str(options.tokens_step_max),
            "prefix_cache": "on" if options.prefix_cache else "off",
        },
        weights=facts.weights,
    )


def _die_with_parent() -> None:
    """A rank is of no use without rank 0.  Asked for first, since loading torch takes seconds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _keep_to(cpus: tuple[int, ...]) -> None:
    """Run on these processors alone.  Where that is not to be had it is slower, and no reason not to serve."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # taken out of our set since the supervisor looked
        log.warning("processors_not_to_be_had", cpus=cpus, error=str(error))


def _refuse(message: str) -> int:
    print(f"pellucid engine: {message}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
