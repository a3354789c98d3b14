"""
The live page as a person meets it: what it shows is true, it can be used without a pointer and without colours, and it
comes back.
"""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from tests.browser.chromium import Tab
from tests.browser.conftest import busy, small_gateway
from tests.cache import servers
from tests.http.guard import Guard
from tests.live.conftest import Appliance

pytestmark = pytest.mark.asyncio(loop_scope="session")

ALIVE = """document.documentElement?.dataset.event > 2 && document.getElementById('state').dataset.state === 'live' &&
  !document.querySelector('#kv-book tfoot td').textContent.startsWith('–')"""
OPEN = "document.getElementById('detail').open"
DOM_BOOK = """Object.fromEntries([...document.querySelectorAll('#kv-book tr[data-place]')]
  .map((row) => [row.dataset.place, Number(row.cells[1].textContent.replace(/\\D/g, ''))]))"""
BOOKS = f"""(async () => {{
  const {{ model, kv }} = await import('/page/page.js');
  await new Promise(requestAnimationFrame); await new Promise(requestAnimationFrame);
  const sum = {{ total: 0, free: 0, cached_idle: 0, filled: 0, tail: 0, lookahead: 0, fenced: 0 }};
  for (const map of kv.maps.values()) map.place.forEach((place, block) => {{
    const size = map.sight.block_slots;
    sum.total += size;
    if (place < 3) sum[['free', 'cached_idle', 'fenced'][place]] += size;
    else if (map.filled[block]) {{ sum.filled += map.filled[block]; sum.tail += size - map.filled[block]; }}
    else sum.lookahead += size;
  }});
  return {{ dom: {DOM_BOOK}, map: sum, event: model.book(), sequences: model.sequences().length }};
}})()"""
LEDGER = """({ id: document.getElementById('detail-title').textContent,
  states: Object.fromEntries([...document.querySelectorAll('#detail-ledger tbody tr')].map((row) => [row.dataset.state, Number(row.cells[2].dataset.ns)])),
  foot: [...document.querySelectorAll('#detail-ledger tfoot td[data-ns]')].map((cell) => Number(cell.dataset.ns)),
  verdict: document.querySelector('#detail-ledger tfoot tr:last-child td:last-child').textContent })"""
# What is written on what, for all text that is seen: the least contrast of WCAG 2, as its AA asks for 4.5.
CONTRAST = """(() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (one) => { for (; one; one = one.parentElement) { const c = parse(getComputedStyle(one).backgroundColor); if (c[3] === 1) return c; } return [255, 255, 255, 1]; };
  const found = [];
  for (const one of document.querySelectorAll('body *')) {
    if (!one.checkVisibility() || ![...one.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const [a, b] = [light(parse(getComputedStyle(one).color)), light(behind(one))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${one.tagName}.${one.className} ${one.textContent.slice(0, 20)} ${ratio.toFixed(2)}`);
  }
  return found;
})()"""
# Names of all that can be used or looked at, which a person who does not see it hears.
NAMELESS = """[...document.querySelectorAll('button, input, canvas, section, table, dialog')].filter((one) => one.checkVisibility() &&
  !(one.textContent.trim() && one.tagName === 'BUTTON') && !one.ariaLabel && !one.getAttribute('aria-labelledby') && !one.labels?.length &&
  !one.caption?.textContent).map((one) => one.outerHTML.slice(0, 80))"""


def model_of(appliance: Appliance) -> str:
    listed: Any = appliance.get("/v1/models")
    name: str = listed["data"][0]["id"]
    return name


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
async def test_what_it_looks_like(
    appliance: Appliance, tab: Tab, screenshots: Path, width: int, height: int, dark: bool
) -> None:
    name = f"{width}-{'dark' if dark else 'light'}"
    async with busy(appliance.url, model_of(appliance)):
        await tab.open(appliance.url, width=width, height=height, dark=dark)
        await tab.until(ALIVE)
        await tab.until("document.querySelectorAll('#kv-owners tbody tr').length > 2", "requests hold KV")
        await tab.screenshot(screenshots / f"{name}.png")
        assert await tab.evaluate("document.documentElement.scrollWidth") == width, "it scrolls sideways"
        assert await tab.evaluate(CONTRAST) == []
        assert await tab.evaluate(NAMELESS) == []
        assert await tab.evaluate("[...document.querySelectorAll('main, header, footer, h1')].length") == 4
        # A picture is drawn where the canvas is, in more than one colour.
        for canvas in ("#kv-maps canvas", "#steps-chart"):
            pixels = f"(() => {{ const one = document.querySelector('{canvas}'); const data = new Uint32Array(one.getContext('2d')\
                .getImageData(0, 0, one.width, one.height).data.buffer); return new Set(data).size; }})()"
            assert await tab.evaluate(pixels) > 5, canvas
        await tab.click("#requests-table tbody tr:nth-child(3)")
        await tab.until(OPEN)
        assert await tab.evaluate(CONTRAST) == []
        assert await tab.evaluate("document.getElementById('detail').scrollWidth <= innerWidth")
        await tab.screenshot(screenshots / f"{name}-request.png", full=False)


