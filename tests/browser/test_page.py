"""
The live page as a person meets it: what it shows is true, it can be used without a pointer and without colours, and it
comes back.
"""

import asyncio
import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from gateway.explain import SOMEBODY
from telemetry import vocabulary
from telemetry.records import STEP_PARTS
from tests.browser.chromium import Tab
from tests.browser.conftest import busy, small_gateway
from tests.cache import servers
from tests.http.guard import Guard
from tests.live.conftest import Appliance

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROBES = (Path(__file__).parent / "probes.js").read_text()
STATE = "document.getElementById('state')?.dataset.state"
LIVE = f"""{STATE} === 'live' && document.documentElement.dataset.event > 2 &&
  !document.querySelector('#kv-book tfoot td').textContent.startsWith('–')"""
OPEN = "document.getElementById('detail').open"
SHUT = f"!{OPEN}"


async def show(tab: Tab, url: str, **how: Any) -> None:
    """Open the page, and wait until it shows what is in the engine."""
    await tab.open(url, **how)
    await tab.until(LIVE, "it is live")
    await tab.evaluate(PROBES)


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
        await show(tab, appliance.url, width=width, height=height, dark=dark)
        await tab.until("probe.owners() > 2", "requests hold KV")
        await tab.screenshot(screenshots / f"{name}.png")
        assert await tab.evaluate("document.documentElement.scrollWidth") == width, "it scrolls sideways"
        assert await tab.evaluate("probe.faint()") == []
        assert await tab.evaluate("probe.nameless()") == []
        assert await tab.evaluate("document.querySelectorAll('main, header, footer, h1').length") == 4
        for canvas in ("#kv-maps canvas", "#steps-chart"):
            assert await tab.evaluate(f"probe.colours('{canvas}')") > 5, canvas
        await tab.click("#requests-table tbody tr:nth-child(3)")
        await tab.until(OPEN)
        assert await tab.evaluate("probe.faint()") == []
        assert await tab.evaluate("document.getElementById('detail').scrollWidth <= innerWidth")
        await tab.screenshot(screenshots / f"{name}-request.png", full=False)


async def test_the_numbers_of_the_map_are_the_book(appliance: Appliance, tab: Tab) -> None:
    await show(tab, appliance.url)
    async with busy(appliance.url, model_of(appliance)):
        for _ in range(8):
            found = await tab.evaluate("probe.books()")
            assert found["written"] == found["map"] == found["event"], "under load, of one moment"
            written = found["written"]
            assert written["total"] == sum(slots for place, slots in written.items() if place != "total")
            await asyncio.sleep(0.3)  # Between two ticks: each look is at another moment.
        await tab.until("probe.owners() > 2", "requests hold KV")
    await tab.until("probe.owners() === 0", "the engine is idle")
    kv: Any = appliance.get("/debug/kv")
    found = await tab.evaluate("probe.books()")
    assert found["written"] == found["map"] == kv["slots"] and kv["slots"]["filled"] == 0 < kv["slots"]["cached_idle"]


