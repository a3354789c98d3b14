"""
What a conversion will do, from the sizes of the model alone: what is quantized, what stays, how large it gets.
"""

import difflib

import msgspec

from launch.errors import UserError
from quant.formats.architecture import Architecture
from quant.formats.checkpoint import Checkpoint
from quant.formats.scheme import Scheme
from quant.forward import ALL_LINEARS, layer_shapes
from quant.options import Rotation, matches
from quant.settings import GROUP_SIZES

FLOAT_BYTES = 2  # what stays a float is float16 or bfloat16 in the result
GPTQ_MULTIPLE = 32  # of rows and columns, for the packed words and for everybody's kernels
TENSORS_PER_LINEAR = 6  # no format has more


class PlannedLinear(msgspec.Struct, frozen=True, kw_only=True):
    """One linear layer of the model."""

    name: str
    rows: int
    columns: int
    kept: bool
    size_bytes: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The whole conversion."""

    linears: tuple[PlannedLinear, ...]
    other_bytes: int  # embeddings, norms, biases, and the head where it is not the embedding
    tied: bool

    @property
    def size_bytes(self) -> int:
        """Of the result's weights, but for headers of a few kilobytes."""
        return self.other_bytes + sum(linear.size_bytes for linear in self.linears)

    @property
    def tensors_max(self) -> int:
        """At most so many tensors, roughly: norms and biases are counted as parts of the linear layers."""
        return 3 + TENSORS_PER_LINEAR * len(self.linears)


def plan(checkpoint: Checkpoint, scheme: Scheme, keep: tuple[str, ...], *, rotate: Rotation = "none") -> Plan:
    """The plan.  Raises UserError for a pattern that matches nothing, and for sizes that the scheme cannot have."""
    a = checkpoint.architecture
    shapes = layer_shapes(a)
    names = [f"model.layers.{layer}.{linear}" for layer in range(a.layers) for linear in ALL_LINEARS]
    for pattern in keep:
        if not any(matches(name, pattern) for name in names):
            raise UserError(f"--keep {pattern!r} matches no linear layer{_near(pattern, names)}")
    linears = []
    for name in names:
        rows, columns = shapes[name.split(".", 3)[3] + ".weight"]
        kept = any(matches(name, pattern) for pattern in keep)
        size_bytes = rows * columns * FLOAT_BYTES if kept else _linear_bytes(rows, columns, scheme)
        linears.append(PlannedLinear(name=name, rows=rows, columns=columns, kept=kept, size_bytes=size_bytes))
    if all(linear.kept for linear in linears):
        raise UserError("--keep leaves nothing to quantize")
    _check_sizes([linear for linear in linears if not linear.kept], scheme)
    tied = checkpoint.tied and rotate == "none"  # rotated, embedding and head are different matrices
    return Plan(linears=tuple(linears), other_bytes=_other_bytes(a, tied), tied=tied)


def _near(pattern: str, names: list[str]) -> str:
    if pattern in ("lm_head", "embed_tokens", "model.embed_tokens", "norm"):
        return ": embeddings, norms and the head always stay as they are"
    known = sorted({*names, *ALL_LINEARS, *(linear.partition(".")[2] for linear in ALL_LINEARS)})
    found = difflib.get_close_matches(pattern, known, n=3, cutoff=0.6)
    if found:
        return f"; near are {', '.join(found)}"
    return f"; there are {names[0]} .. {names[-1]}"


def _check_sizes(linears: list[PlannedLinear], scheme: Scheme) -> None:
    columns = {linear.columns: linear.name for linear in reversed(linears)}
    if scheme.method == "gptq":
        for linear in linears:
            if linear.columns % GPTQ_MULTIPLE or linear.rows % GPTQ_MULTIPLE:
                raise UserError(
                    f"{linear.name} is {linear.rows} x {linear.columns}, and gptq needs multiples of {GPTQ_MULTIPLE}: "
                    "--keep it, or take another scheme"
                )
    if scheme.group_size > 0:
        for size, name in sorted(columns.items()):
            if size % scheme.group_size:
                fitting = [str(g) for g in GROUP_SIZES if (g == -1 and scheme.method == "gptq") or fits(columns, g)]
                ways = f"sizes that fit all layers are {', '.join(fitting)}" if fitting else "no size fits all layers"
                raise UserError(
                    f"--group-size {scheme.group_size} does not divide the {size} columns of {name}: {ways}; "
                    "or --keep those layers"
                )


def fits(columns: dict[int, str], group_size: int) -> bool:
    """Whether all layers can have groups of that size."""
    return group_size > 0 and all(size % group_size == 0 for size in sorted(columns))


def _linear_bytes(rows: int, columns: int, scheme: Scheme) -> int:
    """What the format of `scheme` takes for a weight [rows, columns]; the few bytes of a blob of JSON are left out."""
    values = rows * columns
    groups = columns // scheme.group_size if scheme.group_size > 0 else 1
    match scheme.method:
        case "int8" | "fp8":
            return values + (4 if scheme.granularity == "tensor" else 4 * rows * groups)
        case "gptq" | "packed":
            return (values + rows * groups) * scheme.bits // 8 + rows * groups * 2 + columns * 4
        case "nf4":
            return values // 2 + -(-values // 64) * 4 + 64
        case "llm-int8":
            return values + 4 * rows + 1


def _other_bytes(a: Architecture, tied: bool) -> int:
    weights = {f"{linear}.weight" for linear in ALL_LINEARS}
    numbers = 0
    for name, shape in layer_shapes(a).items():
        if name not in weights:
            numbers += shape[0]
    embeddings = a.vocab_size * a.hidden * (1 if tied else 2)
    return (numbers * a.layers + embeddings + a.hidden) * FLOAT_BYTES
