"""
The ranks of one engine as processes: rank 0 starts the others, and nobody outlives the group.

    rank 0 --starts--> ranks 1 ..   each is `python -m engine` with a rank, a line, a pulse and the shared memory
    rank r ends        its pulse is gone: rank 0 says how it ended, and ends as well
    rank r hangs       in a step the next exchange fails after `rank_timeout_s` on all others, else it has no pulse for
                       twice as long: rank 0 says so and ends
    rank r refuses     to load: its last words are those of rank 0, which ends as it would for a reason of its own
    rank 0 ends        the kernel kills the others (PR_SET_PDEATHSIG), also stopped ones
    rank 0 hangs       the others notice likewise, and kill it: it may be stopped, and then nothing else helps

All this holds also while they load, and while they have nothing to do.  Whoever supervises rank 0 starts it again, and
with it the group; its requests are resumed from what had been said.
"""

import contextlib
import os
import signal
import socket
import struct
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
from engine.device.ranks.pulse import Pulse
from engine.device.ranks.seat import Line, LineClosed, Seat
from engine.device.ranks.shared_memory import SharedMemory, reserve
from engine.device.runner import exchanged_values, load_model, refuse_ranks
from telemetry import logs
from telemetry.clock import CLOCK_ID

EXIT_LOST, EXIT_REFUSED = 1, 2
START_S_MAX = 120.0  # until the processes of all ranks have met
CLOSE_S_MAX = 5.0
KNOWN_S = 0.3  # until the end of a process is known, when others have missed it
HERE = "127.0.0.1"

Refuse = Callable[[str], int]
"""Say to the person what to mend; returns this process's exit code."""

log = structlog.get_logger("engine")


class Group:
    """The ranks, as rank 0 has them.  While it is open, this process ends with any of them."""

    def __init__(self, options: EngineOptions, refuse: Refuse) -> None:
        """Start the other ranks, which begin to load at once.  Raises ModelError, MemoryShort and RankLost."""
        refuse_ranks(options)
        options = msgspec.structs.replace(options, memory=_shared_memory(options))
        store = None
        if not options.memory:
            store = open_store(HERE, 0, leads=True, start_s=START_S_MAX)
            options = msgspec.structs.replace(options, meeting_port=store.port)
        self._refuse = refuse
        self._ending = threading.Lock()  # who has it says why this group ends, and nobody else does
        self._followers: list[subprocess.Popen[bytes]] = []
        self._pulses: list[Pulse] = []
        lines = [self._start(options, rank) for rank in range(1, ranks_of(options))]
        self.seat = _seat(options, lines, store)
        for descriptor in options.memory[2:]:  # of the other stages, who have inherited them
            os.close(descriptor)

    def _start(self, options: EngineOptions, rank: int) -> Line:
        line, control = socket.socketpair()
        end, pulse = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with control, pulse:
            given = msgspec.structs.replace(options, rank=rank, control=control.fileno(), pulse=pulse.fileno())
            command = [sys.executable, "-P", "-m", "engine", "--options", msgspec.json.encode(given).decode()]
            inherited = (given.control, given.pulse, *given.memory)
            process = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL)
        self._followers.append(process)
        self._pulses.append(Pulse(end, rank=rank, timeout_s=options.rank_timeout_s))
        threading.Thread(target=self._attend, args=(process, self._pulses[-1]), daemon=True).start()
        return Line(line, rank=rank)

    def _attend(self, process: "subprocess.Popen[bytes]", pulse: Pulse) -> None:
        try:
            words = pulse.attend(START_S_MAX)
            lost = None if words else RankLost(pulse.rank, ended(process.wait(CLOSE_S_MAX)))
        except subprocess.TimeoutExpired:
            lost = RankLost(pulse.rank, "has hung up")
        except RankLost as error:
            lost = error
        if not self._ending.acquire(blocking=False):
            return
        if lost is not None:
            log.critical("rank_lost", error=str(lost), consequence="this engine ends, and has to be started again")
        logs.reset()  # there is no later
        for follower in self._followers:
            follower.kill()  # One that has been stopped before it asked the kernel to would stay.
        os._exit(EXIT_LOST if lost is not None else self._refuse(f"rank {pulse.rank}: {words}"))

    def close(self, grace_s: float = CLOSE_S_MAX) -> None:
        """End the followers, once; who does not within `grace_s` is killed."""
        self._ending.acquire()  # If somebody else has it, this process ends here.
        self.seat.close()
        for process, pulse in zip(self._followers, self._pulses, strict=True):
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            pulse.close()


def ended(code: int) -> str:
    """`was killed by SIGSEGV` or `ended with code 1`."""
    if code >= 0:
        return f"ended with code {code}"
    return f"was killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"


def ranks_of(options: EngineOptions) -> int:
    """How many processes compute the model."""
    return options.tensor_parallel * options.pipeline_parallel