async def test_a_click_opens_the_ledger(appliance: Appliance, tab: Tab) -> None:
    body = {"model": model_of(appliance), "messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 24}
    request_id = appliance.http.post("/v1/chat/completions", json=body).json()["id"]
    await show(tab, appliance.url)
    its_row = f"[data-request='{request_id}']"
    await tab.until(f'document.querySelector("{its_row}")?.cells[2].className === ""', "its end")
    await tab.click(f"{its_row} .bars")
    await tab.until(OPEN)
    shown = await tab.evaluate("probe.ledger()")
    record: Any = appliance.get(f"/debug/requests/{request_id}")
    assert shown["id"] == request_id and shown["states"] == record["states"]
    assert shown["written"] == list(shown["states"].values()), "to the nanosecond"
    assert shown["foot"] == [sum(record["states"].values()), record["e2e_ns"]] == [record["e2e_ns"]] * 2
    assert shown["verdict"] == "✓ equal"
    await tab.until("probe.ledger().why.length > 10", "why, or that nobody knows")
    await tab.click("#detail-close")
    await tab.until(SHUT)


async def test_without_a_pointer(appliance: Appliance, tab: Tab) -> None:
    async with busy(appliance.url, model_of(appliance), tokens_max=400):
        await show(tab, appliance.url)
        await tab.until("probe.owners() > 2", "requests hold KV")
        met: list[str] = []
        while "steps-chart" not in met:
            assert len(met) < 40, met
            await tab.press("Tab")
            focus = await tab.evaluate("probe.focus()")
            met.append(focus["name"])
            assert focus["outline"] != "none", f"where the focus is, is not seen: {met[-1]}"
            if met[-1] == "map":
                await _walk_over_the_map(tab)
        await tab.press("End")
        assert (await tab.evaluate("document.getElementById('steps-reading').textContent")).startswith("Step ")
        assert met[:2] == ["skip", "pause"] and "map" in met
        await tab.evaluate("document.querySelector('#requests-table button.id').focus()")
        await tab.press("Enter")
        await tab.until(OPEN)
        assert await tab.evaluate("document.getElementById('detail').contains(document.activeElement)")
        await tab.press("Escape")
        await tab.until(SHUT)
        back = "document.activeElement.matches('#requests-table button.id')"
        assert await tab.evaluate(back), "the focus is where it was"


async def _walk_over_the_map(tab: Tab) -> None:
    """To a block that is held, by its words; its request opens, and closes."""
    words = ""
    for _ in range(600):
        await tab.press("ArrowRight")
        words = await tab.evaluate("document.getElementById('kv-reading').textContent")
        if "held by" in words:
            break
    assert "slots filled" in words
    await tab.press("Enter")
    await tab.until(OPEN)
    assert await tab.evaluate("document.getElementById('detail-title').textContent") in words
    await tab.press("Escape")
    await tab.until(f"{SHUT} && document.activeElement.matches('canvas.map')")


async def test_who_pauses_costs_nothing_and_who_wants_no_motion_sees_none(appliance: Appliance, tab: Tab) -> None:
    def viewers() -> float:
        lines = appliance.http.get("/metrics").text.splitlines()
        mine = [line for line in lines if line.startswith("pellucid_requests_live") and "/debug/live" in line]
        return sum(float(line.split()[-1]) for line in mine)

    motion = "getComputedStyle(document.querySelector('.dot')).animationName"
    await show(tab, appliance.url)
    assert viewers() == 1
    assert await tab.evaluate(motion) == "breathe"
    still = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    await tab.send("Emulation.setEmulatedMedia", features=still)
    assert await tab.evaluate(motion) == "none"
    await tab.click("#pause")
    await tab.until(f"{STATE} === 'paused'")
    async with asyncio.timeout(5):
        while viewers():
            await asyncio.sleep(0.02)  # Its server has a clock of its own.
    await tab.click("#pause")
    await tab.until(LIVE)
    await tab.evaluate("Object.defineProperty(document, 'visibilityState', { value: 'hidden', configurable: true })")
    await tab.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    await tab.until(f"{STATE} === 'paused'", "a page that nobody sees asks for nothing")
    await tab.evaluate("delete document.visibilityState")
    await tab.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    await tab.until(LIVE)


async def test_a_stream_that_ends_in_its_time_is_followed_by_another(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.live.STREAM_S_MAX", 1.2)
    with small_gateway() as (gateway, _):
        await show(tab, gateway.url)
        await tab.evaluate(
            "window.states = new Set(); const one = document.getElementById('state');"
            "new MutationObserver(() => states.add(one.dataset.state)).observe(one, { attributes: true })"
        )
        await tab.until("document.documentElement.dataset.event > 9")
        assert await tab.evaluate("[...states].sort()") == ["live", "opening"]
    await tab.until(f"{STATE} === 'lost'")
    tab.complaints.clear()  # its gateway is gone


async def test_a_key_is_asked_for_and_kept_for_this_tab(tab: Tab) -> None:
    with TemporaryDirectory(prefix="pellucid") as home, servers.embedded(Path(home) / "v") as server:
        guard = Guard(server, Path(home))
        keys = {tenant: await asyncio.to_thread(guard.create, tenant=tenant) for tenant in ("green", "blue")}
        with small_gateway(options=guard.options) as (gateway, _):
            async with httpx.AsyncClient(base_url=gateway.url, verify=False) as client:
                for tenant, issued in keys.items():
                    headers = {"authorization": f"Bearer {issued.key}", "x-request-id": f"of-{tenant}"}
                    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8}
                    assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
            await tab.open(gateway.url)
            await tab.until("document.activeElement.id === 'key'", "the key is asked for")
            await tab.type("wrong")
            await tab.press("Enter")
            await tab.until("document.getElementById('key-words').textContent.includes('not good')")
            await tab.type(keys["green"].key)
            await tab.press("Enter")
            await tab.until(LIVE)
            await tab.until("document.querySelector('[data-request=of-green]') !== null")
            assert await tab.evaluate("document.querySelector('[data-request=of-blue]') === null")
            await tab.reload()
            await tab.until(LIVE, "the key is kept")
            assert await tab.evaluate("localStorage.length === 0 && !document.cookie")
            await tab.click("#forget")
            await tab.until("document.activeElement?.id === 'key'", "it is forgotten")
            refused = [one for one in tab.complaints if "401" in one]
            assert refused == tab.complaints and len(refused) > 2, "a browser says of each refusal that there was one"
            tab.complaints.clear()


async def test_others_that_are_not_for_these_eyes_cannot_be_opened(tab: Tab) -> None:
    with TemporaryDirectory(prefix="pellucid") as home, servers.embedded(Path(home) / "v") as server:
        guard = Guard(server, Path(home))
        keys = {tenant: await asyncio.to_thread(guard.create, tenant=tenant) for tenant in ("green", "blue")}
        with small_gateway(options=guard.options) as (gateway, _):
            async with httpx.AsyncClient(base_url=gateway.url, verify=False) as client:

                async def complete(tenant: str, name: str) -> None:
                    headers = {"authorization": f"Bearer {keys[tenant].key}", "x-request-id": name}
                    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 60, "ignore_eos": True}
                    assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200

                await asyncio.gather(complete("green", "mine"), complete("green", "also-mine"), complete("blue", "not"))
            await tab.open(gateway.url)
            await tab.until("document.activeElement.id === 'key'", "the key is asked for")
            await tab.type(keys["green"].key)
            await tab.press("Enter")
            await tab.until("document.querySelector('[data-request=mine] button.id') !== null")
            await tab.click("[data-request=mine] button.id")
            others = "document.getElementById('why-others')"
            await tab.until(f"{others}.textContent.includes('{SOMEBODY}')", "who was served with it")
            assert await tab.evaluate(f"[...{others}.querySelectorAll('button')].map((one) => one.title)") == [
                "also-mine"
            ]
            refused = [one for one in tab.complaints if "401" in one]
            assert refused == tab.complaints
            tab.complaints.clear()
    await tab.until(f"{STATE} === 'lost'")
    tab.complaints.clear()  # its gateway is gone


