"""
The `[[upstream]]` tables of the configuration file: servers with the OpenAI API that answer for further models.

A table is checked whole, and an error names it, its field and the way out.  Keys are not in it: it names the variable
or the file that has one.
"""

import re
from collections.abc import Mapping

import msgspec

from gateway.config import UpstreamOptions, check_upstreams
from launch.errors import UserError
from launch.parse import nearest

TABLE = "upstream"
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_TYPED = re.compile(r"(.*) - at `\$\.(.*)`", re.DOTALL)


def parse_upstreams(tables: object, file: str) -> tuple[UpstreamOptions, ...]:
    """The tables of `file`.  Raises UserError."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UserError(f"{file}: {TABLE}: tables are expected, each below a line [[{TABLE}]]")
    upstreams = tuple(_parse(table, f"{file}: {TABLE} {number}") for number, table in enumerate(tables, 1))
    try:
        check_upstreams(upstreams)
    except ValueError as error:
        raise UserError(f"{file}: {TABLE}: {error}") from error
    return upstreams


def _parse(table: Mapping[str, object], where: str) -> UpstreamOptions:
    fields: dict[str, object] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in fields:
            raise UserError(f"{where}: {key!r} stands there twice")
        fields[name] = value
    if isinstance(fields.get("name"), str):
        where += f" ({str(fields['name'])[:64]!r})"
    try:
        return msgspec.convert(fields, UpstreamOptions)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {_explain(str(error))}") from error


def _explain(message: str) -> str:
    """msgspec's words as ours."""
    if unknown := _UNKNOWN.fullmatch(message):
        return f"unknown key {unknown[1][:64]!r}{nearest(unknown[1], UpstreamOptions.__struct_fields__)}"
    if missing := _MISSING.fullmatch(message):
        return f"{missing[1]} is missing"
    if typed := _TYPED.fullmatch(message):
        return f"{typed[2]}: {typed[1][:1].lower()}{typed[1][1:]}"
    return message
