"""
Ranks on one host: what they exchange goes through memory that all of them have mapped.

Rank 0 creates it and hands its descriptor to the processes that it starts.  It has no name, so it is gone with the last
process that holds it, however that ends.  The exchange itself is src/group.h of the native kernels.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.device.errors import MemoryShort
from engine.device.native.library import Library, any_library
from engine.device.ranks.collective import RankLost, Stamps


class SharedMemory:
    """Implements `Collective`.  One thread at a time."""

    kind = "shared-memory"
    clock_error_ns = 0  # CLOCK_MONOTONIC is one for all processes of a host
    _group: int | None = None

    def __init__(
        self, library: Library, descriptor: int, rank: int, size: int, values_max: int, timeout_s: float
    ) -> None:
        """Takes the descriptor over.  Raises MemoryShort."""
        assert 0 <= rank < size and values_max > 0
        self.rank, self.size = rank, size
        self.descriptor = descriptor
        self._timeout_s = timeout_s
        self._library = library
        bytes_shared = library.group_bytes(size, values_max)
        assert os.fstat(descriptor).st_size == bytes_shared, "ranks that disagree on their sizes"
        try:
            self._memory = np.frombuffer(mmap.mmap(descriptor, bytes_shared), np.uint8)
        except OSError as error:
            raise _short(bytes_shared) from error
        self._group = library.group_open(self._memory.ctypes.data, rank, size, values_max, int(timeout_s * 1e9))
        if self._group is None:
            raise _short(bytes_shared)
        self._stamps = (ctypes.c_int64 * (size + 1))()

    @classmethod
    def join(
        cls,
        descriptor: int,
        rank: int,
        size: int,
        values_max: int,
        timeout_s: float,
        *,
        library: Library | None = None,
    ) -> "SharedMemory":
        """
        A rank of the group whose memory `reserve` gave, in that process or in one that inherited the descriptor.

        `values_max` is how many float32 cross at a time, and what makes an exchange fastest; more go in pieces.
        `timeout_s` bounds each wait for another rank.  Raises MemoryShort, and Unavailable without native kernels.
        """
        return cls(library or any_library(), descriptor, rank, size, values_max, timeout_s)

    def __del__(self) -> None:
        self.close()

    @property
    def native(self) -> tuple[int, int]:
        """The addresses of `pl_group_sum` and of what it is called with first: for code that is native itself."""
        return ctypes.cast(self._library.group_sum, ctypes.c_void_p).value or 0, self._open

    def lost(self, code: int) -> RankLost:
        """What the code of an exchange that failed says."""
        if code < 0:
            return RankLost(-1 - code, "has left the others")
        return RankLost(code - 1, f"did not come to an exchange within {self._timeout_s:g} s")

    def sum(self, values: Tensor) -> Stamps:
        """As the Protocol says."""
        address, count = _checked(values)
        return self._stamped(self._library.group_sum(self._open, address, count, self._stamps))

    def gather(self, values: Tensor, counts: Sequence[int]) -> tuple[list[Tensor], Stamps]:
        """As the Protocol says."""
        address, count = _checked(values)
        assert len(counts) == self.size and counts[self.rank] == count
        gathered = torch.empty(0 if self.rank else sum(counts))
        numbers = (ctypes.c_int64 * self.size)(*counts)
        code = self._library.group_gather(self._open, address, numbers, gathered.data_ptr(), self._stamps)
        stamps = self._stamped(code)
        return ([] if self.rank else list(gathered.split(list(counts)))), stamps

    def send(self, values: Tensor, receiver: int) -> Stamps:
        """As the Protocol says; the receiver takes no part in the stamps, for nobody waits until it comes."""
        assert self.rank < receiver < self.size
        return self._stamped(self._library.group_send(self._open, receiver, *_checked(values), self._stamps))

    def receive(self, values: Tensor, sender: int) -> Stamps:
        """As the Protocol says."""
        assert 0 <= sender < self.rank
        return self._stamped(self._library.group_receive(self._open, sender, *_checked(values), self._stamps))

    def close(self) -> None:
        """Leave, which wakes those that wait for this rank.  Again: nothing."""
        if self._group is None:
            return
        self._library.group_close(self._group)
        self._group = None
        os.close(self.descriptor)

    @property
    def _open(self) -> int:
        if self._group is None:
            raise RankLost(self.rank, "has left the others")
        return self._group

    def _stamped(self, code: int) -> Stamps:
        if code:
            raise self.lost(code)
        *entered_ns, left_ns = self._stamps
        return Stamps(entered_ns, left_ns)


def reserve(size: int, values_max: int, *, library: Library | None = None) -> int:
    """
    Memory for a group of `size` ranks, all of which are to join it: its descriptor.

    Raises MemoryShort, and Unavailable without native kernels.
    """
    bytes_shared = (library or any_library()).group_bytes(size, values_max)
    try:
        descriptor = os.memfd_create("pellucid-ranks")
        os.posix_fallocate(descriptor, 0, bytes_shared)  # now, so that memory cannot run out later
    except OSError as error:
        raise _short(bytes_shared) from error
    return descriptor


def _checked(values: Tensor) -> tuple[int, int]:
    """Address and count."""
    assert values.dtype == torch.float32 and values.is_contiguous()
    return values.data_ptr(), values.numel()


def _short(bytes_shared: int) -> MemoryShort:
    return MemoryShort(f"{bytes_shared >> 20} MiB that the ranks share are not to be had: fewer ranks need less")
