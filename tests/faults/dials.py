"""
Dials: numbers in a file that several processes have mapped.  Who inflicts a fault turns one, and the process that
suffers reads it where it hurts, at the cost of a memory access.
"""

import mmap
import os
from pathlib import Path
from typing import Literal, get_args

import numpy as np

Dial = Literal[
    "wrong_guesses",  # of each sequence in each step
    "late_rank_s",  # by how much rank 1 comes too late to a step
    "slow_wire_s",  # what each exchange between ranks takes longer
    "collection_steps",  # after so many, all objects of the engine are walked through for garbage
    "loop_block_s",  # of the gateway's event loop, now and then
    "leak_bytes_s",  # that the engine never gives back
]
DIALS: tuple[Dial, ...] = get_args(Dial)
VARIABLE = "FAULTS_DIALS"


class Dials:
    """All of them; 0: nothing is wrong."""

    def __init__(self, path: Path) -> None:
        """Those in the file, which must be there."""
        with path.open("r+b") as file:
            self._values = np.frombuffer(mmap.mmap(file.fileno(), 8 * len(DIALS)), np.float64)

    @classmethod
    def made(cls, path: Path) -> "Dials":
        """New ones, all at 0."""
        path.write_bytes(bytes(8 * len(DIALS)))
        return cls(path)

    @classmethod
    def ours(cls) -> "Dials":
        """Those that this process was given by its environment."""
        return cls(Path(os.environ[VARIABLE]))

    def __getitem__(self, dial: Dial) -> float:
        return float(self._values[DIALS.index(dial)])

    def __setitem__(self, dial: Dial, value: float) -> None:
        self._values[DIALS.index(dial)] = value
