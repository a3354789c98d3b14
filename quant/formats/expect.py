"""
Typed look-ups in what others wrote: settings of a configuration, tensors of a file.  What is wrong is one ModelError.
"""

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from quant.formats.errors import ModelError

_T = TypeVar("_T")
_SHOWN_MAX = 60  # characters of somebody else's value in a message
COLUMNS_MAX = 2**24  # no layer is wider, so no group is
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Settings:
    """A JSON object, asked key by key.  A key with null is a key left out: tools write all they know."""

    def __init__(self, values: Mapping[str, object], place: str) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self._place = place

    def text(self, key: str, default: str | None = None) -> str:
        """A string.  Without a default, one must be there."""
        return self._of(key, str, default, "a string")

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        return self._of(key, bool, default, "true or false")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; true is none."""
        if isinstance(self.values.get(key), bool):
            raise self.wrong(key, "a whole number")
        return self._of(key, int, default, "a whole number")

    def real(self, key: str) -> float:
        """A finite number."""
        value = self.values.get(key)
        try:
            number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong(key, "a finite number")
        return number

    def inner(self, key: str) -> "Settings | None":
        """An object inside this one, or None."""
        if key not in self.values:
            return None
        return Settings(self._of(key, dict, None, "an object"), self._path(key))

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty if it is not there."""
        entries = self._of(key, list, [], "a list of strings")
        if not all(isinstance(entry, str) for entry in entries):
            raise self.wrong(key, "a list of strings")
        return tuple(entries)

    def wrong(self, key: str, wanted: str) -> ModelError:
        """The error that `key` is not what is wanted."""
        found = shown(self.values[key]) if key in self.values else "missing"
        return ModelError(f"{self._path(key)} is {found}, expected {wanted}: take the configuration it came with")

    def _path(self, key: str) -> str:
        """Where it is.  A key may be somebody else's choice, and hold line ends."""
        return f"{self._place}.{shown(key)[1:-1]}"

    def _of(self, key: str, kind: type[_T], default: _T | None, wanted: str) -> _T:
        value = self.values.get(key, default)
        if not isinstance(value, kind):
            raise self.wrong(key, wanted)
        return value


class Tensors:
    """The tensors of one linear layer by their suffixes."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str) -> None:
        self._tensors = tensors
        self._prefix = f"{name}." if name else ""

    def __contains__(self, suffix: str) -> bool:
        return suffix in self._tensors

    def take(self, suffix: str, dtypes: Iterable[torch.dtype], *shapes: tuple[int, ...]) -> Tensor:
        """The tensor, of one of these types and, if any is given, one of these shapes.  Raises ModelError."""
        tensor = self._tensors.get(suffix)
        if tensor is None:
            raise self.wrong(suffix, "is missing")
        if tensor.dtype not in dtypes:
            kinds = " or ".join(_kind(dtype) for dtype in dtypes)
            raise self.wrong(suffix, f"is {_kind(tensor.dtype)}, expected {kinds}")
        if shapes and tuple(tensor.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.wrong(suffix, f"has shape {list(tensor.shape)}, expected {wanted}")
        return tensor

    def numbers(self, suffix: str, dtypes: Iterable[torch.dtype], *shapes: tuple[int, ...]) -> Tensor:
        """The same as float32, all of it finite."""
        values = self.take(suffix, dtypes, *shapes).float()
        if not bool(torch.isfinite(values).all()):
            raise self.wrong(suffix, "holds NaN or infinities")
        return values

    def wrong(self, suffix: str, what: str) -> ModelError:
        """The error that this tensor is not as the format has it."""
        return ModelError(
            f"tensor {self._prefix}{suffix} {what}: an incomplete download, or another format than it says"
        )


def pattern(text: str, place: str) -> re.Pattern[str]:
    """The compiled regular expression.  Raises ModelError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about spellings that a later Python may read otherwise
            return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(f"{place} has {shown(text)}, which is no regular expression ({error}): correct it") from error


def shown(value: object) -> str:
    """A value for a message: on one line, and not longer than that."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits, an abyss of lists
        text = f"an unprintable {type(value).__name__}"
    return text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "..."


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