def _seat(options: EngineOptions, lines: Sequence[Line], store: Store | None) -> Seat:
    """
    The place of a rank among all, and in its stage.  Raises RankLost, Unavailable and MemoryShort.

    `store`: of rank 0, where the ranks are to find each other; the others look for it.
    """
    number, place = divmod(options.rank, options.tensor_parallel)
    if not options.memory and store is None:
        store = open_store(HERE, options.meeting_port, leads=False, start_s=START_S_MAX)
    everybody = _collective(options, options.rank, ranks_of(options), options.memory[:1], store, "ranks")
    stage = None
    if _nests(options):
        memory = options.memory[1 + number : 2 + number]
        stage = _collective(options, place, options.tensor_parallel, memory, store, f"stage {number}")
    return Seat(
        Interconnect(everybody, stages=options.pipeline_parallel),
        lines,
        timeout_s=options.rank_timeout_s,
        stage=None if stage is None else Interconnect(stage),
    )


def _nests(options: EngineOptions) -> bool:
    """Whether there are several stages, and several ranks in each."""
    return options.tensor_parallel > 1 and options.pipeline_parallel > 1


def _collective(
    options: EngineOptions, rank: int, size: int, memory: Sequence[int], store: Store | None, name: str
) -> Collective:
    if memory:
        return SharedMemory.join(memory[0], rank, size, exchanged_values(options), options.rank_timeout_s)
    assert store is not None
    return Gloo(
        store,
        rank=rank,
        size=size,
        address=HERE,
        timeout_s=options.rank_timeout_s,
        start_s=START_S_MAX,
        clock_id=CLOCK_ID,
        name=name,
    )


class _Leader:
    """Rank 0, as the others have it: from now on this process does not outlive it."""

    def __init__(self, options: EngineOptions, line: socket.socket) -> None:
        self._rank = options.rank
        pid, _, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if os.getppid() != pid:  # it died before engine.__main__ asked to die with it
            os._exit(EXIT_LOST)
        self._process = os.pidfd_open(pid)
        self.pulse = Pulse(socket.socket(fileno=options.pulse), rank=0, timeout_s=options.rank_timeout_s)
        threading.Thread(target=self._attend, daemon=True).start()

    def kill(self, lost: RankLost) -> None:
        """It has to end, and can not be asked to: it may be stopped.  This process ends with it."""
        log.critical("rank_lost", by=self._rank, error=str(lost), consequence="the engine is started again")
        logs.reset()  # there is no later
        signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def _attend(self) -> None:
        try:
            self.pulse.attend(START_S_MAX)
        except RankLost as lost:
            self.kill(lost)


def _shared_memory(options: EngineOptions) -> tuple[int, ...]:
    """What the ranks are to join; nothing: they are to speak over gloo, or have to."""
    if options.interconnect == "gloo":
        return ()
    sizes = [ranks_of(options), *([options.tensor_parallel] * options.pipeline_parallel if _nests(options) else ())]
    try:
        return tuple(reserve(size, exchanged_values(options)) for size in sizes)
    except Unavailable as reason:
        if options.interconnect == "shared-memory":
            raise ModelError(f"--interconnect shared-memory: {reason}") from reason
        log.warning("no_shared_memory", error=str(reason), consequence="ranks speak over gloo, which is slower")
        return ()


@contextlib.contextmanager
def led(options: EngineOptions, refuse: Refuse) -> Iterator[tuple[Device, DraftModel | None]]:
    """
    The device of an engine, computed by as many ranks as its options say, and its draft model.

    Raises ModelError, and RankLost: also inside the block, if a rank is lost there while the device computes.  If one
    is lost at another time this process ends, and what one of them has refused is handed to `refuse` first.
    """
    if ranks_of(options) == 1:
        yield load_pair(options)
        return
    group = Group(options, refuse)
    try:
        yield load_pair(options, group.seat)
    except BaseException as error:
        if isinstance(error, RankLost):
            time.sleep(KNOWN_S)  # Whoever attends to it may know why it is lost, and ends this process.
        group.close(0)
        raise
    group.close()


def follow_leader(options: EngineOptions) -> int:
    """Be one of the ranks that rank 0 has started, until it ends.  Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Who sends them to all of us means rank 0, which ends the others.
        signal.signal(number, signal.SIG_IGN)
    line = socket.socket(fileno=options.control)
    leader = _Leader(options, line)
    try:
        seat = _seat(options, [Line(line, rank=0)], None)
        loaded = load_model(beside_draft(options), seat=seat)
        log.info("rank_ready", rank=options.rank, replica=options.replica)
        follow(loaded.model, seat, loaded.parts)
    except ModelError as error:
        leader.pulse.last_words(str(error))
        return EXIT_REFUSED
    except LineClosed:
        return EXIT_LOST
    except RankLost as lost:
        if lost.rank:  # Rank 0 finds the same, and ends us; who it is is for it to say.
            time.sleep(options.rank_timeout_s + CLOSE_S_MAX)
        leader.kill(lost)
        return EXIT_LOST
    return 0
