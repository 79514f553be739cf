"""`moepass serve` as a process, its ranks, and minimal HTTP connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

MOST_START_SECONDS = 600.0


_METRIC = re.compile(r'^([a-z_:]+)(?:\{(?:[^}]*finished_reason="(\w+)")?[^}]*\})? (\S+)$', re.M)
_FINISHED = {"stop": "answered", "abort": "given_up", "error": "failed"}


class ServedProcess:
    """A running server that is ready and listens on 127.0.0.1:`port`."""

    def __init__(self, process: psutil.Popen, port: int) -> None:
        self.process, self.port = process, port

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the processes of the current ranks."""
        values = {}
        for child in self.process.children():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if "moepass.cli.serve_rank" in words:
                    values[int(words[words.index("moepass.cli.serve_rank") + 2])] = child
        return values

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and text of a GET request."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """Return the server's metrics by their names without prefix."""
        metrics: dict[str, float] = {}
        for name, reason, value in _METRIC.findall(self.get("/metrics")[1]):
            short = name.removeprefix("moepass_").removesuffix("_total").removeprefix("requests_")
            metrics[_FINISHED.get(reason, short)] = float(value)
        return metrics

    def end(self) -> int:
        """Send SIGTERM, and return the exit status."""
        self.process.terminate()
        return int(self.process.wait(60))


@contextlib.contextmanager
def served_process(arguments: Sequence[str], environment: Mapping[str, str], log: Any) -> Iterator[ServedProcess]:
    """Start a server with `arguments`, and write its output to the file `log`."""
    command = [sys.executable, "-m", "moepass.cli", "serve", *arguments, "--port", "0"]
    process = psutil.Popen(command, stderr=subprocess.PIPE, stdout=log, env=dict(environment), text=True)
    try:
        line = process.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if address is None:
            raise RuntimeError(line + process.stderr.read())
        # The file is only written from here on.
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=log)
        served = ServedProcess(process, int(address[1]))
        end = time.monotonic() + MOST_START_SECONDS
        while served.get("/ready")[0] != 200:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the server is not ready; see its log")
            time.sleep(0.2)
        yield served
    finally:
        for child in [*process.children(), process] if process.is_running() else []:
            with contextlib.suppress(psutil.Error):
                child.kill()
        process.wait()
        drain.wait()


def posted(path: str, body: Any) -> bytes:
    """Return the bytes of an HTTP request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


class Connection:
    """A connection that is kept open, and reopened if the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, data: bytes) -> None:
        """Send `data`, on a new connection if necessary."""
        if self._writer is None or self._writer.is_closing() or self._is_ended():
            self.close()
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(data)

    async def receive(self) -> tuple[int, bytes]:
        """Return the status and the body of the next answer. Raises asyncio.IncompleteReadError or OSError."""
        assert self._reader is not None
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head, re.I)[1])  # type: ignore[index]
        return int(head[9:12]), await self._reader.readexactly(length)

    async def ask(self, data: bytes) -> tuple[int, bytes]:
        """Send `data`, and return the status and the body of the answer."""
        await self.send(data)
        return await self.receive()

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    def surplus(self) -> int:
        """Return received bytes that belong to no answer."""
        return len(getattr(self._reader, "_buffer", b""))

    def _is_ended(self) -> bool:
        return self._reader is None or self._reader.at_eof()
