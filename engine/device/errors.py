"""
What can go wrong on the way from files to a device that runs.

    DeviceError
    +-- ModelError          these files cannot be served here: missing, broken, unsupported
        +-- MemoryShort     the files are fine, this machine is too small for them or for the KV cache asked for

Each message is one line for the person who started the engine, and names the way out.
"""


class DeviceError(Exception):
    """Base of this package's errors."""


class ModelError(DeviceError):
    """The model's files cannot be served."""


class MemoryShort(ModelError):
    """Not enough memory for the weights or for the KV cache."""
