"""A server listens at its address, answers its open requests when it is ended, and then ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from moepass.cli.serving import open_socket, url_of
from moepass.models.errors import OptionError
from moepass.runtime.serving.http.draining_server import make_server
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.backend import Backend, BackendStatus
from moepass.runtime.serving.requests.request import Request
from tests.helpers.graphs.error_fields import refused
from tests.helpers.serving.served import Served


def test_a_port_that_is_taken_is_refused() -> None:
    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert taken.proto == socket.IPPROTO_TCP
        with refused(OptionError, name="host", value=("127.0.0.1", port)):
            open_socket("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", -1), ("127.0.0.1", 1 << 16), ("no such host", 0), ("a" * 999, 0)]
)
def test_invalid_addresses_are_refused(host: str, port: int) -> None:
    with pytest.raises(OptionError):
        open_socket(host, port)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::", "fe80::1", "localhost", "2001:db8::2:1"])
def test_clients_find_host_and_port_in_the_url(host: str) -> None:
    url = httpx.URL(url_of(host, 8123))
    assert (url.host, url.port) == (host, 8123)


def test_the_second_signal_ends_at_once(chat: Served) -> None:
    server = make_server(chat.service)
    server.handle_exit(signal.SIGTERM, None)
    assert (server.should_exit, server.force_exit) == (True, False)
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit


def test_concurrent_clients_get_their_own_answers(chat: Served) -> None:
    def ask(number: int) -> dict[str, Any]:
        question = {"type": "predicate", "instructions": f"Is it {number}?"}
        body = {"model": "tiny", "input": f"text {number} " * 20 * (number % 8), "questions": [question] * (number + 1)}
        body["input"] = f"It is {number}. {body['input']}"
        with httpx.Client(base_url=chat.url, timeout=60) as client:
            response = client.post("/v1/decisions", json=body)
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        return reply

    alone = [ask(number) for number in range(16)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone


# A server whose backend prints when it is asked, and answers a second later.
_PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.helpers.serving.reference_backend import ReferenceBackend
from moepass.models.checkpoint.checkpoint_folders import load_prompt, load_tokenizer
from moepass.models.checkpoint.load_model import load_model
from moepass.runtime.serving.http.draining_server import make_server
from moepass.cli.serving import open_socket
from moepass.runtime.serving.routes.server_settings import ServerSettings
from moepass.runtime.serving.routes.service import Service
from moepass.runtime.serving.questions.prompts import PromptWriter

class Slow(ReferenceBackend):
    async def answer(self, request, **options):
        print("asked", flush=True)
        await asyncio.sleep(1)
        return await super().answer(request, **options)

folder = Path(sys.argv[1])
writer = PromptWriter(load_tokenizer(folder), load_prompt(folder), 64)
with open_socket("127.0.0.1", 0) as opened:
    print(opened.getsockname()[1], flush=True)
    make_server(Service(Slow(load_model(folder)), writer, ServerSettings(("tiny",)))).run([opened])
print("ended", flush=True)
"""


@pytest.mark.slow
def test_sigterm_answers_open_requests_and_exits_0(checkpoint: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(checkpoint)]
    # Exclude the current folder from sys.path, because it may contain the sources.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            body = {"prompt": "a", "max_tokens": 1}
            answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=30)
            assert process.stdout.readline() == "asked\n"
            process.send_signal(signal.SIGTERM)
            assert answer.result().status_code == 200
        assert process.stdout.readline() == "ended\n"
        assert process.wait(30) == 0


class _Patient:
    """A backend that never answers, and otherwise behaves like another backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.asked = threading.Event()

    def check_room(self) -> None:
        self.backend.check_room()

    async def answer(
        self, request: Request, *, priority: int = 0, timeout_seconds: float, is_admitted: bool = False
    ) -> Answer:
        self.asked.set()
        await asyncio.sleep(timeout_seconds)
        raise AssertionError("the call was not cancelled")

    def status(self) -> BackendStatus:
        return self.backend.status()


@pytest.mark.slow
def test_requests_that_are_open_after_the_drain_time_get_an_error_reply(chat: Served) -> None:
    backend = _Patient(chat.backend)
    server = make_server(dataclasses.replace(chat.service, backend=backend), drain_seconds=1)
    with open_socket("127.0.0.1", 0) as opened, concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.run, [opened])
        url = f"http://127.0.0.1:{opened.getsockname()[1]}/v1/completions"
        answer = pool.submit(httpx.post, url, json={"prompt": "a", "max_tokens": 1}, timeout=30)
        assert backend.asked.wait(30)
        server.should_exit = True
        response = answer.result()
        running.result(30)
    assert response.status_code == 503
    assert "ended" in response.json()["error"]["message"]
