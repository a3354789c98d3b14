"""
Two thousand short requests, a third of them dropped by the client at a random moment; nothing may be left behind.
"""

import asyncio
import os
import random
from pathlib import Path

import httpx
import pytest

from tests.live.conftest import Appliance
from tests.live.test_appliance import held, ledgers, model_of, wait_for

WINDOWS = 10
WINDOW_REQUESTS = 200
CLIENTS = 32
SEED = 20
GROWTH_BYTES_MAX = {"gateway-0": 2 << 20, "engine-0": 4 << 20}
"""
From the highest reading of the second third to the lowest of the last.  The engine's readings move by 20 MB, as
allocators breathe and meet new shapes; the gateway's rise until its rings of records are full.  A leak passes both.
"""


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def loop_tasks(appliance: Appliance) -> float:
    """Tasks of the gateway, the one that answers this question included."""
    lines = appliance.http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("pellucid_event_loop_tasks ")).split()[1])


async def one(http: httpx.AsyncClient, model: str, pick: random.Random, index: int) -> str:
    """One request, perhaps dropped."""
    stream = pick.random() < 0.5
    patience_s = pick.uniform(0.0, 0.4) if index % 3 == 0 else None
    body = {
        "model": model,
        "messages": [{"role": "user", "content": " ".join(pick.choices(["red", "blue", "sky", "sun"], k=12))}],
        "max_tokens": pick.choice((1, 4, 12)),
        "stream": stream,
        "seed": index,
    }
    try:
        async with asyncio.timeout(patience_s):
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                text = (await answer.aread()).decode()
                assert answer.status_code == 200, text
                assert not stream or text.rstrip().endswith("data: [DONE]")
    except TimeoutError:
        return "dropped"
    return "answered"


async def play(appliance: Appliance, first: int, count: int, model: str) -> list[str]:
    """`count` requests from `CLIENTS` clients."""
    pick = random.Random(SEED + first)
    numbers = iter(range(first, first + count))
    outcomes: list[str] = []
    async with httpx.AsyncClient(base_url=appliance.url, timeout=60) as http:

        async def client() -> None:
            for number in numbers:
                outcomes.append(await one(http, model, pick, number))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return outcomes


@pytest.mark.timeout(480)  # Two thousand answers of a real model.
def test_nothing_is_left_behind(appliance: Appliance) -> None:
    model = model_of(appliance)
    children = {name: pid for name, pid in appliance.children().items() if name != "valkey"}
    outcomes = asyncio.run(play(appliance, 0, WINDOW_REQUESTS, model))  # Pools and caches find their size.
    wait_for(lambda: held(appliance) == 0, "no KV is held after warming up")
    before = {name: descriptors(pid) for name, pid in children.items()}
    tasks = loop_tasks(appliance)
    resident: dict[str, list[int]] = {name: [] for name in children}
    for window in range(1, WINDOWS):
        outcomes += asyncio.run(play(appliance, window * WINDOW_REQUESTS, WINDOW_REQUESTS, model))
        for name, pid in children.items():
            resident[name].append(resident_bytes(pid))
    wait_for(lambda: held(appliance) == 0, "no KV is held")
    wait_for(lambda: all(row.outcome is not None for row in ledgers(appliance)), "no request is live")
    wait_for(lambda: {name: descriptors(pid) for name, pid in children.items()} == before, "no descriptor is left")
    wait_for(lambda: loop_tasks(appliance) == tasks, "no task is left")
    third = (WINDOWS - 1) // 3
    growth = {name: min(seen[2 * third :]) - max(seen[third : 2 * third]) for name, seen in resident.items()}
    print(f"seed {SEED}: {outcomes.count('dropped')} of {len(outcomes)} dropped, growth {growth}, readings {resident}")
    assert 0.1 * len(outcomes) < outcomes.count("dropped")
    assert all(growth[name] < most for name, most in GROWTH_BYTES_MAX.items()), growth
    assert all(sum(row.states.values()) == row.e2e_ns for row in ledgers(appliance))
    lines = appliance.http.get("/metrics").text.splitlines()
    mismatches = [line for line in lines if "mismatch" in line and not line.startswith("#")]
    assert all(line.endswith((" 0", " 0.0")) for line in mismatches), mismatches
    filled = [line for line in lines if line.startswith("pellucid_kv_slots{") and 'place="filled"' in line]
    assert filled and all(float(line.split()[-1]) == 0 for line in filled), "the gauges froze"
