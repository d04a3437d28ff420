"""A page in a real browser: Chromium, driven over its DevTools protocol (no driver package needed)."""

from __future__ import annotations

import asyncio
import base64
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import orjson

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def executable() -> str | None:
    """The browser's path, if the machine has one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. `console`: what the page complained about, network failures included."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.console: list[str] = []
        self.requested: list[str] = []
        self._numbers = count(1)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result; events that come before it are noted."""
        number = next(self._numbers)
        message = orjson.dumps({"id": number, "method": method, "params": params})
        await self.socket.send_str(message.decode())
        while True:
            answer = orjson.loads((await self.socket.receive(timeout=30)).data)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)

    async def until(self, event: str) -> None:
        """Returns when the event came."""
        while True:
            message = orjson.loads((await self.socket.receive(timeout=30)).data)
            self._note(message)
            if message.get("method") == event:
                return

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.console.append(str(params["args"]))
            case "Runtime.exceptionThrown":
                self.console.append(str(params["exceptionDetails"]["text"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.console.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def open(self, url: str, width: int, height: int = 900) -> None:
        """Loads the page in a window of this size (CSS pixels), a phone's when narrow."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self.call("Page.navigate", url=url)
        await self.until("Page.loadEventFired")

    async def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def page() -> AsyncIterator[Page]:
    """A tab of a fresh headless Chromium, which ends with the block."""
    profile = Path(tempfile.mkdtemp(prefix="glm-sglang-browser-"))
    flags = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--disable-quic", "--disable-dev-shm-usage"),
        *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
    )
    silent = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(str(executable()), *flags, stdout=silent, stderr=silent)
    try:
        port = await _port(profile, process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as listed:
                tab = next(t for t in orjson.loads(await listed.read()) if t["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                opened = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await opened.call(f"{domain}.enable")
                yield opened
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)
        shutil.rmtree(profile, ignore_errors=True)


async def _port(profile: Path, process: asyncio.subprocess.Process) -> int:
    """The DevTools port, which Chromium writes into its profile."""
    file = profile / "DevToolsActivePort"
    for _ in range(600):
        assert process.returncode is None, "the browser ended"
        if file.exists() and (text := file.read_text()):
            return int(text.split()[0])
        await asyncio.sleep(0.1)
    raise TimeoutError("the browser opened no DevTools port within 60 s")
