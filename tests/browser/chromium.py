"""
Debian's Chromium without a window, driven over the DevTools protocol: as much of it as the tests of the page need.

A tab keeps what a person would find in its console: errors, exceptions, and requests that failed.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any  # Any: what a page's own JavaScript comes to

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S = 30.0
WAIT_S = 20.0
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
    "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--hide-scrollbars", "--force-device-scale-factor=1", "--js-flags=--expose-gc", "about:blank",
)  # fmt: skip
_LISTENS = re.compile(rb"DevTools listening on (ws://\S+)")
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowDown": 40, "End": 35, " ": 32}


def executable() -> str | None:
    """The browser, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page."""

    def __init__(self, browser: "Browser", session: str, target: str) -> None:
        self.complaints: list[str] = []
        """What the console says that is no good."""
        self.target = target
        self._browser, self._session = browser, session

    async def send(self, method: str, **parameters: object) -> Any:
        """A command, and what came of it."""
        return await self._browser.send(method, session=self._session, **parameters)

    def heard(self, method: str, said: Any) -> None:
        """An event."""
        if method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.complaints.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value")) for one in said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
        elif method == "Network.responseReceived" and said["response"]["status"] >= 400:
            self.complaints.append(f"{said['response']['status']} {said['response']['url']}")
        elif method == "Network.loadingFailed" and not said.get("canceled"):
            self.complaints.append(f"{said['errorText']} {said['type']}")

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a page at this size."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.resize(width, height)
        await self.scheme(dark=dark)
        await self.send("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'", url)

    async def reload(self) -> None:
        """Show it anew."""
        await self.evaluate("window.before = true")
        await self.send("Page.reload")
        await self.until("!window.before && document.readyState === 'complete'", "it is loaded again")

    async def resize(self, width: int, height: int) -> None:
        """The size of its window."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def scheme(self, *, dark: bool) -> None:
        """What the person prefers."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def evaluate(self, expression: str) -> Any:
        """What JavaScript comes to; a promise is waited for."""
        answer = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, what: str = "", within_s: float = WAIT_S) -> Any:
        """Poll until it is true: the page has its own clock.  What it came to."""
        end_s = asyncio.get_running_loop().time() + within_s
        while not (found := await self.evaluate(expression)):
            assert asyncio.get_running_loop().time() < end_s, f"not within {within_s:g} s: {what or expression}"
            await asyncio.sleep(0.05)
        return found

    async def click(self, selector: str) -> None:
        """With the pointer, where it is."""
        box = await self.evaluate(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            " one.scrollIntoView({block: 'center'});"
            " const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """A key, as a person presses it."""
        text = {"Enter": "\r", " ": " "}.get(key)
        common = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key], "modifiers": 8 if shift else 0}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.send("Input.insertText", text=text)

    async def screenshot(self, place: Path, *, full: bool = True) -> None:
        """The whole page, or what fits the window, as a PNG."""
        shot = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(base64.b64decode(shot["data"]))

    async def heap_bytes(self) -> int:
        """What JavaScript holds when all that nobody needs is gone."""
        await self.send("HeapProfiler.collectGarbage")
        usage = await self.send("Runtime.getHeapUsage")
        return int(usage["usedSize"])

    async def counters(self) -> dict[str, int]:
        """Of the renderer: `documents`, `nodes`, `jsEventListeners`."""
        found: dict[str, int] = await self.send("Memory.getDOMCounters")
        return found

    async def close(self) -> None:
        """Close it."""
        await self._browser.send("Target.closeTarget", targetId=self.target)


class Browser:
    """A running browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tabs: dict[str, Tab] = {}
        self._reading = asyncio.create_task(self._read(), name="devtools")

    async def send(self, method: str, *, session: str = "", **parameters: object) -> Any:
        """A command, and what came of it."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        await self._socket.send_str(json.dumps(message))
        try:
            async with asyncio.timeout(WAIT_S):
                return await self._answers[number]
        finally:
            del self._answers[number]

    async def tab(self) -> Tab:
        """A new one, with a storage of its own."""
        context = await self.send("Target.createBrowserContext")
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=context["browserContextId"])
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = self._tabs[attached["sessionId"]] = Tab(self, attached["sessionId"], target["targetId"])
        return tab

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                waiting = self._answers.get(said["id"])
                if waiting is None or waiting.done():
                    continue
                if "error" in said:
                    waiting.set_exception(AssertionError(said["error"]["message"]))
                else:
                    waiting.set_result(said["result"])
            elif said.get("sessionId") in self._tabs:
                self._tabs[said["sessionId"]].heard(said["method"], said["params"])

    async def close(self) -> None:
        """No more events."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@contextlib.asynccontextmanager
async def running(program: str, home: Path) -> AsyncIterator[Browser]:
    """Start it, and end it with all its processes."""
    environ = os.environ | {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "XDG_CACHE_HOME": str(home)}
    process = await asyncio.create_subprocess_exec(
        program, f"--user-data-dir={home / 'profile'}", *ARGUMENTS,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env=environ, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    drain: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(START_S):
            while (found := _LISTENS.search(line := await process.stderr.readline())) is None:
                assert line, "the browser ended at once"
        drain = asyncio.create_task(_drain(process.stderr))
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(found[1].decode(), max_msg_size=MESSAGE_BYTES_MAX) as socket,
        ):
            browser = Browser(socket)
            yield browser
            with contextlib.suppress(TimeoutError, AssertionError, ConnectionError):
                await browser.send("Browser.close")
            await browser.close()
    finally:
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if drain is not None:
            await drain


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass
