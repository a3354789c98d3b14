"""
Ranks anywhere, over torch.distributed's gloo: one TCP connection between each two.

gloo's own sum goes round a ring and adds in an order that depends on the place in the buffer.  So each rank sends what
it has to each other, its entry stamp in front, and sums for itself, in the order of the ranks.  That is one hop where
a ring takes several, no more bytes than a ring's gather receives, and it is known of each rank whether it came.

What goes over the connections is neither encrypted nor signed: the addresses belong on a network of their own.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from engine.device.ranks.clocks import Clocks
from engine.device.ranks.collective import RankLost, Stamps

STAMP_BYTES = 8
TAG = 1  # One for all: between two ranks, messages arrive in the order in which they were sent.
OTHERS_S = 0.3
BLAME_S = 0.75
"""How long it may take to agree on who is lost, once somebody is; of that, how long to wait for word of others."""


def open_store(host: str, port: int, *, leads: bool, start_s: float) -> TCPStore:
    """
    Where the ranks of a group find each other: rank 0 leads, and serves it at `host` alone until it drops it.

    Args:
        port: for rank 0, 0 takes a free one, which `.port` of what comes back names.

    Raises RankLost where rank 0 serves nothing there within the time, and OSError where it cannot.
    """
    timeout = timedelta(seconds=start_s)
    if not leads:
        try:
            return TCPStore(host, port, is_master=False, timeout=timeout)
        except RuntimeError as error:
            raise RankLost(0, f"does not answer at {host}:{port}: {_words(error)}") from error
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        port = listener.getsockname()[1]
        descriptor = listener.detach()
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor)


class Gloo:
    """
    One rank's way to the others, wherever they are.  Of one thread.

    Args:
        store: from `open_store`; groups of different names may share it.
        address: this rank's, an IP address or a name of one; the others connect to it, and it to them from there.
        timeout_s: of each exchange; finding out who is lost takes BLAME_S more at the most.
        start_s: until all ranks have come to the start.
        clock_id: equal for processes that read the same monotonic clock, empty where nobody can tell.
        clock: ns that never go back.

    Raises RankLost for a rank that does not come to the start.
    """

    kind = "gloo"

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        address: str,
        timeout_s: float,
        start_s: float,
        clock_id: str,
        clock: Callable[[], int] = time.monotonic_ns,
        name: str = "ranks",
    ) -> None:
        assert 0 <= rank < size
        self.rank = rank
        self.size = size
        self._others = [other for other in range(size) if other != rank]
        self._timeout_s = timeout_s
        self._clock = clock
        self._store = PrefixStore(name, store)
        self._closed = False
        self._lost: tuple[int, str] | None = None  # No exception: its traceback would hold the group.
        self._outgoing = torch.empty(0, dtype=torch.uint8)
        self._leaving = self._outgoing  # What _unsent reads.
        self._incoming = [self._outgoing] * size
        self._unsent: list[tuple[int, Work]] = []  # At most one exchange's.
        ids = self._meet(clock_id, start_s)
        self._group: ProcessGroupGloo | None = self._connect(address, start_s)
        self._clocks = Clocks(rank, ids, clock)
        self._clocks.estimate(self)

    @property
    def clock_error_ns(self) -> int:
        """By how much the stamps of ranks on other hosts may be wrong; 0 where all read one clock."""
        return self._clocks.error_ns

    def sum(self, values: Tensor) -> Stamps:
        """Sum float32 `values`, contiguous and of any shape, over all ranks, in place.  Raises RankLost."""
        entered_ns = self._clock()
        flat = values.view(-1)
        self._write(entered_ns, flat)
        self._pass(self._others, self._others, [flat.numel()] * self.size)
        for rank in range(self.size):
            part = _floats(self._outgoing if rank == self.rank else self._incoming[rank], flat.numel())
            if rank == 0:
                flat.copy_(part)
            else:
                flat.add_(part)
        stamps = self._stamps(self._others)
        # Of rank 0's clock all ranks have the same reading, so they all find that it is time, or none does.
        if self._clocks.outdated(stamps[0]):
            self._clocks.estimate(self)
        return self._translated(stamps)

    def gather(self, values: Tensor, counts: Sequence[int]) -> tuple[list[Tensor], Stamps]:
        """
        Bring the `counts[rank]` float32 `values` of each rank to rank 0.  Raises RankLost.

        Returns: on rank 0 those of all ranks, each [counts[rank]], whose memory is the caller's; elsewhere none.
        """
        assert values.numel() == counts[self.rank]
        self._write(self._clock(), values.view(-1))
        if self.rank:
            self._pass([0], [], counts, finish=False)
            return [], self._translated(self._stamps([]))
        self._pass([], self._others, counts)
        gathered = [_floats(self._incoming[rank], counts[rank]).clone() for rank in self._others]
        return [values.view(-1).clone(), *gathered], self._translated(self._stamps(self._others))

    def send(self, values: Tensor, receiver: int) -> Stamps:
        """Hand float32 `values`, contiguous, to a rank of a higher number.  Raises RankLost."""
        assert self.rank < receiver < self.size
        self._write(self._clock(), values.view(-1))
        self._pass([receiver], [], [values.numel()] * self.size, finish=False)
        return self._translated(self._stamps([]))

    def receive(self, values: Tensor, sender: int) -> Stamps:
        """Fill `values` with what a rank of a lower number sends.  Raises RankLost."""
        assert 0 <= sender < self.rank
        flat = values.view(-1)
        self._write(self._clock(), flat[:0])
        self._pass([], [sender], [flat.numel()] * self.size)
        flat.copy_(_floats(self._incoming[sender], flat.numel()))
        return self._translated(self._stamps([sender]))

    def exchange_stamp(self, stamp_ns: int, *, receiver: int = -1, sender: int = -1) -> int:
        """For `Clocks`: hand one number to a rank, or take one.  Raises RankLost."""
        self._write(stamp_ns, torch.empty(0))
        self._pass([receiver] if receiver >= 0 else [], [sender] if sender >= 0 else [], [0] * self.size)
        return _stamp(self._incoming[sender]) if sender >= 0 else stamp_ns

    def close(self) -> None:
        """Let go of what it holds, when what it sent has left; the others notice when they next wait for this one."""
        if self._closed:
            return
        self._closed = True
        try:
            _wait(self._unsent, time.monotonic() + self._timeout_s)
        except RuntimeError:
            pass  # It is for those who wait for it to say so.
        self._unsent.clear()
        self._group = None  # gloo closes the connections of a group that nobody holds.
        if self._lost is None:
            self._lost = self.rank, "has left the group"
        elif self.rank == 0:
            self._linger(self._lost[0])

    def _linger(self, lost: int) -> None:
        """The others may have noticed only just now, and ask rank 0's store who is lost."""
        deadline_s = time.monotonic() + OTHERS_S
        for rank in self._others:
            if rank == lost:
                continue
            try:
                self._store.wait([f"told {rank}"], _left(deadline_s))
            except RuntimeError:
                pass  # It computes, or is lost as well.

    def _write(self, stamp_ns: int, values: Tensor) -> None:
        """The message that goes out: a stamp, then float32 values."""
        length = STAMP_BYTES + values.nbytes
        if self._unsent:  # gloo still reads the last one; what was left before that has gone since.
            self._outgoing, self._leaving = self._leaving, self._outgoing
        if self._outgoing.numel() < length:
            self._outgoing = torch.empty(2 * length, dtype=torch.uint8)
        self._outgoing[:STAMP_BYTES].view(torch.int64)[0] = stamp_ns
        _floats(self._outgoing, values.numel()).copy_(values)

    def _stamps(self, senders: Iterable[int]) -> list[int]:
        """As each rank's own clock says it; 0 for those that sent nothing."""
        stamps = [0] * self.size
        for rank in senders:
            stamps[rank] = _stamp(self._incoming[rank])
        stamps[self.rank] = _stamp(self._outgoing)
        return stamps

    def _translated(self, stamps: Sequence[int]) -> Stamps:
        here = [self._clocks.here(stamp, rank) if stamp else 0 for rank, stamp in enumerate(stamps)]
        return Stamps(tuple(here), self._clock())

    def _pass(
        self, receivers: Sequence[int], senders: Sequence[int], counts: Sequence[int], *, finish: bool = True
    ) -> None:
        """
        Send this rank's message to `receivers`, and take those of `senders`.

        Args:
            counts: how many values each rank sends.
            finish: gloo sends when the receiver has come; wait for that now, not at the start of the next exchange.
        """
        if self._lost is not None:
            raise RankLost(*self._lost)
        assert self._group is not None
        missing, why = self._try_to_pass(self._group, receivers, senders, counts, finish)
        if missing:
            self._lost = self._blame(missing, why)
            self._unsent.clear()
            self._group = None  # So that those who wait for this rank notice now, not when their time is over.
            raise RankLost(*self._lost)

    def _try_to_pass(
        self,
        group: ProcessGroupGloo,
        receivers: Sequence[int],
        senders: Sequence[int],
        counts: Sequence[int],
        finish: bool,
    ) -> tuple[list[int], str]:
        """Returns: the ranks that did not come, and why the first of them did not."""
        deadline_s = time.monotonic() + self._timeout_s
        pending = self._unsent
        self._unsent = []
        rank = self.rank
        try:
            _wait(pending, deadline_s)
            pending = []
            for rank in senders:
                length = STAMP_BYTES + 4 * counts[rank]
                if self._incoming[rank].numel() < length:
                    self._incoming[rank] = torch.empty(2 * length, dtype=torch.uint8)
                pending.append((rank, group.recv([self._incoming[rank][:length]], rank, TAG)))  # type: ignore[attr-defined]  # likewise
            outgoing = self._outgoing[: STAMP_BYTES + 4 * counts[self.rank]]
            for rank in receivers:
                work = group.send([outgoing], rank, TAG)  # type: ignore[attr-defined]  # likewise
                (pending if finish else self._unsent).append((rank, work))
            rank = self.rank
            _wait(pending, deadline_s)
        except RuntimeError as error:
            missing = [] if rank == self.rank else [rank]
            missing += [other for other, work in pending if not _done(work) and other not in missing]
            return list(dict.fromkeys(missing)) or [-1], _words(error)
        return [], ""

    def _meet(self, clock_id: str, start_s: float) -> list[str]:
        """Wait until all ranks are here.  Returns: the ids of their clocks."""
        deadline_s = time.monotonic() + start_s
        ids = []
        try:
            self._store.set(f"clock {self.rank}", clock_id)
        except RuntimeError as error:
            raise RankLost(0, f"does not answer: {_words(error)}") from error
        for rank in range(self.size):
            key = f"clock {rank}"
            try:
                self._store.wait([key], _left(deadline_s))
                ids.append(self._store.get(key).decode())
            except RuntimeError as error:
                raise RankLost(rank, f"did not come within {start_s:g} s") from error
        return ids

    def _connect(self, address: str, start_s: float) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # there, but not in torch's stub
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._threads = 1
        options._timeout = timedelta(seconds=start_s)
        try:
            return ProcessGroupGloo(self._store, self.rank, self.size, options)
        except RuntimeError as error:
            raise RankLost(-1, f"(one of the ranks) could not be reached from {address}: {_words(error)}") from error

    def _blame(self, missing: Sequence[int], why: str) -> tuple[int, str]:
        """
        Who is lost.  A rank may be missing because it waits for another itself, so each says in the store for whom it
        waits; who is waited for and says nothing is the one.  The first conclusion holds for all.

        The store is rank 0's: where it does not answer, that is the rank to blame.
        """
        answers: list[str] = []

        def ask() -> None:
            try:
                answers.append(self._ask(missing, why))
            except RuntimeError:
                pass  # The store is gone.

        # A store whose process is stopped answers never, and its client waits for that: in a thread that may be left.
        asking = threading.Thread(target=ask, name="who is lost", daemon=True)
        asking.start()
        asking.join(BLAME_S)
        if not answers:
            if self.rank == 0 or missing[0] == 0:
                return missing[0], why
            return 0, "does not answer"
        rank, _, why = answers[0].partition(" ")
        return int(rank), why

    def _ask(self, missing: Sequence[int], why: str) -> str:
        """Returns: a rank, a blank, and what is wrong with it."""
        deadline_s = time.monotonic() + OTHERS_S
        self._store.set(f"missed by {self.rank}", " ".join(map(str, missing)))
        suspects = list(missing)
        lost = f"{missing[0]} {why}"
        for suspect in suspects:  # It grows on the way.
            key = f"missed by {suspect}"
            try:
                self._store.wait([key], _left(deadline_s))
            except RuntimeError:
                lost = f"{suspect} {why if suspect == missing[0] else 'is what others wait for'}"
                break
            theirs = map(int, self._store.get(key).split())
            suspects += [rank for rank in theirs if rank != self.rank and rank not in suspects]
        first = self._store.compare_set("lost", "", lost).decode()
        self._store.set(f"told {self.rank}", "")
        return first


def _floats(message: Tensor, count: int) -> Tensor:
    return message[STAMP_BYTES : STAMP_BYTES + 4 * count].view(torch.float32)


def _stamp(message: Tensor) -> int:
    return int(message[:STAMP_BYTES].view(torch.int64)[0])


def _left(deadline_s: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline_s - time.monotonic()))  # gloo takes 0 for no limit.


def _wait(pending: Iterable[tuple[int, Work]], deadline_s: float) -> None:
    for _, work in pending:
        work.wait(_left(deadline_s))


def _done(work: Work) -> bool:
    """Whether it was done when another failed; not a moment is left for it now."""
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return False
    return True


def _words(error: RuntimeError) -> str:
    """What happened, without gloo's source lines, advice and greetings."""
    text = str(error).strip().partition("\n")[0]
    if "Timed out" in text or "timeout" in text:
        return "did not come in time"
    if "pair.cc" in text:
        return "closed its connection"
    return text[:200]
