"""
What a conversion is asked to do, as one frozen value.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from quant.formats.scheme import Scheme

Rotation = Literal["none", "offline", "full"]
Progress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, how much there is)"""


class ConvertOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides the bytes of the result, but for the model and the calibration tokens."""

    scheme: Scheme
    """The number format wanted.  Its `kept` is what comes out; what is to be kept goes into `keep`."""
    damp: float = 0.01
    """gptq: what is added to the Hessian's diagonal, as a share of its mean."""
    backend: str = "native"
    """gptq: whose solver; native is `quant.gptq`, auto-gptq that package's."""
    smooth: float | None = None
    """int8 and fp8: SmoothQuant's alpha, 0 being no smoothing; None: searched, layer by layer."""
    rotate: Rotation = "none"
    """int8: offline, into the basis of `quant.formats.rotation`; full, with the inputs of down_proj mixed as well."""
    keep: tuple[str, ...] = ()
    """Linear layers that stay floats: `model.layers.3.mlp.down_proj`, any part of it between dots, or a pattern."""
    seed: int = 0
    """Of whatever is drawn at random: the signs of a rotation."""
    device: str = "cpu"
    """Where layers are computed and solved, one at a time.  Activations wait in the host's memory."""

    def keeps(self, name: str) -> bool:
        """Whether the linear layer of that full name stays a float."""
        return any(matches(name, pattern) for pattern in self.keep)


def matches(name: str, pattern: str) -> bool:
    """Whether `pattern` means this layer: its whole name, any run of its parts between dots, or a wildcard."""
    parts = name.split(".")
    runs = [".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
    return any(fnmatchcase(run, pattern) for run in runs)