async def test_the_numbers_of_the_map_are_the_book(appliance: Appliance, tab: Tab) -> None:
    await tab.open(appliance.url)
    await tab.until(ALIVE)
    async with busy(appliance.url, model_of(appliance)):
        for _ in range(8):
            found = await tab.evaluate(BOOKS)
            assert found["dom"] == found["map"] == found["event"], "under load, of one moment"
            assert found["dom"]["total"] == sum(slots for place, slots in found["dom"].items() if place != "total")
            await asyncio.sleep(0.3)
        await tab.until("document.querySelectorAll('#kv-owners tbody tr').length > 2", "requests hold KV")
    await tab.until("document.querySelectorAll('#kv-owners tbody tr').length === 0", "the engine is idle")
    kv: Any = appliance.get("/debug/kv")
    found = await tab.evaluate(BOOKS)
    assert found["dom"] == found["map"] == kv["slots"] and kv["slots"]["filled"] == 0 < kv["slots"]["cached_idle"]


async def test_a_click_opens_the_ledger(appliance: Appliance, tab: Tab) -> None:
    body = {"model": model_of(appliance), "messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 24}
    request_id = appliance.http.post("/v1/chat/completions", json=body).json()["id"]
    await tab.open(appliance.url)
    await tab.until(f"document.querySelector('[data-request=\"{request_id}\"]')?.cells[2].className === ''", "its end")
    await tab.click(f"[data-request='{request_id}'] .bars")
    await tab.until(OPEN)
    shown = await tab.evaluate(LEDGER)
    record: Any = appliance.get(f"/debug/requests/{request_id}")
    assert shown["id"] == request_id and shown["states"] == record["states"]
    assert shown["foot"] == [sum(record["states"].values()), record["e2e_ns"]] == [record["e2e_ns"]] * 2
    assert shown["verdict"] == "✓ equal"
    assert await tab.evaluate("document.getElementById('why-summary').textContent.length > 10"), "why, or that nobody knows"
    await tab.click("#detail-close")
    await tab.until(f"!{OPEN}")


async def test_without_a_pointer(appliance: Appliance, tab: Tab) -> None:
    async with busy(appliance.url, model_of(appliance), tokens_max=400):
        await tab.open(appliance.url)
        await tab.until(ALIVE)
        await tab.until("document.querySelectorAll('#kv-owners tbody tr').length > 2", "requests hold KV")
        met: list[str] = []
        for _ in range(40):
            await tab.press("Tab")
            met.append(await tab.evaluate("document.activeElement.id || document.activeElement.className || document.activeElement.tagName"))
            assert await tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", f"{met[-1]}: focus is not seen"
            if met[-1] == "map":
                await _walk_over_the_map(tab)
            if met[-1] == "steps-chart":
                await tab.press("End")
                assert (await tab.evaluate("document.getElementById('steps-reading').textContent")).startswith("Step ")
                break
        assert met[:2] == ["skip", "pause"] and "map" in met and met[-1] == "steps-chart"
        await tab.evaluate("document.querySelector('#requests-table button.id').focus()")
        await tab.press("Enter")
        await tab.until(OPEN)
        assert await tab.evaluate("document.getElementById('detail').contains(document.activeElement)")
        await tab.press("Escape")
        await tab.until(f"!{OPEN}")
        assert await tab.evaluate("document.activeElement.matches('#requests-table button.id')"), "focus is where it was"


async def _walk_over_the_map(tab: Tab) -> None:
    """To a block that is held, by its words; its request opens, and closes."""
    reading = "document.getElementById('kv-reading').textContent"
    for _ in range(400):
        await tab.press("ArrowRight")
        words = await tab.evaluate(reading)
        if "held by" in words:
            break
    assert "slots filled" in words
    await tab.press("Enter")
    await tab.until(OPEN)
    assert await tab.evaluate("document.getElementById('detail-title').textContent") in words
    await tab.press("Escape")
    await tab.until(f"!{OPEN} && document.activeElement.matches('canvas.map')")


async def test_who_pauses_costs_nothing_and_who_wants_no_motion_sees_none(appliance: Appliance, tab: Tab) -> None:
    def viewers() -> float:
        lines = appliance.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("pellucid_requests_live") and 'route="/debug/live"' in line)

    await tab.open(appliance.url)
    await tab.until(ALIVE)
    assert viewers() == 1
    assert await tab.evaluate("getComputedStyle(document.querySelector('.dot')).animationName") == "breathe"
    still = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    await tab.send("Emulation.setEmulatedMedia", features=still)
    assert await tab.evaluate("getComputedStyle(document.querySelector('.dot')).animationName") == "none"
    await tab.click("#pause")
    await tab.until("document.getElementById('state').dataset.state === 'paused'")
    for _ in range(100):
        if not viewers():
            break
        await asyncio.sleep(0.02)
    assert viewers() == 0
    await tab.click("#pause")
    await tab.until(ALIVE)


