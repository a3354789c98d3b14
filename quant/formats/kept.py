"""
Which linear layers of a quantized model stayed floats: `Scheme.kept`, from and to the words of each tool.

An entry is a full name, `model.layers.3.mlp.down_proj`, or `re:` and a regular expression that is matched from the
start of the name, as compressed-tensors has it.  Names are what we write; expressions come from other tools.
"""

import re
from collections.abc import Iterable

from quant.formats.errors import ModelError
from quant.formats.expect import pattern, shown
from quant.formats.scheme import Scheme

LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""The linear layers of a decoder layer, in the order that they run."""

HEAD = "lm_head"  # no tool's decoder layer, but most lists must name it
EXPRESSION = "re:"
_NAME = re.compile(r"[A-Za-z0-9_.]+")
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def is_kept(scheme: Scheme, name: str) -> bool:
    """Whether the linear of that full name is a float in the file, by the checkpoint's configuration."""
    return any(
        pattern(entry.removeprefix(EXPRESSION), "kept").match(name) is not None
        if entry.startswith(EXPRESSION)
        else entry == name
        for entry in scheme.kept
    )


def checked_kept(entries: Iterable[str], place: str) -> tuple[str, ...]:
    """Each entry once, in order.  Raises ModelError for what is neither a name nor an expression."""
    entries = tuple(dict.fromkeys(entries))
    for entry in entries:
        if entry.startswith(EXPRESSION):
            pattern(entry.removeprefix(EXPRESSION), place)
        elif not _NAME.fullmatch(entry):
            raise ModelError(f"{place} has {shown(entry)}: expected the name of a layer, or re: and an expression")
    return entries


def to_expression(entry: str) -> str:
    """A regular expression for the entry, matched from the start of a name."""
    return entry.removeprefix(EXPRESSION) if entry.startswith(EXPRESSION) else re.escape(entry) + "$"


def from_expression(text: str) -> str:
    """The reverse: a name, if the expression is one name and no more."""
    name = text.removesuffix("$").replace("\\.", ".")
    return name if _NAME.fullmatch(name) and to_expression(name) == text else EXPRESSION + text


def to_skip(entry: str) -> str:
    """An entry of transformers' `llm_int8_skip_modules`."""
    text = entry.removeprefix(EXPRESSION)
    inner = text.removeprefix("(?:").removesuffix(")" + _BOUNDARY)
    return inner if text == f"(?:{inner}){_BOUNDARY}" and _BOUNDARY not in inner else text


def from_skip(skip: str) -> str:
    """
    The reverse.  transformers takes `skip` as an expression for the start of a name, up to a dot or its end, and as
    the end of a name.
    """
    if skip.startswith("model.layers.") and skip.endswith(LINEARS) and _NAME.fullmatch(skip):
        return skip
    if _NAME.fullmatch(skip):
        return f"{EXPRESSION}(?:{skip}){_BOUNDARY}|.*{re.escape(skip)}$"
    return EXPRESSION + (skip if skip.endswith("$") else f"(?:{skip}){_BOUNDARY}")


def everywhere(linear: str) -> str:
    """The entry for one linear layer of all decoder layers."""
    return rf"{EXPRESSION}model\.layers\.\d+\.{re.escape(linear)}$"


def kept_everywhere(kept: tuple[str, ...], layers: int | None) -> tuple[str, ...]:
    """The members of LINEARS that are kept in every decoder layer; with `layers` unknown, those of `everywhere`."""

    def whole(linear: str) -> bool:
        named = layers is not None and all(f"model.layers.{layer}.{linear}" in kept for layer in range(layers))
        return named or everywhere(linear) in kept

    return tuple(linear for linear in LINEARS if whole(linear))
