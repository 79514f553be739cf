"""A page in a real browser, driven by the Chrome DevTools Protocol over a pipe."""

from __future__ import annotations

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
BROWSER = next((path for name in _NAMES if (path := shutil.which(name))), None)
WAIT_SECONDS = 60.0


class Page:
    """A browser tab. `messages` are those of the console, and uncaught exceptions."""

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
        """Return the value of a JavaScript expression, and wait if it is a promise."""
        response = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in response, response["exceptionDetails"]
        return response["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until the JavaScript expression is true."""
        end = time.monotonic() + WAIT_SECONDS
        while not self.value(expression):
            assert time.monotonic() < end, f"never true: {expression}; {self.messages}"
            time.sleep(0.02)

    def press(self, key: str, *, is_control: bool = False) -> None:
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        event = {"key": key, "windowsVirtualKeyCode": codes[key], "modifiers": 2 if is_control else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            received = self._message()
            if received.get("id") == self._number:
                assert "error" not in received, received
                result: dict[str, Any] = received["result"]
                return result
            if received.get("method") == "Runtime.exceptionThrown":
                details = received["params"]["exceptionDetails"]
                self.messages.append(str(details.get("exception", {}).get("description", details["text"])))
            elif received.get("method") == "Log.entryAdded":
                self.messages.append(str(received["params"]["entry"]["text"]))

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], WAIT_SECONDS)
            assert ready, "the browser says nothing"
            received = os.read(self._read, 1 << 20)
            assert received, "the browser has ended"
            self._buffer += received
        content, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(content)
        return message


@contextlib.contextmanager
def browser_page(folder: Path) -> Iterator[Page]:
    """Start a browser with its profile in `folder`, and yield a tab."""
    assert BROWSER is not None
    commands, to_browser = os.pipe()
    from_browser, events = os.pipe()
    # The browser reads from 3 and writes to 4, so these descriptors must have other numbers.
    inner = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (commands, events)]
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
        for descriptor in (commands, events, *inner):
            os.close(descriptor)
        yield Page(from_browser, to_browser)
    finally:
        process.kill()
        process.wait()
        os.close(from_browser)
        os.close(to_browser)