async def test_a_key_is_asked_for_and_kept_for_this_tab(tab: Tab) -> None:
    with TemporaryDirectory(prefix="pellucid") as home, servers.embedded(Path(home) / "v") as server:
        guard = Guard(server, Path(home))
        keys = {tenant: await asyncio.to_thread(guard.create, tenant=tenant) for tenant in ("green", "blue")}
        with small_gateway(**guard.options) as (gateway, _):
            for tenant, issued in keys.items():
                headers = {"authorization": f"Bearer {issued.key}", "x-request-id": f"of-{tenant}"}
                body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8}
                async with httpx.AsyncClient(base_url=gateway.url, verify=False) as client:
                    assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
            await tab.open(gateway.url)
            await tab.until("document.activeElement.id === 'key'", "the key is asked for")
            await tab.type("wrong")
            await tab.press("Enter")
            await tab.until("document.getElementById('key-words').textContent.includes('not good')")
            await tab.type(keys["green"].key)
            await tab.press("Enter")
            await tab.until(ALIVE)
            await tab.until("!!document.querySelector('[data-request=of-green]')")
            assert await tab.evaluate("document.querySelector('[data-request=of-blue]') === null")
            await tab.reload()
            await tab.until(ALIVE, "the key is kept")
            assert await tab.evaluate("localStorage.length === 0 && !document.cookie")
            await tab.click("#forget")
            await tab.until("document.activeElement?.id === 'key'", "it is forgotten")
            refused = [one for one in tab.complaints if "401" in one]
            assert refused == tab.complaints and len(refused) > 2, "a browser says of each refusal that there was one"
            tab.complaints.clear()


async def test_it_comes_back_with_its_gateway(appliance: Appliance, tab: Tab) -> None:
    await tab.open(appliance.url)
    await tab.until(ALIVE)
    os.kill(appliance.children()["gateway-0"], signal.SIGKILL)
    await tab.until("document.getElementById('state').dataset.state === 'lost'", "it says that it is not connected")
    await tab.evaluate("document.documentElement.dataset.event = 0")
    await tab.until(ALIVE, "it is live again", within_s=40)
    await tab.until(f"Object.values({DOM_BOOK})[0] >= 0 && ({DOM_BOOK}).total > 0", "and has a map")
    tab.complaints.clear()  # connections that were refused meanwhile


async def test_an_open_page_does_not_hold_up_a_drain(tab: Tab) -> None:
    with small_gateway() as (gateway, _):
        await tab.open(gateway.url)
        await tab.until(ALIVE)
        began_s = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began_s < 2.0
    await tab.until("document.getElementById('state').dataset.state === 'lost'")
    tab.complaints.clear()


async def test_what_is_open_for_long_stays_small(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of ticks under load, of which each brings other requests: neither heap nor document grows."""
    monkeypatch.setattr("gateway.live.TICK_S", 0.02)
    with small_gateway(step_delay_s=0.001) as (gateway, _):
        async with busy(gateway.url, "tiny", tokens_max=4):
            await tab.open(gateway.url)
            await tab.until("document.documentElement.dataset.event > 60 && document.querySelectorAll('#requests-table tbody tr').length >= 40")
            heaps = []
            for number in (100, 180, 260):
                await tab.until(f"document.documentElement.dataset.event > {number}")
                heaps.append((await tab.heap_bytes(), await tab.counters()))
        first, last = heaps[0], heaps[-1]
        assert last[0] - first[0] < 600_000, heaps
        assert last[1]["nodes"] < 6000 and last[1]["jsEventListeners"] < 400, heaps
        assert await tab.evaluate("import('/page/page.js').then(({ model }) => model.requests.size <= 100 && model.steps.length <= 480)")


SOAK_S = float(os.environ.get("PELLUCID_PAGE_SOAK_S", "0"))


@pytest.mark.skipif(not SOAK_S, reason="takes PELLUCID_PAGE_SOAK_S seconds, which says 0: make page-soak")
@pytest.mark.timeout(SOAK_S + 120)
async def test_ten_minutes_open_leak_nothing(appliance: Appliance, tab: Tab, screenshots: Path) -> None:
    """On the appliance, under load; the least heap of the last third is that of the second, and so are all counters."""
    await tab.open(appliance.url)
    await tab.until(ALIVE)
    samples: list[dict[str, float]] = []
    async with busy(appliance.url, model_of(appliance), streams=4):
        loop = asyncio.get_running_loop()
        end_s = loop.time() + SOAK_S
        while loop.time() < end_s:
            await asyncio.sleep(min(10.0, SOAK_S / 20))
            sample = {"heap": await tab.heap_bytes(), **await tab.counters()}
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{appliance.children()['gateway-0']}/statm").read_text()
                sample["gateway_pages"] = float(status.split()[1])
            samples.append(sample)
    print(json.dumps({"first": samples[0], "middle": samples[len(samples) // 2], "last": samples[-1], "samples": len(samples)}))
    third = len(samples) // 3
    for name, slack in (("heap", 300_000), ("nodes", 1500), ("jsEventListeners", 100), ("documents", 1)):
        second, last = (min(one[name] for one in part) for part in (samples[third : 2 * third], samples[2 * third :]))
        assert last - second < slack, (name, second, last)
    assert tab.complaints == []
