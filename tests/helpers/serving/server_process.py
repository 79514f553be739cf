"""`moepass serve` as a child process, for tests that send requests to it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

START_SECONDS = 240


class ServerProcess:
    """A running server with a client for it."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.client = httpx.Client(base_url=url, timeout=60)

    def end(self) -> int:
        """Ask the server to end with SIGTERM, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def serving(*arguments: str, cache: Path) -> Iterator[ServerProcess]:
    """Start `moepass serve` with `arguments` at a free port, with one thread for each rank; wait until it is ready."""
    program = [sys.executable, "-m", "moepass.cli", "serve", *arguments, "--port", "0", "--threads", "1"]
    environment = {**os.environ, "MOEPASS_CACHE_DIR": str(cache)}
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert address, process.stderr.read()
        server = ServerProcess(process, address[0])
        end = time.monotonic() + START_SECONDS
        while server.client.get("/ready").status_code != 200:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
