"""The table of errors has every error that the gateway makes."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api import DEGENERATE, Fault, Finish, FinishReason, Usage
from gateway import errors
from gateway.errors import TABLE, ApiError
from tests.tidy.imports import ROOT, tracked

ROWS = {(row.status, row.code): row for row in TABLE}
GATEWAY = list(tracked("gateway/*.py"))
ARGUMENTS: dict[str, object] = {"limit_bytes": 1, "limit_s": 1.0, "nearest": None, "prompt_tokens": 1, "tokens_max": 1}
ARGUMENTS |= {"context_max": 1, "status": 500, "finish": Finish("failed", Usage())}
REASONS: tuple[FinishReason, ...] = ("abort", "deadline", "overloaded", "refused", "failed", "shutdown")


def made() -> Iterator[ApiError]:
    """One of each function of the module."""
    for function in vars(errors).values():
        if inspect.isfunction(function) and not function.__name__.startswith("_"):
            error = function(**{name: ARGUMENTS.get(name, "x") for name in inspect.signature(function).parameters})
            if error.status != 499:  # nobody is there to read it
                yield error
    for reason in REASONS:
        for code in ("context_length_exceeded", DEGENERATE):
            found = errors.of_finish(Finish(reason, Usage(), None, Fault(code, "x")))
            assert found is not None
            if reason == "refused" and code == DEGENERATE:
                continue  # no engine says so
            yield found
    for status in (400, 404, 405, 418, 500):
        yield errors.of_http(status, "GET", "/x")


def test_what_the_functions_make_is_in_the_table() -> None:
    errors_made = list(made())
    assert len({error.code for error in errors_made}) > 15
    for error in errors_made:
        row = ROWS[error.status, error.code or ""]
        assert error.kind in row.types, error.code
        assert set(row.headers) - {"allow"} <= set(error.headers), error.code  # the framework knows what is allowed


@pytest.mark.parametrize("path", GATEWAY, ids=str)
def test_what_others_make_is_in_the_table(path: Path) -> None:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ApiError")):
            continue
        status, code = (argument.value if isinstance(argument, ast.Constant) else None for argument in node.args[:2])
        if isinstance(status, int) and isinstance(code, str):
            assert (status, code) in ROWS, f"{path}:{node.lineno}"


def test_each_row_says_who_meets_it_and_nothing_stands_twice() -> None:
    assert len(ROWS) == len(TABLE)
    assert all(row.where and row.when and row.types for row in TABLE)
