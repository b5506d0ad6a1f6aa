"""A headless Chromium, driven through its own pipe: the DevTools protocol, without a package for it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWERS_WITHIN_S = 60


def find() -> str:
    """The browser's path. Without one the test that asks is skipped, with a word."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip("no browser here: `apt-get install chromium` and this test runs")


class Browser:
    """One page, as wide as a phone unless told otherwise. A context manager."""

    def __init__(self, folder: Path, *, dark: bool = False, width: int = 390, height: int = 844) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "--disable-background-networking"]

        def descriptors() -> None:  # it reads from 3 and writes to 4; the pipe's ends may have these numbers
            ends = os.dup(to_browser), os.dup(from_browser)
            for end, number in zip(ends, (3, 4), strict=True):
                os.dup2(end, number)

        self._process = subprocess.Popen(
            [find(), *options, "about:blank"],
            preexec_fn=descriptors,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, None
        self.errors: list[Any] = []
        pages = self._call("Target.getTargets")["targetInfos"]
        page = next(found["targetId"] for found in pages if found["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime"):
            self._call(f"{domain}.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # its own children, which are in its session
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 30) -> Any:
        """Until it is true; returns it."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression} in {self.evaluate('document.body.innerText')!r}"
            time.sleep(0.05)
        return value

    def screenshot(self) -> bytes:
        """The whole page, as PNG."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return base64.b64decode(self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(answer["params"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], ANSWERS_WITHIN_S)
            piece = os.read(self._read, 1 << 16) if ready else b""
            assert piece, "the browser ended or does not answer"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