FORGOTTEN = "document.getElementById('{}').textContent.includes('not remembered any more')"


async def test_a_request_that_is_forgotten_is_said_to_be(tab: Tab) -> None:
    with small_gateway() as (gateway, _):
        await show(tab, gateway.url)
        await tab.evaluate(
            "window.waits = []; window.wait = setTimeout;"
            "window.setTimeout = (what, ms, ...more) => (waits.push(ms), wait(what, ms, ...more))"
        )
        await tab.evaluate("import('/page/page.js').then(({ detail }) => detail.open('forgotten'))")
        assert await tab.evaluate(OPEN)
        await tab.until(FORGOTTEN.format("detail-sub"))
        await tab.until(FORGOTTEN.format("why-summary"))
        assert not await tab.evaluate("document.getElementById('detail-ledger').checkVisibility()"), "there is none"
        assert 3000 not in await tab.evaluate("waits"), "it is not asked for again"
        await tab.evaluate("document.getElementById('detail').close()")
        one = "{ request_id: 'late', outcome: null, state: 'decode', states: { decode: 5 }, e2e_ns: 5 }"
        await tab.evaluate(
            "window.fetch = async (path) => path.includes('/why/') ? new Response('', { status: 404 })"
            f" : Response.json({one}); import('/page/page.js').then(({{ detail }}) => detail.open('late'))"
        )
        await tab.until(FORGOTTEN.format("detail-sub"))
        assert (await tab.evaluate("probe.ledger()"))["states"] == {"decode": 5}, "what was seen of it stays"
        assert 3000 not in await tab.evaluate("waits"), "nor is one that was in flight"
        missing = [one for one in tab.complaints if "404" in one and "/debug/requests/forgotten" in one]
        assert missing == tab.complaints, "a browser says of each that there was none"
    await tab.until(f"{STATE} === 'lost'")
    tab.complaints.clear()  # its gateway is gone


