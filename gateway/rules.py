"""
Rules that types cannot say, as data: `gateway.decode` holds requests against them, `gateway.openapi` writes them down.

A rule is kept where one of its alternatives is; an alternative names fields, and the values that each may have.  An
absent field has the value null.
"""

from collections.abc import Mapping

import msgspec

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


class Values(msgspec.Struct, frozen=True):
    """What a field may be, or may not."""

    values: tuple[Plain, ...]
    among: bool = True

    def admits(self, value: object) -> bool:
        """Whether the field may be this."""
        return (value in self.values) is self.among

    def schema(self, field: str) -> dict[str, Plain]:
        """The same as JSON Schema."""
        values: dict[str, Plain] = {"enum": list(self.values)}
        properties: dict[str, Plain] = {field: values if self.among else {"not": values}}
        return {"properties": properties} if self.admits(None) else {"properties": properties, "required": [field]}


def one_of(*values: Plain) -> Values:
    """The field is one of these."""
    return Values(values)


def none_of(*values: Plain) -> Values:
    """The field is none of these."""
    return Values(values, among=False)


class Rule(msgspec.Struct, frozen=True):
    """One rule about the fields of one object."""

    field: str
    """Whose fault it is when the rule is broken."""
    message: str
    alternatives: tuple[Mapping[str, Values], ...]

    def kept(self, request: msgspec.Struct) -> bool:
        """Whether this request keeps it."""
        return any(
            all(values.admits(getattr(request, field)) for field, values in alternative.items())
            for alternative in self.alternatives
        )

    def schema(self) -> dict[str, Plain]:
        """The same as JSON Schema."""
        return {"anyOf": [_all(alternative) for alternative in self.alternatives], "description": self.message}


def _all(alternative: Mapping[str, Values]) -> Plain:
    parts: list[Plain] = [values.schema(field) for field, values in alternative.items()]
    return parts[0] if len(parts) == 1 else {"allOf": parts}
