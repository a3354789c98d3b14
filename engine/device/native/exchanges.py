"""
The sums over ranks in the middle of a native step: what the library calls for them, and what becomes of their stamps.

    shared memory      the library calls itself: no Python between two layers
    anything else      a callback that wraps the numbers as a tensor
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch

from engine.device.ranks.book import Interconnect
from engine.device.ranks.collective import Collective, Stamps
from engine.device.ranks.shared_memory import SharedMemory

_CALLBACK = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64, c_void_p)
_FAILED = 1  # whatever it was: the exception is kept


class Exchanges:
    """Those of each step of one rank: behind attention and MLP of every layer."""

    def __init__(self, interconnect: Interconnect, layers: int) -> None:
        self._interconnect = interconnect
        self.ranks = interconnect.size
        self._stamps = np.zeros((layers, 2, self.ranks + 1), np.int64)
        self._lost = c_int32()
        self._raised: BaseException | None = None
        collective = interconnect.collective
        self._shared = collective if isinstance(collective, SharedMemory) else None
        if self._shared is not None:
            self.function, self.context = self._shared.native
        else:
            self._callback = _callback(self, collective)  # lives as long as this
            self.function, self.context = ctypes.cast(self._callback, c_void_p).value or 0, 0

    def begin(self) -> tuple[int, int]:
        """Before each step: where the library writes the stamps, and what failed.  Raises RankLost if it is closed."""
        if self._shared is not None:
            assert self._shared.native == (self.function, self.context)
        return self._stamps.ctypes.data, ctypes.addressof(self._lost)

    def failure(self) -> BaseException:
        """Why a step was given up."""
        if self._shared is not None:
            return self._shared.lost(self._lost.value)
        raised, self._raised = self._raised, None
        assert raised is not None
        return raised

    def book(self, bytes_summed: int) -> None:
        """Write those of a step down, of so many bytes each."""
        self._interconnect.book_all(("attention", "mlp"), self._stamps, bytes_summed * (self.ranks - 1))

    def sum(self, collective: Collective, address: int, count: int, stamps: int) -> int:
        """What the callback does.  No exception may leave it: the library is in the middle of a step."""
        try:
            found = collective.sum(torch.frombuffer((c_float * count).from_address(address), dtype=torch.float32))
            _write(found, stamps)
        except BaseException as error:  # noqa: BLE001 - raised again behind the call, whatever it is
            self._raised = error
            return _FAILED
        return 0


def _callback(exchanges: Exchanges, collective: Collective) -> "ctypes._FuncPointer":
    return _CALLBACK(lambda _, values, count, stamps: exchanges.sum(collective, values, count, stamps))


def _write(found: Stamps, address: int) -> None:
    numbers = (*found.entered_ns, found.left_ns)
    ctypes.memmove(address, (c_int64 * len(numbers))(*numbers), 8 * len(numbers))
