"""A server on a real socket that answers without a model, after a configurable delay."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from moepass.cli.serving import open_socket
from moepass.runtime.serving.http.draining_server import DrainingServer

Answer = tuple[int, dict[str, str], Any]


class StubServer:
    """`url`, and the bodies that were asked, by route. `answer` says what one is answered with."""

    def __init__(self, answer: Callable[[str, Any], Answer], seconds: float) -> None:
        self.answer, self.seconds, self.url = answer, seconds, ""
        self.asked: list[tuple[str, Any]] = []
        self.keys: set[str] = set()
        self.open = self.most_open = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        route = scope["path"]
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        value = json.loads(body) if body else None
        self.asked.append((route, value))
        self.keys.add(dict(scope["headers"]).get(b"authorization", b"").decode())
        if self.seconds:
            await asyncio.sleep(self.seconds)
        status, headers, answer = self.answer(route, value)
        self.open -= 1
        raw = [(name.encode(), text.encode()) for name, text in headers.items()]
        content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": content})


def echo(route: str, value: Any) -> Answer:
    return 200, {"x-request-id": "stub"}, {"route": route, "echo": value}


@contextlib.contextmanager
def stub_server(answer: Callable[[str, Any], Answer] = echo, seconds: float = 0.0) -> Iterator[StubServer]:
    stub = StubServer(answer, seconds)
    config = uvicorn.Config(stub, http="h11", lifespan="off", log_level="error", timeout_graceful_shutdown=1)
    with open_socket("127.0.0.1", 0) as listening:
        server = DrainingServer(config)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        stub.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            yield stub
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server has not stopped"
