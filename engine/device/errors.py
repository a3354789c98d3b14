"""
What can go wrong on the way from files to a device that runs.

    ModelError          these files cannot be served here: missing, broken, unsupported (`quant.formats.errors`)
    +-- MemoryShort     the files are fine, this machine is too small for them or for the KV cache asked for
    DeviceLost          it has computed, and can do so no more: the process is of no use (`engine.device`)

Each message is one line for the person who started the engine, and names the way out.
"""

from engine.device import DeviceLost
from quant.formats.errors import ModelError

__all__ = ["DeviceLost", "MemoryShort", "ModelError"]


class MemoryShort(ModelError):
    """Not enough memory for the weights or for the KV cache."""
