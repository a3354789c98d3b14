"""
The same function in a basis without outliers: what makes rounding to int8 cheap.

A few channels of a language model are far larger than the others, and a token that is rounded with one scale loses the
small ones.  An orthogonal matrix spreads them evenly, and it costs nothing where it can be folded into the weights:

    residual stream x   x Q: Q goes into every matrix that reads or writes it, for RMSNorm sees lengths only; the norms'
                        weights go into the matrices that follow first, and become ones
    values of a head    v R: R goes into the rows of v_proj and the columns of o_proj, for attention averages tokens
    input of down_proj  SiLU lies in between, so this rotation is computed at run time: `mixing.mix`, only if `online`

Embedding and head are different matrices then, even where one tensor was both.  Queries and keys stay as they are: what
turns them by position does not commute with a rotation.

The same seed draws the same signs everywhere.  The other entries of Q are square roots and cosines, rounded once to
float32.  The products with them are float32 sums, whose last bits depend on the machine and its number of threads.
"""

import hashlib
import math

import msgspec
import torch
from torch import Tensor

from quant.formats.checkpoint import Checkpoint
from quant.formats.mixing import hadamard, mix, mix_points
from quant.formats.scheme import Scheme

_FACTOR_BITS = 6  # Hadamard matrices beyond 64 are products of smaller ones: 128 sums instead of 4096
_ROWS = 8192  # of a matrix that are rotated together, for the memory that it takes
_VERSION = "1"  # raise it when the same seed begins to give other weights


def rotated(checkpoint: Checkpoint, *, seed: int = 0, online: bool, parts: int = 1) -> Checkpoint:
    """
    The same model in a basis without outliers; its tensors are rotated as they are read.  It is never tied.

    With `online` the input of each down_proj has to go through `mix`, with `mix_points` of the architecture and of the
    parts in which it will be cut.
    """
    assert checkpoint.scheme is None, "what is quantized already cannot be rotated"
    a = checkpoint.architecture
    points = mix_points(a.intermediate, parts) if online else 0
    source = _RotatedSource(checkpoint, seed, points)
    other = f"|{points}" if online and points != mix_points(a.intermediate) else ""

    def identity() -> str:
        known = f"{checkpoint.identity}|rotated {_VERSION}|{seed}|{online}{other}"
        return hashlib.sha256(known.encode()).hexdigest()

    return Checkpoint(
        msgspec.structs.replace(a, tied=False),
        checkpoint.eos_ids,
        source,
        identity,
        origin=lambda: checkpoint.origin,
    )


def for_rounding(
    checkpoint: Checkpoint, scheme: Scheme, *, seed: int = 0, online: bool, parts: int = 1
) -> tuple[Checkpoint, Scheme]:
    """The rotated model, and the scheme that it has once it is rounded to `scheme`: with what is left to mix."""
    points = mix_points(checkpoint.architecture.intermediate, parts) if online else 0
    turned = rotated(checkpoint, seed=seed, online=online, parts=parts)
    return turned, msgspec.structs.replace(scheme, mix=points)


def for_loading(checkpoint: Checkpoint, scheme: Scheme, parts: int = 1) -> tuple[Checkpoint, Scheme]:
    """
    What a float checkpoint that is to be rounded to `scheme` is read as, and the scheme that it has then.

    The MLP's channels will be cut in `parts`.
    """
    if scheme.method != "int8":
        return checkpoint, scheme
    return for_rounding(checkpoint, scheme, online=True, parts=parts)


def hartley(points: int) -> Tensor:
    """Symmetric and orthogonal, of any size: float64 [points, points], no entry beyond root 2 over root `points`."""
    turns = torch.outer(torch.arange(points), torch.arange(points)) % points  # exact, before anything is rounded
    angles = turns.double() * (2 * math.pi / points)
    return (angles.cos() + angles.sin()) / math.sqrt(points)


