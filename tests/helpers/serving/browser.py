"""A page in a real browser, driven by the Chrome DevTools Protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in _NAMES if (found := shutil.which(name))), None)
WAIT_SECONDS = 60.0


class Page:
    """One tab. `messages` are those of the console, and exceptions that nobody caught."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer = b""
        self._number = 0
        self.messages: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._call(method, self._session, **parameters)

    def open(self, url: str, width: int = 1280, height: int = 900, *, is_dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until it is true."""
        end = time.monotonic() + WAIT_SECONDS
        while not self.value(expression):
            assert time.monotonic() < end, f"never true: {expression}; {self.messages}"
            time.sleep(0.02)

    def press(self, key: str, *, is_control: bool = False) -> None:
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        given = {"key": key, "windowsVirtualKeyCode": codes[key], "modifiers": 2 if is_control else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self, file: Path) -> None:
        """Of the whole page, as long as it is."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._message()
            if found.get("id") == self._number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            if found.get("method") == "Runtime.exceptionThrown":
                details = found["params"]["exceptionDetails"]
                self.messages.append(str(details.get("exception", {}).get("description", details["text"])))
            elif found.get("method") == "Log.entryAdded":
                self.messages.append(str(found["params"]["entry"]["text"]))

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], WAIT_SECONDS)
            assert ready, "the browser says nothing"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        content, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(content)
        return found


@contextlib.contextmanager
def browser_page(folder: Path) -> Iterator[Page]:
    """A tab of a browser of its own, whose profile is in `folder`."""
    assert BROWSER is not None
    commands, to_browser = os.pipe()
    from_browser, events = os.pipe()
    # The browser reads from 3 and writes to 4; neither may be one of these meanwhile.
    inner = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (commands, events)]
    program = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", "--no-first-run", "--disable-background-networking",
    ]  # fmt: skip

    def place() -> None:
        os.dup2(inner[0], 3)
        os.dup2(inner[1], 4)

    process = subprocess.Popen(
        program, pass_fds=(3, 4), preexec_fn=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for one in (commands, events, *inner):
            os.close(one)
        yield Page(from_browser, to_browser)
    finally:
        process.kill()
        process.wait()
        os.close(from_browser)
        os.close(to_browser)
