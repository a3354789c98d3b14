"""
Memory that is read at the speed of the machine: private, zeroed, and in huge pages where the system gives them.

A step reads all weights once, too much for any cache.  In pages of 4 KiB that takes a fifth to a third longer, because
every page has to be looked up, and neither processors nor their prefetchers look beyond one.  Files are in such pages
only, so what is read from one is copied.
"""

import mmap

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
Arrays = dict[str, Array]
ALIGNED = 64
_HUGE = 2 << 20


def aligned(size: int) -> Array:
    """Zeroed bytes that begin at a multiple of ALIGNED.  Raises MemoryError."""
    assert size > 0
    if size < _HUGE:
        raw = np.zeros(size + ALIGNED, np.uint8)
        start = -raw.ctypes.data % ALIGNED
        return raw[start : start + size]
    try:
        memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes are not to be had") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel that has none: slower
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE
    return raw[start : start + size]


def gathered(arrays: Arrays) -> Arrays:
    """The same arrays, read-only, one behind the other in such memory.  Raises MemoryError."""
    places, size = {}, 0
    for name, array in arrays.items():
        places[name] = size
        size += array.nbytes + -array.nbytes % ALIGNED
    whole = aligned(size)
    found: Arrays = {}
    for name, array in arrays.items():
        found[name] = whole[places[name] : places[name] + array.nbytes].view(array.dtype).reshape(array.shape)
        found[name][...] = array
        found[name].flags.writeable = False
    return found
