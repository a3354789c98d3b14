"""
A rank's place in its group, and what ranks say to each other beside the steps.

    rank 0  --orders-->  each other rank      a line each: two connected sockets, messages with their length first
    rank 0  <-verdicts-  each other rank      while they load: what holds only if it holds for all

While a step runs, ranks speak through their collective only.
"""

import socket
from collections.abc import Sequence

import msgspec

from engine.device.ranks.book import Interconnect
from engine.device.ranks.collective import RankLost
from engine.plan import StepPlan
from telemetry.records import InterconnectBook

LOAD_S_MAX = 1800.0  # ranks load at different speeds: one may read from a slow disk, or pack for the first time
ORDER_BYTES_MAX = 64 << 20
_LENGTH_BYTES = 4


class LineClosed(RankLost):
    """The other end has hung up: between two orders, the end of a group in peace."""


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """Compute a plan; `wanted` is of its sampling rows, see `engine.device.ranks.model`."""

    plan: StepPlan
    wanted: tuple[int, ...]


class Logits(msgspec.Struct, frozen=True, tag="logits"):
    """Compute a plan, and the logits of all its rows."""

    plan: StepPlan


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Forget all KV."""


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """Whether something holds here; in answer, whether it holds for all."""

    holds: bool


Order = Compute | Logits | Reset | Verdict


class Line:
    """One end of the line between rank 0 and another rank."""

    def __init__(self, end: socket.socket, *, rank: int) -> None:
        """`rank` is who is at the other end."""
        self.rank = rank
        self._end = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Order)

    def send(self, order: Order, timeout_s: float) -> int:
        """Say something, and how many bytes that takes.  Raises RankLost."""
        content = self._encoder.encode(order)
        assert len(content) <= ORDER_BYTES_MAX
        try:
            self._end.settimeout(timeout_s)
            self._end.sendall(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
        except OSError as error:
            raise RankLost(self.rank, f"does not listen: {error.strerror or error}") from error
        return _LENGTH_BYTES + len(content)

    def receive(self, timeout_s: float | None) -> Order:
        """Wait until something is said; None: for ever.  Raises RankLost, also if the other end is closed."""
        self._end.settimeout(timeout_s)
        length = int.from_bytes(self._read(_LENGTH_BYTES), "little")
        assert length <= ORDER_BYTES_MAX
        return self._decoder.decode(self._read(length))

    def close(self) -> None:
        """The other end notices."""
        self._end.close()

    def _read(self, count: int) -> bytearray:
        content = bytearray()
        while len(content) < count:
            try:
                piece = self._end.recv(count - len(content))
            except OSError as error:
                raise RankLost(self.rank, f"says nothing: {error.strerror or error}") from error
            if not piece:
                raise LineClosed(self.rank, "has hung up")
            content += piece
        return content


class Seat:
    """A rank's place: its number, the way to the others, and the lines; those of rank 0 lead to all others."""

    def __init__(
        self, interconnect: Interconnect, lines: Sequence[Line], *, timeout_s: float, stage: Interconnect | None = None
    ) -> None:
        """`stage`: to the ranks of its stage of the pipeline, if there are several stages and several ranks in each."""
        assert stage is None or interconnect.stages > 1
        self.interconnect = interconnect
        self._stage = stage
        self.lines = tuple(lines)
        self.timeout_s = timeout_s

    @property
    def rank(self) -> int:
        """Which one this is."""
        return self.interconnect.rank

    @property
    def sums(self) -> Interconnect | None:
        """To the ranks that have the other parts of the same layers; None: there are none."""
        return self.interconnect if self.interconnect.stages == 1 else self._stage

    def close_book(self) -> InterconnectBook:
        """What rank 0 has exchanged in the step that ends."""
        if self._stage is not None:
            self.interconnect.take(self._stage)
        return self.interconnect.close_book()

    def agree(self, holds: bool) -> bool:
        """Whether something holds for all ranks, each of which asks this at the same point.  Raises RankLost."""
        if self.rank:
            self.lines[0].send(Verdict(holds), self.timeout_s)
            answer = self.lines[0].receive(LOAD_S_MAX)
            assert isinstance(answer, Verdict)
            return answer.holds
        for line in self.lines:
            verdict = line.receive(LOAD_S_MAX)
            assert isinstance(verdict, Verdict)
            holds = holds and verdict.holds
        self.tell(Verdict(holds))
        return holds

    def tell(self, order: Order) -> int:
        """Say something to all other ranks; of rank 0.  Returns how many bytes that took.  Raises RankLost."""
        assert self.rank == 0
        return sum(line.send(order, self.timeout_s) for line in self.lines)

    def close(self) -> None:
        """The others notice."""
        for line in self.lines:
            line.close()
        self.interconnect.collective.close()
        if self._stage is not None:
            self._stage.collective.close()
