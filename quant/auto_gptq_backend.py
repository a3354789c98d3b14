"""
The GPTQ of the package auto-gptq in the place of our own: for comparison, or for whoever trusts only that one.

It synchronizes with CUDA at the end of each layer, so it needs a CUDA device; and it runs with old versions of other
packages only, so it wants an environment of its own: the extra `auto-gptq`.
"""

import torch
from torch import Tensor

from quant.formats.errors import ModelError
from quant.formats.weights import Affine


def solve_with_auto_gptq(
    weight: Tensor,
    hessian: Tensor,
    *,
    bits: int,
    group_size: int,
    symmetric: bool = True,
    desc_act: bool = False,
    damp: float = 0.01,
) -> Affine:
    """As `quant.gptq.solve`, on its quantizer's grids.  Raises ModelError if the package cannot be loaded."""
    try:
        from auto_gptq.quantization import GPTQ, Quantizer  # noqa: PLC0415 - an extra, and slow to load
    except ImportError as error:
        raise ModelError(
            f"--backend auto-gptq: the package cannot be loaded ({error}); in an environment of its own: "
            "pip install 'pellucid[auto-gptq]'"
        ) from error
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device)
    linear.weight.data = weight.float().clone()
    solver = GPTQ(linear)
    solver.H, solver.nsamples = hessian.float().clone(), 1
    solver.quantizer = Quantizer()
    solver.quantizer.configure(bits, perchannel=True, sym=symmetric, mse=False)
    scale, zero, columns = solver.fasterquant(percdamp=damp, group_size=group_size, actorder=desc_act)
    return _affine(linear.weight.data, scale, zero, columns, bits=bits, symmetric=symmetric, listed=desc_act)


def _affine(
    rounded: Tensor, scale: Tensor, zero: Tensor, columns: Tensor, *, bits: int, symmetric: bool, listed: bool
) -> Affine:
    """What its numbers are in codes.  Files hold scales in float16, so they are that from here on."""
    middle, group = 2 ** (bits - 1), columns.long()
    codes = (rounded / scale[:, group]).round() + zero[:, group]
    return Affine(
        (codes.clamp(0, 2**bits - 1) - middle).to(torch.int8),
        scale.half().float(),
        None if symmetric else (zero - middle).to(torch.int16),
        columns.int() if listed and scale.shape[1] > 1 else None,
        bits,
    )
