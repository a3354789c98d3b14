"""
The ranks of one engine as processes: rank 0 starts the others, and nobody outlives the group.

    rank 0 --starts--> ranks 1 ..          each is `python -m engine` with a rank, a line and the shared memory
    rank r ends        rank 0 sees its process end, says so and ends as well
    rank 0 ends        the kernel kills the others (PR_SET_PDEATHSIG), also stopped ones
    rank r hangs       the next exchange fails after `rank_timeout_s` on all others; rank 0 says so and ends
    rank 0 hangs       the others end it: it may be stopped, and then only a kill helps

Whoever supervises rank 0 starts it again, and with it the group; its requests are resumed from what had been said.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import structlog
from torch._C._distributed_c10d import Store

from engine.config import EngineOptions
from engine.device import Device
from engine.device.drafting import DraftModel
from engine.device.errors import ModelError
from engine.device.native.library import Unavailable
from engine.device.pair import beside_draft, load_pair
from engine.device.ranks.book import Interconnect
from engine.device.ranks.collective import Collective, RankLost
from engine.device.ranks.gloo import Gloo, open_store
from engine.device.ranks.model import follow
from engine.device.ranks.seat import Line, Seat
from engine.device.ranks.shared_memory import SharedMemory
from engine.device.runner import exchanged_values, load_model, refuse_ranks
from telemetry.clock import CLOCK_ID

EXIT_LOST = 1
PR_SET_PDEATHSIG = 1  # linux/prctl.h
START_S_MAX = 120.0  # until the processes of all ranks have met
CLOSE_S_MAX = 5.0
HERE = "127.0.0.1"

log = structlog.get_logger("engine")


class Group:
    """The ranks, as rank 0 has them."""

    def __init__(self, seat: Seat, followers: Sequence["subprocess.Popen[bytes]"]) -> None:
        self.seat = seat
        self._followers = tuple(followers)
        self._closing = False

    def watch(self, on_lost: Callable[[RankLost], object]) -> None:
        """From now on, `on_lost` is called, on a thread of its own, when a follower's process ends."""
        for rank, process in enumerate(self._followers, 1):
            threading.Thread(target=self._await, args=(rank, process, on_lost), daemon=True).start()

    def _await(self, rank: int, process: "subprocess.Popen[bytes]", on_lost: Callable[[RankLost], object]) -> None:
        code = process.wait()
        if not self._closing:
            on_lost(RankLost(rank, ended(code)))

    def blame(self, lost: RankLost) -> RankLost:
        """A rank that is lost while all load: the message for whoever waits, with what is known of its end."""
        process = self._followers[lost.rank - 1] if 0 < lost.rank <= len(self._followers) else None
        try:
            code = process.wait(CLOSE_S_MAX) if process is not None else None
        except subprocess.TimeoutExpired:
            code = None
        return lost if code is None else RankLost(lost.rank, f"{ended(code)} while it loaded")

    def close(self, grace_s: float = CLOSE_S_MAX) -> None:
        """End the followers; who does not within `grace_s` is killed."""
        self._closing = True
        self.seat.close()
        for process in self._followers:
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ended(code: int) -> str:
    """`was killed by SIGSEGV` or `ended with code 1`."""
    return f"ended with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def ranks_of(options: EngineOptions) -> int:
    """How many processes compute the model."""
    return options.tensor_parallel * options.pipeline_parallel


def start_group(options: EngineOptions) -> Group:
    """Start the other ranks, which begin to load at once; for rank 0.  Raises ModelError, MemoryShort and RankLost."""
    refuse_ranks(options)
    size = ranks_of(options)
    memory = _shared_memory(options)
    store = None if memory is not None else open_store(HERE, 0, leads=True, start_s=START_S_MAX)
    where = {"memory": memory.descriptor} if memory is not None else {"meeting_port": store.port if store else 0}
    common = msgspec.structs.replace(options, **where)
    pairs = [socket.socketpair() for _ in range(size - 1)]
    followers = [_start_follower(common, rank, theirs) for rank, (_, theirs) in enumerate(pairs, 1)]
    lines = [Line(ours, rank=rank) for rank, (ours, _) in enumerate(pairs, 1)]
    collective: Collective | None = memory
    if store is not None:
        collective = _gloo(store, common)
    assert collective is not None
    interconnect = Interconnect(collective, stages=options.pipeline_parallel)
    return Group(Seat(interconnect, lines, timeout_s=options.rank_timeout_s), followers)