async def test_the_words_are_those_of_the_vocabulary(tab: Tab) -> None:
    with small_gateway() as (gateway, _):
        await tab.open(gateway.url)
        words = await tab.evaluate(
            "import('/page/words.js').then(({ STATES, PARTS, OUTCOMES, FINE, SOMEBODY }) => "
            "[Object.keys(STATES), Object.keys(PARTS), [...Object.keys(OUTCOMES), ...FINE], SOMEBODY])"
        )
    states, parts, outcomes, somebody = words
    assert set(states) == set(vocabulary.STATES) and set(parts) == set(STEP_PARTS)
    assert set(outcomes) <= set(vocabulary.OUTCOMES) and somebody == SOMEBODY
    await tab.until(f"{STATE} === 'lost'")
    tab.complaints.clear()  # its gateway is gone


async def test_it_comes_back_with_its_gateway(appliance: Appliance, tab: Tab) -> None:
    await show(tab, appliance.url)
    os.kill(appliance.children()["gateway-0"], signal.SIGKILL)
    await tab.until(f"{STATE} === 'lost'", "it says that it is not connected")
    await tab.evaluate("document.documentElement.dataset.event = 0")
    await tab.until(LIVE, "it is live again", within_s=40)
    assert (await tab.evaluate("probe.written()"))["total"] > 0
    tab.complaints.clear()  # connections that were refused meanwhile


async def test_an_open_page_does_not_hold_up_a_drain(tab: Tab) -> None:
    loop = asyncio.get_running_loop()
    with small_gateway() as (gateway, _):
        await show(tab, gateway.url)
        began_s = loop.time()
    assert loop.time() - began_s < 2.0, "uvicorn alone would wait for three seconds, and then cut it off"
    await tab.until(f"{STATE} === 'lost'")
    tab.complaints.clear()  # connections that were refused since


async def test_what_is_open_for_long_stays_small(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of ticks under load, of which each brings other requests: neither heap nor document grows."""
    monkeypatch.setattr("gateway.live.TICK_S", 0.02)
    with small_gateway(step_delay_s=0.001) as (gateway, _):
        async with busy(gateway.url, "tiny", tokens_max=4):
            await show(tab, gateway.url)
            await tab.until("document.querySelectorAll('#requests-table tbody tr').length >= 40", "the list is full")
            samples = []
            for number in (90, 150, 210):
                await tab.until(f"document.documentElement.dataset.event > {number}")
                samples.append({"heap": await tab.heap_bytes(), **await tab.counters()})
    first, last = samples[0], samples[-1]
    assert last["heap"] - first["heap"] < 600_000, samples
    assert last["nodes"] < 6000 and last["jsEventListeners"] < 400, samples
    assert await tab.evaluate("probe.bounded()")
    tab.complaints.clear()  # its gateway is gone
