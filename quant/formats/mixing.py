"""
What rotation leaves for run time: a Hadamard transform of the inputs of down_proj, which SiLU keeps out of the weights.

A checkpoint that needs it says so where nobody can miss it: another loader would multiply what was not mixed, and give
nonsense.  So config.json names an architecture, and a status of the weights, that are ours and that others refuse.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

LANES = 16  # neighbouring channels that are mixed alike: a vector of float32
POINTS = (2, 4, 8, 16, 32)
STATUS = "compressed-mixed"  # of a number format, where others know `compressed`
_ARCHITECTURE, _MODEL_TYPE = "Pellucid", "pellucid_"  # before the usual names


def mix(x: Tensor, points: int) -> Tensor:
    """
    Hadamard transforms over `points` vectors of LANES channels: float32 [..., channels], its own inverse; 0: nothing.

    Channel (g * points + i) * LANES + lane goes with those of the other i.  Sums and differences, one pair at a time:
    no row's bits depend on its neighbours.
    """
    if points == 0:
        return x
    assert points & (points - 1) == 0 and x.shape[-1] % (points * LANES) == 0
    values, step = x.float().reshape(-1), LANES
    while step < points * LANES:
        first, second = values.view(-1, 2, step).unbind(1)
        pairs = values.new_empty(len(first), 2, step)
        torch.add(first, second, out=pairs[:, 0])
        torch.sub(first, second, out=pairs[:, 1])
        values, step = pairs.view(-1), 2 * step
    return (values * (1 / math.sqrt(points))).view(x.shape)


def mix_points(intermediate: int, parts: int = 1) -> int:
    """
    How many channels `mix` combines in a model with so many columns of down_proj; 0: none.

    Where the columns are to be cut in `parts`, so many that none of it is cut, if there is such a number.
    """
    if intermediate % LANES:
        return 0
    vectors, odd = divmod(intermediate // LANES, parts)
    points = math.gcd(intermediate // LANES if odd else vectors, POINTS[-1])
    return 0 if points == 1 else points


def hadamard(points: int) -> Tensor:
    """Sylvester's matrix: float64 [points, points], a power of two, symmetric and orthogonal."""
    assert points > 0 and points & (points - 1) == 0
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < points:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(points)


def plain_name(name: str) -> str:
    """The usual name of an architecture or a model type."""
    return name.removeprefix(_ARCHITECTURE).removeprefix(_MODEL_TYPE)


def mixed_config(config: Mapping[str, object]) -> dict[str, object]:
    """config.json under names that no other loader knows."""
    names = config.get("architectures")
    named = {"architectures": [f"{_ARCHITECTURE}{name}" for name in names]} if isinstance(names, list) else {}
    return {**config, **named, "model_type": f"{_MODEL_TYPE}{config.get('model_type', '')}"}


def is_mixed(config: Mapping[str, object]) -> bool:
    """Whether config.json has such names."""
    return str(config.get("model_type")).startswith(_MODEL_TYPE)