def _start_follower(options: EngineOptions, rank: int, line: socket.socket) -> "subprocess.Popen[bytes]":
    with line:
        given = msgspec.structs.replace(options, rank=rank, control=line.fileno())
        command = [sys.executable, "-P", "-m", "engine", "--options", msgspec.json.encode(given).decode()]
        inherited = [descriptor for descriptor in (given.control, given.memory) if descriptor >= 0]
        return subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL)


def join_group(options: EngineOptions) -> Seat:
    """The place of a rank that rank 0 has started.  From now on it does not outlive rank 0.  Raises RankLost."""
    leader = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != leader:  # it died before we asked
            os._exit(EXIT_LOST)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which ends us
    line = Line(socket.socket(fileno=options.control), rank=0)
    collective: Collective
    if options.memory >= 0:
        size, timeout_s = ranks_of(options), options.rank_timeout_s
        collective = SharedMemory.join(options.memory, options.rank, size, exchanged_values(options), timeout_s)
    else:
        store = open_store(HERE, options.meeting_port, leads=False, start_s=START_S_MAX)
        collective = _gloo(store, options)
    interconnect = Interconnect(collective, stages=options.pipeline_parallel)
    return Seat(interconnect, [line], timeout_s=options.rank_timeout_s)


def _shared_memory(options: EngineOptions) -> SharedMemory | None:
    """For rank 0; None: ranks are to speak over gloo, or have to."""
    if options.interconnect == "gloo":
        return None
    try:
        return SharedMemory.create(ranks_of(options), exchanged_values(options), options.rank_timeout_s)
    except Unavailable as reason:
        if options.interconnect == "shared-memory":
            raise ModelError(f"--interconnect shared-memory: {reason}") from reason
        log.warning("no_shared_memory", error=str(reason), consequence="ranks speak over gloo, which is slower")
        return None


def _gloo(store: Store, options: EngineOptions) -> Gloo:
    return Gloo(
        store,
        rank=options.rank,
        size=ranks_of(options),
        address=HERE,
        timeout_s=options.rank_timeout_s,
        start_s=START_S_MAX,
        clock_id=CLOCK_ID,
    )


@contextlib.contextmanager
def led(options: EngineOptions) -> Iterator[tuple[Device, DraftModel | None]]:
    """
    The device of an engine, computed by as many ranks as its options say, and its draft model.

    Raises ModelError, and RankLost: also inside the block, if a rank is lost there while the device computes; if one
    ends while it does not, this process ends.
    """
    if ranks_of(options) == 1:
        yield load_pair(options)
        return
    group = start_group(options)
    try:
        try:
            pair = load_pair(options, group.seat)
        except RankLost as lost:
            raise group.blame(lost) from lost
        group.watch(_end)
        yield pair
    except RankLost:
        group.close(0)
        raise
    finally:
        group.close()


def follow_leader(options: EngineOptions) -> int:
    """Be one of the ranks that rank 0 has started, until it ends.  Returns the exit code.  Raises ModelError."""
    leader = os.pidfd_open(os.getppid())
    seat = join_group(options)
    loaded = load_model(beside_draft(options), seat=seat)
    log.info("rank_ready", rank=options.rank, replica=options.replica)
    try:
        follow(loaded.model, seat, loaded.parts)
    except RankLost as lost:
        log.critical("rank_lost", by=options.rank, error=str(lost), consequence="the engine is started again")
        if lost.rank:  # Rank 0 finds the same, and ends us; who it is is for it to say.
            time.sleep(options.rank_timeout_s)
        signal.pidfd_send_signal(leader, signal.SIGKILL)  # It may be stopped, and would never notice.
        return EXIT_LOST
    return 0


def _end(lost: RankLost) -> None:
    log.critical("rank_lost", error=str(lost), consequence="this engine ends, and has to be started again")
    os._exit(EXIT_LOST)
