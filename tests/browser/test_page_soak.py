"""
The live page, open for ten minutes: `make page-soak`, which says for how long in PELLUCID_PAGE_SOAK_S.
"""

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.browser.chromium import Tab
from tests.browser.conftest import busy
from tests.browser.test_page import model_of, show
from tests.live.conftest import Appliance

SOAK_S = float(os.environ.get("PELLUCID_PAGE_SOAK_S", "0"))
SLACK = {"heap": 300_000, "nodes": 1500, "jsEventListeners": 100, "documents": 1, "gateway_bytes": 8 << 20}

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.skipif(not SOAK_S, reason="takes minutes: make page-soak")
@pytest.mark.timeout(SOAK_S + 120)
async def test_ten_minutes_open_leak_nothing(appliance: Appliance, tab: Tab) -> None:
    """Under load; of all that is counted the least of the last third is no more than that of the third before."""
    await show(tab, appliance.url)
    samples: list[dict[str, int]] = []
    gateway = Path(f"/proc/{appliance.children()['gateway-0']}/statm")
    async with busy(appliance.url, model_of(appliance), streams=4):
        loop = asyncio.get_running_loop()
        end_s = loop.time() + SOAK_S
        while loop.time() < end_s:
            await asyncio.sleep(min(10.0, SOAK_S / 20))
            resident = int(gateway.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            samples.append({"heap": await tab.heap_bytes(), **await tab.counters(), "gateway_bytes": resident})
    events = await tab.evaluate("Number(document.documentElement.dataset.event)")
    third = len(samples) // 3
    parts = samples[:third], samples[third : 2 * third], samples[2 * third :]
    least = [{name: min(one[name] for one in part) for name in SLACK} for part in parts]
    print(json.dumps({"events": events, "samples": len(samples), "least of each third": least}))
    for name, slack in SLACK.items():
        assert least[2][name] - least[1][name] < slack, (name, least)
