"""Headless Chromium over its debugging pipe, with nothing but the standard library: opens one file and watches."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
DEADLINE_SECONDS = 60


def find_chromium() -> str | None:
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Page:
    """One page. `requests` are the URLs that it asked for, `errors` what its console called an error or warning."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._process, self._write, self._read = process, to_browser, from_browser
        self._buffer, self._number, self._session = b"", 0, ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events on the way are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer)

    def open(self, path: Path, *, width: int = 1200, dark: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.scheme(dark=dark)
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def scheme(self, *, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def evaluate(self, expression: str) -> Any:
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression} did not come true; console: {self.errors}"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=self._whole())["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"]))

    def _whole(self) -> dict[str, float]:
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], DEADLINE_SECONDS)
            chunk = os.read(self._read, 1 << 20) if ready else b""
            assert chunk, f"Chromium ended or fell silent ({self._process.poll()})"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))


@contextmanager
def open_chromium(program: str, profile: Path) -> Iterator[Page]:
    """Start Chromium with a page; it is ended with the block."""
    browser_reads, write = os.pipe()
    read, browser_writes = os.pipe()
    arguments = [
        *(program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
        *("--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}"),
    ]
    shell = f'exec "$@" 3<&{browser_reads} 4>&{browser_writes}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "chromium", *arguments],
        pass_fds=(browser_reads, browser_writes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(browser_reads)
    os.close(browser_writes)
    try:
        yield Page(process, write, read)
    finally:
        process.kill()
        process.wait()
        os.close(write)
        os.close(read)