class Orthogonal:
    """An orthogonal matrix that spreads any single channel over all: signs, then Hartley (odd) x Hadamard (rest)."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._signs = torch.randint(0, 2, (size,), generator=generator).float() * 2 - 1
        bits = (size & -size).bit_length() - 1
        odd = size >> bits
        factors = [hartley(odd)] if odd > 1 else []
        while bits > 0:
            taken = min(bits, _FACTOR_BITS)
            factors.append(hadamard(1 << taken))
            bits -= taken
        self._factors = [factor.float() for factor in factors]

    def columns(self, x: Tensor) -> Tensor:
        """`x @ Q`: float32 [..., size]."""
        rows = x.reshape(-1, len(self._signs))
        out = torch.empty_like(rows)
        for part, result in zip(rows.split(_ROWS), out.split(_ROWS), strict=True):
            values = part * self._signs
            for factor in self._factors:  # each takes the first axis and leaves it as the last
                values = values.reshape(len(part), len(factor), -1).transpose(1, 2) @ factor
            result.copy_(values.reshape(part.shape))
        return out.view(x.shape)

    def rows(self, weight: Tensor) -> Tensor:
        """`Q.T @ weight`: float32 [size, in]."""
        return self.columns(weight.t()).t()


class _RotatedSource:
    """The tensors of a float checkpoint, rotated."""

    def __init__(self, checkpoint: Checkpoint, seed: int, points: int) -> None:
        a = checkpoint.architecture
        self._a = a
        self._checkpoint = checkpoint
        self._points = points
        self._residual = Orthogonal(a.hidden, 2 * seed)
        self._head = Orthogonal(a.head_dim, 2 * seed + 1)

    def names(self) -> frozenset[str]:
        """All names; the head is always there."""
        return self._checkpoint.names | {"lm_head.weight"}

    def read(self, name: str) -> Tensor:
        """One tensor.  Raises ModelError."""
        a = self._a
        match name.split("."):
            case ["model", "embed_tokens", "weight"]:
                return self._residual.columns(self._read(name, a.vocab_size, a.hidden))
            case ["lm_head", "weight"]:
                head = "model.embed_tokens.weight" if self._checkpoint.tied else name
                return self._reading(head, a.vocab_size, norm="model.norm.weight")
            case ["model", "norm", "weight"] | ["model", "layers", _, _, "weight"]:
                return torch.ones(a.hidden)
            case ["model", "layers", layer, _, linear, kind]:
                return self._of_layer(name, f"model.layers.{layer}", linear, kind)
        return self._checkpoint.stored(name)

    def _of_layer(self, name: str, prefix: str, linear: str, kind: str) -> Tensor:
        a = self._a
        before, behind = f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"
        match linear, kind:
            case "q_proj", "weight":
                return self._reading(name, a.query_size, norm=before)
            case "k_proj", "weight":
                return self._reading(name, a.kv_size, norm=before)
            case "v_proj", "weight":
                values = self._reading(name, a.kv_size, norm=before)
                return self._heads(values.t()).t()
            case "v_proj", "bias":
                return self._heads(self._read(name, a.kv_size))
            case "o_proj", "weight":
                return self._residual.rows(self._heads(self._read(name, a.hidden, a.query_size)))
            case "gate_proj" | "up_proj", "weight":
                return self._reading(name, a.intermediate, norm=behind)
            case "down_proj", "weight":
                return self._residual.rows(mix(self._read(name, a.hidden, a.intermediate), self._points))
            case "o_proj" | "down_proj", "bias":
                return self._residual.columns(self._read(name, a.hidden))
        return self._checkpoint.stored(name)  # of queries and keys, or added where nothing is rotated

    def _reading(self, name: str, rows: int, *, norm: str) -> Tensor:
        """The weight [rows, hidden] of a layer that reads the normed residual stream."""
        return self._residual.columns(self._read(name, rows, self._a.hidden) * self._read(norm, self._a.hidden))

    def _heads(self, values: Tensor) -> Tensor:
        """Rotate each head of [..., heads * head_dim]."""
        return self._head.columns(values.reshape(-1, self._a.head_dim)).view(values.shape)

    def _read(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.read(name, shape, torch.float32)
